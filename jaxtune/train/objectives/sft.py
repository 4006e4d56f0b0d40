"""Supervised fine-tuning, the smallest objective: the mean cross-entropy of the trained tokens of a step. `SFT` is the
class, and `SUPERVISED` an object of it, the objective of a run or a train step that names no other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from jaxtune.models.decoder import Decoder
from jaxtune.models.heads import TEXT, Head
from jaxtune.train.config import ROW_OPTIONS, DataConfig
from jaxtune.train.data.batches import Batch
from jaxtune.train.data.dataset import TokenDataset, prepare
from jaxtune.train.program.loss import Forward


@dataclasses.dataclass(frozen=True)
class SFT:
    """The objective (`objective.Objective`) of supervised fine-tuning: next-token cross-entropy over the tokens that
    are trained. It is the default of a run. Distillation (`Distill`) inherits from it, as it trains on the same rows by
    another loss."""

    unit: ClassVar[str] = "targets"  # what the count of `loss` counts
    sums: ClassVar[tuple[str, ...]] = ()  # names of further sums of `loss`, for metrics: none
    head: ClassVar[Head] = TEXT  # the model must have a head that predicts tokens

    @property
    def reference_runs(self) -> int:
        """The number of forward passes of a frozen model in each loss, whose time the planner adds to its forecast: 0,
        as there is no reference."""
        return 0

    def prepare(
        self, rows: Any, tokenizer: Any, data: DataConfig, *, vocab_size: int, max_rows: int | None
    ) -> TokenDataset:
        """Reads and tokenises rows into a data set that gives packed batches, or opens the token cache that an earlier
        call wrote for the same rows. A run calls it for its rows of training and of evaluation.

        Args:
          rows: a path, a data set's name, a list of dicts (which is not cached), or a TokenDataset, which is returned
            after its token ids are checked; `vocab_size` is then the only other argument that is used.
          tokenizer: a fast Hugging Face tokenizer.
          data: the options of reading, templates and packing.
          vocab_size: the size of the model's vocabulary; token ids that are not below it are refused.
          max_rows: the most rows to read; None reads all.
        Raises:
          ValueError: the rows cannot be trained on, such as those with a token id of `vocab_size` or more.
        """
        if isinstance(rows, TokenDataset):
            rows.require_vocabulary(vocab_size)
            return rows
        options = {key: getattr(data, key) for key in (*ROW_OPTIONS, "today", "cache_dir", "num_workers")}
        return prepare(rows, tokenizer, vocab_size=vocab_size, max_rows=max_rows, **options)

    def check(self, model: Decoder) -> None:
        """Accepts every `model`: nothing is checked, because the objective has no reference that must stay fixed. The
        Trainer calls the method of every objective before anything is compiled."""

    def loss(self, model: Decoder, batch: Batch, forward: Forward) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """The loss of `batch`, a micro-batch: (the sum of the cross-entropies of trained targets, in nats; their
        number; {}), float32 scalars that are added up over micro-batches and devices. The train step differentiates it,
        and evaluation calls it too. forward: runs `model` and computes the cross-entropy."""
        loss, count = forward.cross_entropy(model, forward(model, batch), batch)
        return loss, count, {}

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Returns {}: this objective has no metrics besides the loss, and `sums`, the totals of what `loss` returns,
        are not used. The train step and evaluation call the method of every objective."""
        return {}


SUPERVISED = SFT()
