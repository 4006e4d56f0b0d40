"""The interface of objectives (`Objective`), which the train step, the evaluation and the training loop call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import jax

from jaxtune.models.decoder import Decoder
from jaxtune.models.heads import Head
from jaxtune.train.config import DataConfig
from jaxtune.train.data.batches import Batch
from jaxtune.train.data.dataset import TokenDataset
from jaxtune.train.program.loss import Forward


class Objective(Protocol):
    """What a model is trained for. `prepare` makes a data set of rows, `check` refuses a model that the objective
    cannot train, `loss` computes the loss of a micro-batch as sums, and `metrics` makes metrics of the sums. A Trainer
    is given one, or makes the one that its config names (`named.objective_of`). Implementations are frozen, hashable
    values, such as frozen dataclasses, because compiled programs depend on them; sft.py has the smallest one."""

    unit: ClassVar[str]
    """What the count that `loss` returns counts, in plural, such as "targets" or "pairs". The loss of a step is the
    mean over them, and the step's metrics have their number under this name. The plot of the losses says so on its
    axis; "targets" are trained tokens, and their losses are in nats."""
    sums: ClassVar[tuple[str, ...]]
    """The names of the sums for metrics that `loss` returns in its dict, beside the loss and the count. Those that an
    attribute `largest` names, too, are largest values from 0 on, which are not added up."""
    head: ClassVar[Head]
    """The kind of head that the model must have: one that predicts tokens, or one that scores texts. The train command
    replaces the head of a model of another kind by a new one."""

    @property
    def reference_runs(self) -> int:
        """The number of forward passes of a frozen model (a reference or a teacher) in the computation of each loss,
        whose time the planner adds to its forecast; 0 if there is none. Which model runs, and whether, is decided in
        `loss`."""
        ...

    def prepare(
        self, rows: Any, tokenizer: Any, data: DataConfig, *, vocab_size: int, max_rows: int | None
    ) -> TokenDataset:
        """Reads and tokenises rows, for training or for evaluation, into a data set that gives packed batches; or opens
        the token cache that an earlier call wrote for the same rows (a list of dicts is not cached). A run calls it for
        each of its sets of rows, except those to which it samples answers.

        Args:
          rows: a path, a data set's name, a list of dicts, or a data set that this method returned earlier, which is
            checked and returned.
          tokenizer: a fast Hugging Face tokenizer.
          data: the options of reading, templates and packing.
          vocab_size: the size of the model's vocabulary; token ids that are not below it are refused.
          max_rows: the most rows to read; None reads all.
        Raises:
          ValueError: the rows cannot be trained on.
        """
        ...

    def check(self, model: Decoder) -> None:
        """Checks that the objective can train this model, such as by its head or by whether its reference stays fixed.
        The Trainer calls it before it plans or compiles anything, so the model's arrays may be `jax.ShapeDtypeStruct`s.

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
          batch: the rows of the micro-batch.
          forward: runs the model and computes log-probabilities; see Forward.
        Returns:
          (the sum of the losses; the number of `unit` that were summed; {name: sum} for each name in `sums`): float32
            scalars. Gradients are taken of the first.
        """
        ...

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """The objective's metrics of a step or an evaluation, {name: number}, beside the mean loss, which the caller
        computes: they are logged. The train step and the evaluation call it.

        Args:
          sums: the totals over all micro-batches by name: "loss", "count" and the names in `sums`. They are arrays
            under jit in a train step and floats in an evaluation. The count may be 0, so a division must guard against
            it.
        """
        ...
