"""Products with weights in FP8 as they are stored: e4m3 times e4m3, added up in float32.

Each row of the other operand is rounded to e4m3 by its own largest magnitude (a token's activations, or its gradients).
A weight's scale for each row stands outside the sum of the forward, x W^T, and is a factor of the summed axis in the
backward, dy W: there the gradient takes it before it is rounded. Scales of 128 x 128 stand inside both sums; a kernel
that adds up at their borders has yet to be written, and such weights are refused here.

XLA makes cuBLASLt's FP8 product of the dot_general on GPUs that have one (compute capability 8.9 and later); elsewhere
the values are the same and nothing is won.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtune.pallas.formats import FP8
from jaxtune.pallas.formats.fp8 import LARGEST, TILE


def refusal(weight: FP8) -> str | None:
    """Why `product` cannot take a weight, or None."""
    if weight.block == TILE:
        return "has a scale for each 128 x 128 numbers: products in FP8 need one for each row, or for the matrix"
    return None


def rounded(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """rows [n, k] -> (e4m3[n, k], float32[n, 1]): codes, and the scale by which each row's are multiplied."""
    wide = rows.astype(jnp.float32)
    largest = jnp.abs(wide).max(axis=1, keepdims=True)
    scale = jnp.where(largest == 0, 1.0, largest / LARGEST)
    return jnp.clip(wide / scale, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn), scale


def product(x: jax.Array, weight: FP8, contract: tuple[int, int]) -> jax.Array:
    """x [n, k] times a weight over x's last axis and the weight's `contract[1]`: 1 for x W^T, 0 for x W; in x's dtype.

    A row that is not finite makes a row that is not, and no other.
    """
    along = contract[1]
    with jax.named_scope("to_fp8"):
        codes, scale = rounded(x if along == 1 else x.astype(jnp.float32) * _scales(weight))
    return of_codes(codes, scale, weight, along, x.dtype)


def of_codes(codes: jax.Array, scale: jax.Array, weight: FP8, along: int, dtype) -> jax.Array:
    """As `product`, of what `rounded` gives; in the backward (along = 0) of a gradient that took the weight's scales
    before it was rounded."""
    # What leaves the product is scaled in a pass of its own, which is half as long over bfloat16; another rounding is
    # nothing beside those to e4m3. float16 would overflow.
    kept = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    out = jax.lax.dot_general(codes, weight.codes, (((1,), (along,)), ((), ())), preferred_element_type=kept)
    out = out.astype(jnp.float32) * scale
    return (out * _scales(weight) if along == 1 else out).astype(dtype)


def _scales(weight: FP8) -> jax.Array:
    """float32[1, rows or 1]: of the weight's rows, or one for all."""
    return weight.scales.astype(jnp.float32).reshape(1, -1)
