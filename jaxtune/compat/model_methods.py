"""Methods of torch's, transformers' and PEFT's models that scripts call, beside those that do the work."""

from __future__ import annotations

from typing import Self

import jax
import numpy as np
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.system.terminal import say
from jaxtune.train.display.report import parameter_counts


class ModelMethods:
    """What a CompatModel answers to scripts that treat it as a torch module. Weights stay where they are, because XLA
    places them; a model has no mode of training or evaluation, because dropout belongs to the train step."""

    residuals: str | None

    @property
    def module(self) -> Decoder:
        """The current module, a jaxtune.Decoder; CompatModel defines it."""
        raise NotImplementedError

    @property
    def device(self) -> object:
        """The jax.Device of the weights, or the first of several. `tensor.to(model.device)` leaves arrays as they
        are."""
        leaf = jax.tree.leaves(nnx.state(self.module, nnx.Param))[0]
        return min(leaf.devices(), key=lambda device: device.id)

    @property
    def dtype(self) -> np.dtype:
        """The NumPy dtype in which the model computes."""
        return jax.numpy.dtype(self.module.dtype)

    def eval(self) -> Self:
        """The model itself: there is no mode to switch."""
        return self

    def train(self, mode: bool = True) -> Self:
        """The model itself: there is no mode to switch. (SFTTrainer.train trains.)"""
        del mode
        return self

    def to(self, *_: object, **others: object) -> Self:
        """The model itself: arguments such as a device or a dtype have no effect."""
        del others
        return self

    cuda = cpu = to

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: object = None) -> None:
        """Lets the planner recompute or offload what does not fit, as it does by default."""
        del gradient_checkpointing_kwargs
        self.residuals = None

    def gradient_checkpointing_disable(self) -> None:
        """Keeps every residual on the device, if no argument of the trainer says otherwise."""
        self.residuals = "keep"

    def enable_input_require_grads(self) -> None:
        """Does nothing: gradients reach adapters without it."""

    def num_parameters(self, only_trainable: bool = False) -> int:
        """The number of parameters, or only of those that train; a quantised parameter counts as one."""
        trainable, everything = parameter_counts(self.module)
        return trainable if only_trainable else everything

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """(trainable parameters, all parameters), as in PEFT."""
        return parameter_counts(self.module)

    def print_trainable_parameters(self) -> None:
        """Prints the number of trainable parameters as PEFT does."""
        trainable, everything = parameter_counts(self.module)
        say(
            f"trainable params: {trainable:,} || all params: {everything:,} || trainable%: "
            f"{100 * trainable / everything:.4f}"
        )

    def resize_token_embeddings(self, new_num_tokens: int | None = None, **_: object) -> None:
        """Checks that the model has an embedding for each token; it gets no new ones.

        Raises:
          ValueError: the tokenizer has more tokens than the model has embeddings.
        """
        size = self.module.config.vocab_size
        if new_num_tokens is not None and new_num_tokens > size:
            raise ValueError(
                f"resize_token_embeddings: new_num_tokens = {new_num_tokens:,}, and the model has {size:,} embeddings; "
                "embeddings are not added here. Instead: a tokenizer without added tokens, or a model whose vocabulary "
                "has them"
            )
