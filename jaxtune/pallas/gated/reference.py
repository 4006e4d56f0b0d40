"""Gated activations and their gradients in plain JAX, with which the kernels' results are compared, and which compute
the calls that the kernels refuse: `gated_backward` is that of an MLP, `gated_thin` and `gated_thin_backward` are of an
MLP with an adapter, `gated_rows` and `gated_rows_backward` are of experts. ACTIVATIONS has the activations by name, for
models too."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
}


def gated_backward(gate, up, dgated, activation: str):
    """Computes (activation(gate) * up, the gradient of gate, the gradient of up) in plain JAX, all three in the shape
    and dtype of the arguments. gate and up are arrays of one shape and dtype, and dgated, the gradient of
    activation(gate) * up, is like them. activation: a key of ACTIVATIONS. This plain implementation runs where the
    kernel refuses a call, and the kernel is compared with it."""
    gated, pullback = jax.vjp(lambda gate, up: ACTIVATIONS[activation](gate) * up, gate, up)
    return gated, *pullback(dgated)


def thin_product(one, other, contract: tuple[int, int], dtype) -> jax.Array:
    """Multiplies two matrices over one axis of each, `contract`, with float32 sums: [the other axis of `one`, that of
    `other`] in `dtype`. float32 is multiplied in full float32."""
    precision = jax.lax.Precision.HIGHEST if one.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    axes = (contract[:1], contract[1:]), ((), ())
    return jax.lax.dot_general(one, other, axes, precision=precision, preferred_element_type=dtype)


def gated_thin(gate, up, a, activation: str):
    """Computes (activation(gate) * up [tokens, I], that times a^T [tokens, r]) in plain JAX, both in gate's dtype. The
    arguments are those of thin.gated_thin."""
    gated = ACTIVATIONS[activation](gate) * up
    return gated, thin_product(gated, a.astype(gate.dtype), (1, 1), gate.dtype)


def gated_thin_backward(gate, up, dgated, dinner, activation: str):
    """Computes (the gradients of gate and up [tokens, I], dinner^T (activation(gate) * up) float32[r, I]) in plain JAX,
    with which the kernel is compared. The arguments are those of thin.gated_thin_backward."""
    gated, dgate, dup = gated_backward(gate, up, dgated, activation)
    return dgate, dup, thin_product(dinner, gated, (0, 0), jnp.float32)


@dataclasses.dataclass(frozen=True)
class RowGate:
    """How an expert's inner row is computed from gate and up, which are the two halves of a row: activation(gate) * up,
    or with `limit` gpt-oss's clipped form, (clip(up, -limit, limit) + 1) * gate * sigmoid(alpha * gate) with
    min(gate, limit) in place of gate. Models' experts make one of their settings."""

    activation: str  # a key of ACTIVATIONS; it is not used with `limit`
    limit: float | None = None
    alpha: float = 1.0  # the factor within the clipped form's sigmoid
    interleaved: bool = False  # True: gate is the even columns and up the odd ones; False: gate is the first half

    def __call__(self, gate_up: jax.Array) -> jax.Array:
        """The inner rows, float32[rows, I], of gate_up [rows, 2 I]."""
        if self.interleaved:
            gate, up = gate_up[:, 0::2], gate_up[:, 1::2]
        else:
            # The gradient of a split concatenates two parts, each computed once. The gradient of two slices adds two
            # padded arrays, for which XLA computes both parts for every element.
            gate, up = jnp.split(gate_up, 2, axis=1)
        gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
        if self.limit is None:
            return ACTIVATIONS[self.activation](gate) * up
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


def gated_rows(gate_up: jax.Array, weights: jax.Array, gate: RowGate) -> jax.Array:
    """The inner rows of experts, each times the router's weight of its row: [rows, I] in gate_up's dtype, computed in
    float32 and rounded once. gate_up: [rows, 2 I]. weights: float32[rows]. gate: how rows are computed."""
    return (gate(gate_up) * weights[:, None]).astype(gate_up.dtype)


def gated_rows_backward(gate_up, weights, dgated, gate: RowGate):
    """Computes (gated_rows(gate_up, weights, gate), the gradient of gate_up, the gradient of weights) in plain JAX,
    from dgated [rows, I], the gradient of the first."""
    gated, pullback = jax.vjp(lambda gate_up, weights: gated_rows(gate_up, weights, gate), gate_up, weights)
    return gated, *pullback(dgated)
