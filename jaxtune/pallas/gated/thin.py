"""A gated activation and the thin products with it that the adapter of an MLP's down projection needs: `gated_thin`
forward, `thin_of_gated` for the product alone, `gated_thin_backward` backward, and the choice of their
implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch, meshes
from jaxtune.pallas.arguments import FLOATS, Arguments
from jaxtune.pallas.gated import reference, thin_triton
from jaxtune.pallas.gated.api import gated_backward

_TOKENS, _SIZE = 2048, 512  # fewer tokens and smaller activations are left to XLA


@meshes.on_any_mesh
def gated_thin(
    gate: jax.Array, up: jax.Array, a: jax.Array, activation: str, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Computes an MLP's inner activation and the input of its down projection's adapter: (activation(gate) * up, that
    times a^T). The kernel multiplies by a^T what it has just computed, where XLA reads it again for the product.
    gated_matmul calls it in the forward.

    Args:
      gate, up: [tokens, I] of one dtype: bfloat16, float16 or float32.
      a: float[r, I], the adapter's A; it is rounded to gate's dtype.
      activation: "silu", "gelu_tanh" or "gelu".
      implementation: "triton" (the kernel: 16 bits, "silu" or "gelu_tanh", a rank of at most 32), "reference"
        (plain JAX), or None: "triton" if it supports the call and there are at least 2,048 tokens and 512 numbers of
        each, else "reference".
    Returns:
      ([tokens, I], [tokens, r]) in gate's dtype. The product has float32 sums of the rounded activation.
    Raises:
      TypeError, ValueError: an argument is not as described here, or the named implementation does not support the
        call.
    """
    check = _checked("gated_thin", gate, up, activation)
    check.array("a", a, "r I", FLOATS)
    if chosen("gated_thin", gate, len(a), activation, implementation) == "reference":
        return reference.gated_thin(gate, up, a, activation)  # XLA divides it by itself
    gated, inner = by_kernel(gate, up, a, activation, "gated")
    return gated, inner


@meshes.on_any_mesh
def thin_of_gated(
    gate: jax.Array, up: jax.Array, a: jax.Array, activation: str, *, implementation: str | None = None
) -> jax.Array:
    """The second result of `gated_thin`, with the same arguments, where the first is not needed: the kernel does not
    write it."""
    check = _checked("thin_of_gated", gate, up, activation)
    check.array("a", a, "r I", FLOATS)
    if chosen("thin_of_gated", gate, len(a), activation, implementation) == "reference":
        return reference.gated_thin(gate, up, a, activation)[1]
    [inner] = by_kernel(gate, up, a, activation, "none")
    return inner


def by_kernel(gate, up, a, activation: str, result: str) -> tuple[jax.Array, ...]:
    """What thin_triton.gated_thin returns, on each device. `a` is rounded to gate's dtype. fp8_product calls it too,
    for a result in e4m3."""
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
    """The backward of an MLP's gated activation where its down projection has an adapter and is not trained itself.
    Returns (the gradient of gate, the gradient of up, dinner^T (activation(gate) * up), which is the gradient of the
    adapter's A). The kernel writes the first two over gate and up if nothing else reads these. It computes
    activation(gate) * up again for the third, and neither writes nor reads it; its results have the same bits in each
    run. The backward of gated_matmul calls it.

    Args:
      gate, up: [tokens, I] of one dtype, bfloat16, float16 or float32: the arrays of the forward.
      dgated: [tokens, I] in gate's dtype, the gradient of activation(gate) * up.
      dinner: [tokens, r] in gate's dtype, the gradient of the adapter's low-rank input (x A^T).
      activation: "silu", "gelu_tanh" or "gelu".
      implementation: "triton" (the kernel: 16 bits, "silu" or "gelu_tanh", a rank of at most 32), "reference"
        (`gated_backward` and a product), or None: "triton" if it supports the call and there are at least 2,048 tokens
        and 512 numbers of each, else "reference".
    Returns:
      ([tokens, I], [tokens, I] in gate's dtype, float32[r, I]). The third has float32 sums of the rounded activation.
    Raises:
      TypeError, ValueError: an argument is not as described here, or the named implementation does not support the
        call.
    """
    check = _checked("gated_thin_backward", gate, up, activation)
    check.array("dgated", dgated, "tokens I", gate.dtype)
    check.array("dinner", dinner, "tokens r", gate.dtype)
    if chosen("gated_thin_backward", gate, dinner.shape[1], activation, implementation) == "reference":
        gated, dgate, dup = gated_backward(gate, up, dgated, activation)
        return dgate, dup, reference.thin_product(dinner, gated, (0, 0), jnp.float32)
    run = meshes.on_each_device(thin_triton.gated_thin_backward, rows=4, results=2)
    dgate, dup, da = run(gate, up, dgated, dinner, activation)
    return dgate, dup, da


def rounded_gradients(gate, up, dgated, dinner, inners, bs, activation: str) -> tuple:
    """What thin_triton.rounded_gradients returns, on each device; fp8_product calls it."""
    run = meshes.on_each_device(thin_triton.rounded_gradients, rows=5, results=2)
    return run(gate, up, dgated, dinner, inners, bs, activation, thin_triton.rounded_tile())


def _checked(op: str, gate, up, activation: str) -> Arguments:
    """The Arguments of an operation `op`, after checks of the arguments that both have."""
    check = Arguments(op)
    check.array("gate", gate, "tokens I", FLOATS)
    check.array("up", up, "tokens I", gate.dtype)
    check.choice("activation", activation, tuple(reference.ACTIVATIONS))
    return check


def chosen(op: str, gate, rank: int, activation: str, implementation: str | None) -> str:
    """The name of the implementation that runs a call of an operation `op` of this module: "reference" for small calls
    without a requested one. The arguments are those of the operations and of `implementations`."""
    if implementation is None and not is_large(*gate.shape):
        implementation = "reference"
    return dispatch.choose(op, implementations(gate, rank, activation), implementation)


def is_large(tokens: float, size: int) -> bool:
    """Returns True if a kernel is faster than XLA for gate [tokens, size]: from 2,048 tokens and 512 numbers on."""
    return tokens >= _TOKENS and size >= _SIZE


def in_place(dtype, tokens: float, size: int, rank: int, activation: str) -> bool:
    """Whether the kernel of `gated_thin_backward`, which writes over its arguments, runs such a call on the GPUs for
    which there is one. The planner asks it. dtype, tokens, size: of gate, and its axes. rank, activation: those of the
    call."""
    return is_large(tokens, size) and thin_triton.unsupported(dtype, size, rank, activation) is None


def implementations(gate, rank: int, activation: str) -> dispatch.Table:
    """The table from which dispatch.choose takes the implementation of a call of either operation: {name: a function
    that returns the reason why the implementation refuses the call, or None}, in the order in which they are tried.
    `jaxtune info` prints why implementations refuse.

    Args:
      gate: [tokens, I], as an array or as a shape.
      rank: of the thin array.
      activation: a key of ACTIVATIONS, such as "silu".
    """
    return {"triton": lambda: thin_triton.refusal(gate, rank, activation), "reference": lambda: None}
