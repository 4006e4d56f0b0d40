"""The norm of the residual stream: the public operation `normed_stream`, and the choice of its implementation."""

from __future__ import annotations

import jax

from jaxtune.pallas import dispatch, meshes
from jaxtune.pallas.arguments import FLOATS, Arguments
from jaxtune.pallas.normed_heads import normed
from jaxtune.pallas.normed_stream import triton

# Rows, and numbers of a row, below which plain JAX runs: in a step of generation, and for norms of single heads, which
# XLA fuses with what is computed of them.
_ROWS, _SIZE = 1024, 512


def normed_stream(
    x: jax.Array,
    weight: jax.Array,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    float32: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the RMS norm of x over its last axis, and returns x beside it. The function is differentiable with
    respect to x and weight. Whoever reads x elsewhere too, as the residual stream is read, may take the x that is
    returned: its gradient is then added to that of the norm where that is computed, not in a pass of its own.

    Args:
      x: [..., size] bfloat16, float16 or float32.
      weight: float[size].
      eps: the number that is added to the mean square.
      offset: the number that is added to the weight; it is ignored if float32 is False.
      float32: True: the normed numbers times the weight are rounded once, to x's dtype. False: the normed numbers and
        the weight are rounded to x's dtype first, and the product again.
      implementation: "triton" (a kernel for the gradients: 16 bits, at most 8,192 numbers a row), "reference" (plain
        JAX), or None: "triton" if it supports the call and there are at least 1,024 rows of at least 512 numbers, else
        "reference". Both compute the norm itself in plain JAX.
    Returns:
      (x, the normed x in x's dtype). The kernel's gradient of x, the sum of both, is rounded once.
    Raises:
      TypeError, ValueError: an argument is not as described here, or the named implementation does not support the
        call.
    """
    check = Arguments("normed_stream")
    check.array("x", x, "... size", FLOATS)
    check.array("weight", weight, "size", FLOATS)
    if _chosen(x, weight, implementation) == "triton":
        return meshes.on_any_mesh(triton.normed_stream)(x, weight, eps, offset, float32)
    return x, normed(x, weight, eps, offset, float32)


def has_kernel(x, weight) -> bool:
    """Whether `normed_stream` computes the gradient of a call by a kernel if no implementation is named. x, weight: its
    arguments, as arrays or as shapes."""
    return _chosen(x, weight, None) != "reference"


def _chosen(x, weight, implementation: str | None) -> str:
    """The name of the implementation that runs a call of `normed_stream`, whose arguments these are."""
    if implementation is None and (x.size // x.shape[-1] < _ROWS or x.shape[-1] < _SIZE):
        implementation = "reference"
    return dispatch.choose("normed_stream", implementations(x, weight), implementation)


def implementations(x, weight) -> dispatch.Table:
    """The table from which dispatch.choose takes the implementation of a call: {name: a function that returns the
    reason why the implementation refuses the call, or None}, in the order in which they are tried. `jaxtune info`
    prints why implementations refuse. x, weight: those of `normed_stream`, as arrays or as shapes."""
    return {"triton": lambda: triton.refusal(x, weight), "reference": lambda: None}
