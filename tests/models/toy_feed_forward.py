"""A feed-forward without a gate: down(relu(up(x))^2). All that jaxtune has to know of it is in this file."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
from flax import nnx

from jaxtune.models.layers.segment import INPUT, OUTPUT, BackwardOrder, Residual, Scratch, Segment
from jaxtune.models.linear import Linear


@dataclasses.dataclass(frozen=True)
class Square:
    """Part.config of `width` channels."""

    hf_name: ClassVar[str] = "square"

    width: int

    def make(self, config, key, dtype):
        return SquareForward(self, config, key, dtype)


class SquareForward(nnx.Module):
    order = BackwardOrder()

    def __init__(self, shape: Square, config, key, dtype):
        keys = jax.random.split(key)
        options = dict(bias=False, std=config.initializer_range, dtype=dtype)
        self.wide_proj = Linear(config.hidden_size, shape.width, key=keys[0], **options)
        self.narrow_proj = Linear(shape.width, config.hidden_size, key=keys[1], **options)

    def segments(self):
        return (
            Segment(
                "widen", (INPUT,), (Residual("wide"),), SquareForward._widen, matrices=("wide_proj",), tokenwise=True
            ),
            Segment(
                "narrow",
                ("wide",),
                (Residual(OUTPUT),),
                SquareForward._narrow,
                matrices=("narrow_proj",),
                tokenwise=True,
            ),
        )

    def _widen(self, context, x):
        return (self.wide_proj(x, context.key),)

    def _narrow(self, context, wide):
        return (self.narrow_proj(jax.nn.relu(wide) ** 2, context.key),)

    def forward_bytes(self, sizes):
        return sizes["wide"]

    def backward_bytes(self, sizes):
        return Scratch(2 * sizes["wide"], 0.0, covers_mixer=False)
