"""A mixer that is not attention: a decaying sum of what came before in the document. All that jaxtune has to know of it
is in this file."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.layers.segment import INPUT, OUTPUT, Residual, Segment
from jaxtune.models.linear import Linear


@dataclasses.dataclass(frozen=True)
class Decay:
    """Part.config: `width` channels, each of which keeps `share` of itself from token to token."""

    hf_name: ClassVar[str] = "decay"

    width: int
    share: float = 0.5

    def make(self, config, key, dtype):
        return DecayMixer(self, config, key, dtype)


class DecayMixer(nnx.Module):
    state_reads = ("trail",)
    has_cache = False

    def __init__(self, shape: Decay, config, key, dtype):
        self.shape = shape
        keys = jax.random.split(key)
        options = dict(bias=False, std=config.initializer_range, dtype=dtype)
        self.in_proj = Linear(config.hidden_size, shape.width, key=keys[0], **options)
        self.out_proj = Linear(shape.width, config.hidden_size, key=keys[1], **options)

    def segments(self):
        return (
            Segment("enter", (INPUT,), (Residual("signal"),), DecayMixer._enter, matrices=("in_proj",)),
            Segment("trail", ("signal",), (Residual("trail"),), DecayMixer._trail, attention_width=1),
            Segment("leave", ("trail",), (Residual(OUTPUT),), DecayMixer._leave, matrices=("out_proj",)),
        )

    def _enter(self, context, x):
        return (self.in_proj(x, context.key),)

    def _trail(self, context, signal):
        begins = jnp.arange(signal.shape[1]) == context.layout.doc_start
        share = jnp.where(begins, 0.0, self.shape.share)[..., None] * jnp.ones_like(signal)

        def joined(before, after):
            return before[0] * after[0], before[1] * after[0] + after[1]

        return (jax.lax.associative_scan(joined, (share, signal), axis=1)[1],)

    def _leave(self, context, trail):
        return (self.out_proj(trail, context.key),)

    def first_state(self, values, lengths, new_tokens, context):
        return jnp.take_along_axis(values["trail"], (lengths - 1)[:, None, None], axis=1)

    def step(self, x, state, at, context):
        def one(state, token):
            signal, real = token
            state = jnp.where(real[:, None], self.shape.share * state + signal, state)
            return state, state

        layout = context.layout
        tokens = jnp.moveaxis(self.in_proj(x), 1, 0), (layout.doc_end > layout.doc_start).T
        state, trail = jax.lax.scan(one, state[:, 0], tokens)
        return self.out_proj(jnp.moveaxis(trail, 0, 1)), state[:, None]

    def waiting_bytes(self, sizes):
        return 0.0

    def backward_bytes(self, sizes):
        return 3 * sizes["signal"]
