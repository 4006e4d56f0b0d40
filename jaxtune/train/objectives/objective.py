"""The words in which an objective speaks to the step and to the loop."""

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
    """A frozen, hashable value, such as a frozen dataclass; see sft.py for the smallest one.

    Attributes:
      unit: what `count` counts, in plural: "targets", "pairs". The mean loss is over them, and metrics have their
        number under this name.
      sums: names of the objective's own sums.
      head: the head that the model must have; a run of the command gives it a new one where it has a language model's.
      reference_runs: forward passes of a model that does not train, in each loss (Forward.frozen): the planner counts
        their time.
    """

    unit: ClassVar[str]
    sums: ClassVar[tuple[str, ...]]
    head: ClassVar[Head]

    @property
    def reference_runs(self) -> int: ...

    def prepare(
        self, rows: Any, tokenizer: Any, data: DataConfig, *, vocab_size: int, max_rows: int | None
    ) -> TokenDataset:
        """Tokenised rows, which give packed batches.

        Args:
          rows: a path, a data set's name, a list of dicts, or what this function gave before. data: how they are read.
          vocab_size: of the model; token ids beyond it are refused. max_rows: read no more than these.
        Raises:
          ValueError: rows that cannot be trained on.
        """
        ...

    def check(self, model: Decoder) -> None:
        """Refuses a model that the objective cannot train, whose arrays may be shapes.

        Raises:
          ValueError: the message says what to change.
        """
        ...

    def loss(self, model: Decoder, batch: Batch, forward: Forward) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """(sum of losses, count, {name: sum}) of a micro-batch: float32 scalars, differentiable by the first.

        All are plain sums over the rows, so that micro-batches and devices add up: the step's loss is the sum of the
        first over the sum of the second. It is traced under jit, for evaluation too.

        Args:
          forward: runs the model; see Forward.
        """
        ...

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """{name: number} for the metrics of a step or an evaluation, from the sums of all of it.

        sums: {"loss", "count" and the names of `sums`: number}, arrays under jit and floats in an evaluation; count may
        be 0.
        """
        ...
