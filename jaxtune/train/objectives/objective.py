"""The interface of objectives."""

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
    """What a model is trained for. Implementations are frozen, hashable values, because compiled programs depend on
    them.
    """

    unit: ClassVar[str]
    """What the count of `loss` counts, plural, such as "pairs"; the loss of a step is the mean over them. "targets" are
    trained tokens, with losses in nats.
    """
    sums: ClassVar[tuple[str, ...]]
    """Names of `loss`'s further sums for metrics. Those in an attribute `largest` are largest values from 0 on, not
    sums.
    """
    head: ClassVar[Head]
    """Whether the model's head must predict tokens or score texts."""

    @property
    def reference_runs(self) -> int:
        """Forward passes of a frozen model in each loss, for the planner's forecast."""
        ...

    def prepare(
        self, rows: Any, tokenizer: Any, data: DataConfig, *, vocab_size: int, max_rows: int | None
    ) -> TokenDataset:
        """Rows, tokenised and cached, as a data set of packed batches.

        Raises ValueError for unusable rows.

          rows: a path, a data set's name, a list of dicts, or an earlier result, which is checked and returned.
          tokenizer: a fast Hugging Face tokenizer.
          vocab_size: all ids must be below it.
          max_rows: None reads all.
        """
        ...

    def check(self, model: Decoder) -> None:
        """Raises ValueError, with what to change, if the objective cannot train this model. Arrays may be
        `jax.ShapeDtypeStruct`s.
        """
        ...

    def loss(self, model: Decoder, batch: Batch, forward: Forward) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """(Sum of losses, number of `unit`, {name: sum}) of a micro-batch, float32 scalars, traced under jit; gradients
        are of the first.

        They are added up over micro-batches and devices; a step's loss is total over total. forward: runs the model.
        """
        ...

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Metrics of a step or evaluation beside the mean loss. sums: totals with "loss" and "count", arrays under jit
        or floats. The count may be 0: guard divisions.
        """
        ...
