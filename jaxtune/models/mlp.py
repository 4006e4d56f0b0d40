"""The gated MLP of a block."""

from __future__ import annotations

import functools

import jax
from flax import nnx

from jaxtune.models.config import DecoderConfig
from jaxtune.models.linear import Linear, apply_together
from jaxtune.pallas.gated import ACTIVATIONS, gated_backward


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
        return _down(self.config.activation, *nnx.split(self.down_proj, nnx.Param, ...), gate, up, key)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _down(activation: str, graph, trainable, frozen, gate, up, key):
    """activation(gate) * up through the linear of these parts.

    Its backward never has more than three arrays of gate's size, which gate, up and a gradient become in place.
    """
    return nnx.merge(graph, trainable, frozen)(ACTIVATIONS[activation](gate) * up, key)


def _down_fwd(activation, graph, trainable, frozen, gate, up, key):
    return _down(activation, graph, trainable, frozen, gate, up, key), (trainable, frozen, gate, up, key)


def _down_bwd(activation, graph, residuals, dout):
    trainable, frozen, gate, up, key = residuals

    def linear(trainable, x):
        return nnx.merge(graph, trainable, frozen)(x, key)

    # Of a linear map the gradient to its input is the same at every input: gate, for what was there is made below.
    _, to_input = jax.vjp(functools.partial(linear, trainable), gate)
    (dgated,) = to_input(dout)
    gated, dgate, dup = gated_backward(gate, up, dgated, activation)
    _, to_weights = jax.vjp(lambda trainable: linear(trainable, gated), trainable)
    return *to_weights(dout), None, dgate, dup, None


_down.defvjp(_down_fwd, _down_bwd)
