"""`ModelMethods`: methods of torch's, transformers' and PEFT's models that scripts call and that have little or nothing
to do here. CompatModel (model.py) inherits them."""

from __future__ import annotations

from typing import Self

import jax
import numpy as np
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.system.terminal import say
from jaxtune.train.display.report import parameter_counts


class ModelMethods:
    """The base class of CompatModel with the methods that scripts call because they treat a model as a torch module.
    Moving a model and switching its mode have no effect: XLA places the weights, and dropout belongs to the train
    step."""

    residuals: str | None  # "keep": every residual stays on the device; None: the planner decides

    @property
    def module(self) -> Decoder:
        """The current module, a jaxtune.Decoder. This class only declares it (NotImplementedError): CompatModel defines
        it."""
        raise NotImplementedError

    @property
    def device(self) -> object:
        """The jax.Device of the model's first array; of several, the one with the lowest id. Scripts use it in
        `tensor.to(model.device)`, which leaves arrays unchanged."""
        leaf = jax.tree.leaves(nnx.state(self.module))[0]
        return min(leaf.devices(), key=lambda device: device.id)

    @property
    def dtype(self) -> np.dtype:
        """The NumPy dtype in which the model computes, such as bfloat16 (weights may be stored quantised). Scripts read
        it as of a torch module."""
        return jax.numpy.dtype(self.module.dtype)

    def eval(self) -> Self:
        """torch's method: returns the model unchanged: there is no mode to switch."""
        return self

    def train(self, mode: bool = True) -> Self:
        """Returns the model unchanged, whatever `mode` is: there is no mode to switch. SFTTrainer.train trains the
        model."""
        del mode
        return self

    def to(self, *_: object, **others: object) -> Self:
        """torch's method, as are cuda and cpu: returns the model unchanged: arguments such as a device or a dtype are
        ignored."""
        del others
        return self

    cuda = cpu = to

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: object = None) -> None:
        """Lets the planner recompute or offload residuals that do not fit in the device's memory, as it does by
        default, unless SFTConfig's gradient_checkpointing is set. It is transformers' method. The argument is
        ignored."""
        del gradient_checkpointing_kwargs
        self.residuals = None

    def gradient_checkpointing_disable(self) -> None:
        """transformers' method: keeps every residual of the backward pass on the device, unless SFTConfig's
        gradient_checkpointing is set."""
        self.residuals = "keep"

    def enable_input_require_grads(self) -> None:
        """Does nothing: gradients reach the adapters without this call, which PEFT needs."""

    def num_parameters(self, only_trainable: bool = False) -> int:
        """Returns the number of the model's parameters: all of them, or with only_trainable=True those that train. Each
        element of a quantised matrix counts as one."""
        trainable, everything = parameter_counts(self.module)
        return trainable if only_trainable else everything

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """For scripts: returns the numbers (trainable parameters, all parameters), as in PEFT. Each element of a
        quantised matrix counts as one."""
        return parameter_counts(self.module)

    def print_trainable_parameters(self) -> None:
        """Prints the number of trainable parameters, of all parameters, and the percentage, in PEFT's words, as one
        line on stdout."""
        trainable, everything = parameter_counts(self.module)
        say(
            f"trainable params: {trainable:,} || all params: {everything:,} || trainable%: "
            f"{100 * trainable / everything:.4f}"
        )

    def resize_token_embeddings(self, new_num_tokens: int | None = None, **_: object) -> None:
        """transformers' method, which scripts call after they added tokens. It checks that the model has an embedding
        for each of `new_num_tokens` tokens (None: nothing is checked). It never changes the embeddings.

        Raises:
          ValueError: new_num_tokens is larger than the model's number of embeddings.
        """
        size = self.module.config.vocab_size
        if new_num_tokens is not None and new_num_tokens > size:
            raise ValueError(
                f"resize_token_embeddings: new_num_tokens = {new_num_tokens:,}, and the model has {size:,} embeddings; "
                "embeddings are not added here. Instead: a tokenizer without added tokens, or a model whose vocabulary "
                "has them"
            )
