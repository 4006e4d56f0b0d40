"""A gated activation and the thin products that the adapter of an MLP's down projection needs. Public functions raise
TypeError or ValueError for wrong arguments or an implementation that refuses.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch, meshes, one_order
from jaxtune.pallas.arguments import FLOATS, Arguments
from jaxtune.pallas.gated import reference, thin_triton
from jaxtune.pallas.gated.api import gated_backward

_TOKENS, _SIZE = 2048, 512  # fewer tokens and smaller activations are left to XLA


@meshes.on_any_mesh
def gated_thin(
    gate: jax.Array, up: jax.Array, a: jax.Array, activation: str, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """(activation(gate) * up [tokens, I], that times a^T [tokens, r]), in gate's dtype. The kernel multiplies what it
    has just computed, where XLA reads it again. The product has float32 sums of the rounded activation.

      gate, up: [tokens, I], bfloat16, float16 or float32.
      a: float[r, I], rounded to gate's dtype.
      activation: "silu", "gelu_tanh" or "gelu".
      implementation: "triton" (16 bits, "silu" or "gelu_tanh", a rank of at most 32), "reference", or None: "triton" if
        it supports the call and there are at least 2,048 tokens and I is at least 512.
    """
    check = _checked("gated_thin", gate, up, activation)
    check.array("a", a, "r I", FLOATS)
    if implementation_name("gated_thin", gate, len(a), activation, implementation) == "reference":
        return reference.gated_thin(gate, up, a, activation)  # XLA divides it by itself
    gated, inner = by_kernel(gate, up, a, activation, "gated")
    return gated, inner


@meshes.on_any_mesh
def thin_of_gated(
    gate: jax.Array, up: jax.Array, a: jax.Array, activation: str, *, implementation: str | None = None
) -> jax.Array:
    """The second result of `gated_thin` alone; the kernel does not write the first.

    gate, up: [tokens, I] in a float dtype. a: float[r, I]. activation: "silu", "gelu_tanh" or "gelu".
    implementation: "triton", "reference", or None, as for `gated_thin`.
    """
    check = _checked("thin_of_gated", gate, up, activation)
    check.array("a", a, "r I", FLOATS)
    if implementation_name("thin_of_gated", gate, len(a), activation, implementation) == "reference":
        return reference.gated_thin(gate, up, a, activation)[1]
    [inner] = by_kernel(gate, up, a, activation, "none")
    return inner


def by_kernel(gate, up, a, activation: str, result: str) -> tuple[jax.Array, ...]:
    """thin_triton.gated_thin on each device, with `a` rounded to gate's dtype. result: which results the kernel
    writes.

      gate, up: [tokens, I] of 16 bits. a: float[r, I]. activation: "silu" or "gelu_tanh".
      result: "gated", "e4m3" or "none": what comes before the thin product.
    """
    return meshes.on_each_device(thin_triton.gated_thin, rows=2)(gate, up, a.astype(gate.dtype), activation, result)


@meshes.on_any_mesh
def gated_thin_backward(
    gate: jax.Array,
    up: jax.Array,
    dgated: jax.Array,
    dinner: jax.Array,
    activation: str,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Backward of an MLP's gated activation whose down projection has an adapter and is not trained: (gradients of gate
    and up [tokens, I] in gate's dtype, dinner^T (activation(gate) * up) float32[r, I], the gradient of A). The kernel
    writes the first two over gate and up if nothing else reads these. Its results have the same bits in each run.

      gate, up: [tokens, I] in a float dtype. activation: "silu", "gelu_tanh" or "gelu".
      dgated: [tokens, I] in gate's dtype, gradient of activation(gate) * up.
      dinner: [tokens, r] in gate's dtype, gradient of the adapter's low-rank input (x A^T).
      implementation: "triton", "reference", or None, as for `gated_thin`.
    """
    check = _checked("gated_thin_backward", gate, up, activation)
    check.array("dgated", dgated, "tokens I", gate.dtype)
    check.array("dinner", dinner, "tokens r", gate.dtype)
    if implementation_name("gated_thin_backward", gate, dinner.shape[1], activation, implementation) == "reference":
        gated, dgate, dup = gated_backward(gate, up, dgated, activation)
        return dgate, dup, reference.thin_product(dinner, gated, (0, 0), jnp.float32)
    run = meshes.on_each_device(thin_triton.gated_thin_backward, rows=4, results=2)
    dgate, dup, da = run(gate, up, dgated, dinner, activation)
    return dgate, dup, da


def rounded_gradients(gate, up, dgated, dinner, inners, bs, activation: str) -> tuple:
    """thin_triton.rounded_gradients on each device, which documents the results.

    gate, up, dgated: [tokens, I] of 16 bits. dinner: [tokens, r], gradient of down's low-rank input.
    inners, bs: of gate's and up's adapters, low-rank inputs [tokens, r] and B's [I, r].
    activation: "silu" or "gelu_tanh".
    """
    run = meshes.on_each_device(thin_triton.rounded_gradients, rows=5, results=2)
    return run(gate, up, dgated, dinner, inners, bs, activation, thin_triton.rounded_tile())


def _checked(op: str, gate, up, activation: str) -> Arguments:
    check = Arguments(op)
    check.array("gate", gate, "tokens I", FLOATS)
    check.array("up", up, "tokens I", gate.dtype)
    check.choice("activation", activation, tuple(reference.ACTIVATIONS))
    return check


def implementation_name(op: str, gate, rank: int, activation: str, implementation: str | None) -> str:
    """The implementation that runs the operation `op`, as dispatch.choose decides; the reference for small arrays.
    gate: [tokens, size], an array or a shape; rank: of the adapter.
    activation: a key of ACTIVATIONS. implementation: the requested name, or None.
    """
    if implementation is None and (one_order.is_exact() or not is_large(*gate.shape)):
        implementation = "reference"
    return dispatch.choose(op, implementations(gate, rank, activation), implementation)


def is_large(tokens: float, size: int) -> bool:
    """Whether a kernel is faster than XLA for gate [tokens, size]."""
    return tokens >= _TOKENS and size >= _SIZE


def in_place(dtype, tokens: float, size: int, rank: int, activation: str) -> bool:
    """Whether the kernel of `gated_thin_backward`, which writes over its arguments, runs such a call on some GPU. size:
    gate's columns. tokens: rows of gate. rank: of the adapter.

      dtype: of gate. activation: a key of ACTIVATIONS.
    """
    return is_large(tokens, size) and thin_triton.unsupported(dtype, size, rank, activation) is None


def implementations(gate, rank: int, activation: str) -> dispatch.Table:
    """{name: why it refuses a call, or None}, in the order of trial. gate: an array or a shape. rank: of the
    adapter.

      activation: a key of ACTIVATIONS.
    """
    return {"triton": lambda: thin_triton.refusal(gate, rank, activation), "reference": lambda: None}
