"""Gated activations and their gradients in plain JAX, which define the kernels' results."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxtune.pallas import one_order

ACTIVATIONS = {
    "silu": one_order.of_order(one_order.functions.silu, jax.nn.silu),
    "gelu_tanh": one_order.of_order(one_order.functions.gelu_tanh, functools.partial(jax.nn.gelu, approximate=True)),
    "gelu": one_order.of_order(one_order.functions.gelu, functools.partial(jax.nn.gelu, approximate=False)),
}


def activated(gate, up, activation: str):
    """activation(gate) * up in gate's dtype, within one_order.exact computed in float32 and rounded once.

    gate, up: of one shape and dtype. activation: a key of ACTIVATIONS.
    """
    if not one_order.is_exact():
        return ACTIVATIONS[activation](gate) * up
    if one_order.runs_kernels():
        return one_order.triton.activated(gate, up, activation)
    return (ACTIVATIONS[activation](gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


def gated_backward(gate, up, dgated, activation: str):
    """(inner rows activation(gate) * up, computed again; gradient of gate; of up), from dgated, theirs.

    gate, up, dgated: of one shape and dtype. activation: a key of ACTIVATIONS.
    """
    gated, pullback = jax.vjp(lambda gate, up: ACTIVATIONS[activation](gate) * up, gate, up)
    return gated, *pullback(dgated)


def thin_product(left, right, contract: tuple[int, int], dtype) -> jax.Array:
    """`left` times `right` over one axis of each, `contract`, with float32 sums, in `dtype`; float32 without TF32.

    contract: (axis of left, axis of right).
    """
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    axes = (contract[:1], contract[1:]), ((), ())
    return jax.lax.dot_general(left, right, axes, precision=precision, preferred_element_type=dtype)


def gated_thin(gate, up, a, activation: str):
    """As thin.gated_thin: (activation(gate) * up, that times a^T)."""
    gated, a = activated(gate, up, activation), a.astype(gate.dtype)
    if one_order.is_exact():
        return gated, one_order.adapted(gated, a)
    return gated, thin_product(gated, a, (1, 1), gate.dtype)


def gated_thin_backward(gate, up, dgated, dinner, activation: str):
    """As thin.gated_thin_backward: (gradient of gate, of up, float32[r, I] of A)."""
    gated, dgate, dup = gated_backward(gate, up, dgated, activation)
    return dgate, dup, thin_product(dinner, gated, (0, 0), jnp.float32)


@dataclasses.dataclass(frozen=True)
class RowGate:
    """How an expert's inner row follows from gate and up: activation(gate) * up, or with `limit` gpt-oss's clipped
    form, (clip(up, -limit, limit) + 1) * gate * sigmoid(alpha * gate) with min(gate, limit) in place of gate.
    """

    activation: str  # a key of ACTIVATIONS; it is not used with `limit`
    limit: float | None = None
    alpha: float = 1.0  # the factor within the clipped form's sigmoid
    interleaved: bool = False  # True: gate is the even columns and up the odd ones; False: gate is the first half

    def __call__(self, gate_up: jax.Array) -> jax.Array:
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
        return (up + 1) * gate * one_order.sigmoid(self.alpha * gate)


def gated_rows(gate_up: jax.Array, weights: jax.Array, gate: RowGate) -> jax.Array:
    """Experts' inner rows times their router's weights: [rows, I] in gate_up's dtype, computed in float32, rounded
    once.

      gate_up: [rows, 2 I]. weights: float32[rows].
    """
    plain = gate.limit is None and not gate.interleaved and gate.activation in one_order.triton.ACTIVATIONS
    if one_order.runs_kernels() and plain and gate_up.dtype.itemsize == 2:
        return one_order.triton.weighted_rows(gate_up, weights, gate.activation)
    return _gated_rows(gate_up, weights, gate)


def _gated_rows(gate_up, weights, gate: RowGate) -> jax.Array:
    return (gate(gate_up) * weights[:, None]).astype(gate_up.dtype)


def gated_rows_backward(gate_up, weights, dgated, gate: RowGate):
    """As api.gated_rows_backward: (weighted inner rows, gradients of gate_up and of weights)."""
    gated, pullback = jax.vjp(lambda gate_up, weights: _gated_rows(gate_up, weights, gate), gate_up, weights)
    return gated, *pullback(dgated)
