"""Supervised fine-tuning: the cross-entropy of the tokens that are trained on, a mean over all of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxtune.models.decoder import Decoder
from jaxtune.train.data.batches import Batch
from jaxtune.train.loss import Forward


@dataclasses.dataclass(frozen=True)
class SFT:
    """Next-token cross-entropy; see objective.Objective."""

    unit = "targets"
    sums = ()

    def loss(self, model: Decoder, batch: Batch, forward: Forward) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        loss, count = forward.cross_entropy(model, forward(model, batch), batch)
        return loss, count, {}

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        return {}


SUPERVISED = SFT()
