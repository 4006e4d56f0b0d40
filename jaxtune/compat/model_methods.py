"""Methods of torch's, transformers' and PEFT's models that have little or nothing to do here."""

from __future__ import annotations

from typing import Self

import jax
import numpy as np
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.system.terminal import say
from jaxtune.train.display.report import parameter_counts


class ModelMethods:
    """Base of CompatModel. Moving a model and switching its mode have no effect: XLA places the weights, and dropout
    belongs to the train step.
    """

    residuals: str | None  # "keep": every residual stays on the device; None: the planner decides

    @property
    def module(self) -> Decoder:
        """The current module; a subclass defines it."""
        raise NotImplementedError

    @property
    def device(self) -> object:
        """The device of the model's first array; of several, the one with the lowest id."""
        leaf = jax.tree.leaves(nnx.state(self.module))[0]
        return min(leaf.devices(), key=lambda device: device.id)

    @property
    def dtype(self) -> np.dtype:
        """The NumPy dtype in which the model computes; weights may be stored quantised."""
        return jax.numpy.dtype(self.module.dtype)

    def eval(self) -> Self:
        """Returns the model unchanged: there is no mode to switch."""
        return self

    def train(self, mode: bool = True) -> Self:
        """Returns the model unchanged; SFTTrainer.train trains it."""
        del mode
        return self

    def to(self, *_: object, **others: object) -> Self:
        """Returns the model unchanged."""
        del others
        return self

    cuda = cpu = to

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: object = None) -> None:
        """Lets the planner recompute or offload residuals, the default, unless SFTConfig says otherwise."""
        del gradient_checkpointing_kwargs
        self.residuals = None

    def gradient_checkpointing_disable(self) -> None:
        """Keeps every residual on the device, unless SFTConfig sets gradient_checkpointing."""
        self.residuals = "keep"

    def enable_input_require_grads(self) -> None:
        """Does nothing: gradients reach the adapters without this call, which PEFT needs."""

    def num_parameters(self, only_trainable: bool = False) -> int:
        """The number of (trainable) parameters; each element of a quantised matrix counts as one."""
        trainable, everything = parameter_counts(self.module)
        return trainable if only_trainable else everything

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """(trainable parameters, all parameters); each element of a quantised matrix counts as one."""
        return parameter_counts(self.module)

    def print_trainable_parameters(self) -> None:
        """Prints the trainable and all parameters in PEFT's words, on stdout."""
        trainable, everything = parameter_counts(self.module)
        say(
            f"trainable params: {trainable:,} || all params: {everything:,} || trainable%: "
            f"{100 * trainable / everything:.4f}"
        )

    def resize_token_embeddings(self, new_num_tokens: int | None = None, **_: object) -> None:
        """Raises ValueError if the model has fewer than `new_num_tokens` embeddings; it never adds any."""
        size = self.module.config.vocab_size
        if new_num_tokens is not None and new_num_tokens > size:
            raise ValueError(
                f"resize_token_embeddings: new_num_tokens = {new_num_tokens:,}, and the model has {size:,} embeddings; "
                "embeddings are not added here. Instead: a tokenizer without added tokens, or a model whose vocabulary "
                "has them"
            )
