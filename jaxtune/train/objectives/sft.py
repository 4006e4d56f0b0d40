"""Supervised fine-tuning, the smallest objective and the default."""

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
from jaxtune.train.data.rendering.pictures import PictureOptions
from jaxtune.train.objectives.loss import Forward
from jaxtune.train.objectives.objective import Declared


@dataclasses.dataclass(frozen=True)
class SFT(Declared):
    """Mean next-token cross-entropy of trained tokens."""

    name: ClassVar[str] = "sft"  # by which objective.name selects it
    unit: ClassVar[str] = "targets"  # what the count of `loss` counts
    sums: ClassVar[tuple[str, ...]] = ()  # names of further sums of `loss`, for metrics: none
    head: ClassVar[Head] = TEXT  # the model must have a head that predicts tokens
    reads_pictures: ClassVar[bool] = True

    def prepare(
        self,
        rows: Any,
        tokenizer: Any,
        data: DataConfig,
        *,
        vocab_size: int,
        max_rows: int | None,
        pictures: PictureOptions | None = None,
    ) -> TokenDataset:
        if isinstance(rows, TokenDataset):
            rows.require_vocabulary(vocab_size)
            return rows
        options = {key: getattr(data, key) for key in (*ROW_OPTIONS, "today", "cache_dir", "num_workers")}
        return prepare(rows, tokenizer, vocab_size=vocab_size, max_rows=max_rows, pictures=pictures, **options)

    def check(self, model: Decoder) -> None:
        """Accepts every model."""

    def loss(self, model: Decoder, batch: Batch, forward: Forward) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        loss, count = forward.cross_entropy(model, forward(model, batch), batch)
        return loss, count, {}

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        return {}


SUPERVISED = SFT()
