"""The gated MLP of a block."""

from __future__ import annotations

import functools

import jax
from flax import nnx

from jaxtune.models.config import DecoderConfig
from jaxtune.models.linear import Linear, apply_together

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
}


class MLP(nnx.Module):
    """down(activation(gate(x)) * up(x)); gate_proj and up_proj, or one gate_up_proj."""

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype):
        self.config = config
        keys = jax.random.split(key, 3)
        hidden, inner = config.hidden_size, config.intermediate_size

        def linear(k, in_size, out_size):
            return Linear(in_size, out_size, bias=config.mlp_bias, std=config.initializer_range, key=k, dtype=dtype)

        if config.fused:
            self.gate_up_proj = linear(keys[0], hidden, 2 * inner)
        else:
            self.gate_proj = linear(keys[0], hidden, inner)
            self.up_proj = linear(keys[1], hidden, inner)
        self.down_proj = linear(keys[2], inner, hidden)

    def gate_up(self, x: jax.Array, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """[B, T, hidden] -> gate and up, each [B, T, intermediate]."""
        if self.config.fused:
            both = self.gate_up_proj(x, key)
            half = self.config.intermediate_size
            return both[..., :half], both[..., half:]
        gate, up = apply_together(x, (self.gate_proj, self.up_proj), key)
        return gate, up

    def down(self, gate: jax.Array, up: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """-> [B, T, hidden]"""
        return self.down_proj(ACTIVATIONS[self.config.activation](gate) * up, key)
