"""The interface of objectives, which the train step, the evaluation and the training loop call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import jax

from jaxtune.models.decoder import Decoder
from jaxtune.models.heads import Head
from jaxtune.train.config import DataConfig
from jaxtune.train.data import Batch, TokenDataset
from jaxtune.train.program.loss import Forward


class Objective(Protocol):
    """What a model is trained for: how rows become batches, what the loss of a batch is, and which metrics it has.
    Implementations are frozen, hashable values, such as frozen dataclasses, because compiled programs depend on them;
    sft.py has the smallest one."""

    unit: ClassVar[str]
    """What the count of `loss` counts, in plural, such as "targets" or "pairs". The mean loss is a mean over them, and
    the metrics have their number under this name."""
    sums: ClassVar[tuple[str, ...]]
    """The names of the further sums that `loss` returns."""
    head: ClassVar[Head]
    """The head that the model must have. The train command replaces a language model's head by a new one of this
    kind."""

    @property
    def reference_runs(self) -> int:
        """The number of forward passes of a frozen model in each loss (`Forward.frozen`), whose time the planner adds
        to its forecast."""
        ...

    def prepare(
        self, rows: Any, tokenizer: Any, data: DataConfig, *, vocab_size: int, max_rows: int | None
    ) -> TokenDataset:
        """Reads and tokenises rows into a data set that gives packed batches.

        Args:
          rows: a path, a data set's name, a list of dicts, or a data set that this method returned earlier.
          tokenizer: a fast Hugging Face tokenizer.
          data: the options of reading, templates and packing.
          vocab_size: the model's; larger token ids are refused.
          max_rows: the most rows to read; None reads all.
        Raises:
          ValueError: the rows cannot be trained on.
        """
        ...

    def check(self, model: Decoder) -> None:
        """Checks that the objective can train this model; the Trainer calls it first. The model's arrays may be
        `jax.ShapeDtypeStruct`s.

        Raises:
          ValueError: it cannot; the message says what to change.
        """
        ...

    def loss(self, model: Decoder, batch: Batch, forward: Forward) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """The loss of a micro-batch, as sums. It is traced under jit, in train steps and in evaluations.

        All values are plain sums over the rows, which are added up over micro-batches and devices: the loss of a step
        is the total of the first divided by the total of the second.

        Args:
          model: the model that is trained.
          batch: the rows.
          forward: runs the model and computes log-probabilities; see Forward.
        Returns:
          (the sum of the losses, the count of what they are of, {name: sum} for each name in `sums`): float32 scalars.
          Gradients are taken of the first.
        """
        ...

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """The objective's metrics of a step or an evaluation, {name: number}.

        Args:
          sums: the totals over all micro-batches by name: "loss", "count" and the names in `sums`. They are arrays
            under jit and floats in an evaluation; the count may be 0.
        """
        ...
