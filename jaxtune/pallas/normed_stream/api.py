"""Norm of the residual stream."""

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
    """(x, its RMS norm over the last axis in x's dtype), differentiable in x and weight. Whoever reads x elsewhere too,
    as the residual stream is read, takes the returned x: its gradient is then added within the norm's pass, and the sum
    rounded once. TypeError or ValueError for wrong arguments or an implementation that refuses.

      x: [..., size] bfloat16, float16 or float32.
      implementation: of the gradients; the norm is always plain JAX. "triton" (16 bits, at most 8,192 numbers a row),
        "reference", or None: "triton" if it supports the call and there are at least 1,024 rows of at least 512
        numbers.
      eps: added to the mean square.
      weight: float[size].
      offset: added to the weight, if float32; else ignored.
      float32: True: only the product with the weight is rounded; False: both factors are rounded first, too.
    """
    check = Arguments("normed_stream")
    check.array("x", x, "... size", FLOATS)
    check.array("weight", weight, "size", FLOATS)
    if _chosen(x, weight, implementation) == "triton":
        return meshes.on_any_mesh(triton.normed_stream)(x, weight, eps, offset, float32)
    return x, normed(x, weight, eps, offset, float32)


def has_kernel(x, weight) -> bool:
    """Whether a kernel computes such a call's gradient if no implementation is named. Arguments may be shapes."""
    return _chosen(x, weight, None) != "reference"


def _chosen(x, weight, implementation: str | None) -> str:
    if implementation is None and (x.size // x.shape[-1] < _ROWS or x.shape[-1] < _SIZE):
        implementation = "reference"
    return dispatch.choose("normed_stream", implementations(x, weight), implementation)


def implementations(x, weight) -> dispatch.Table:
    """{name: why it refuses a call, or None}, in the order of trial. Arguments may be shapes."""
    return {"triton": lambda: triton.refusal(x, weight), "reference": lambda: None}
