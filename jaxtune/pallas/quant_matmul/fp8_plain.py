"""Products of two operands in e4m3 in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtune.pallas.quant_matmul.fp8_rounding import BLOCK


def whole_blocks(array: jax.Array, axis: int) -> jax.Array:
    """Pads `axis` with zeros to a multiple of 128, so that each block of 128 numbers belongs to only one of several
    arrays.
    """
    padding = -array.shape[axis] % BLOCK
    return jnp.pad(array, [(0, padding if a == axis else 0) for a in range(array.ndim)]) if padding else array


def _dot(codes: jax.Array, right: jax.Array, dtype) -> jax.Array:
    """codes [n, k] right [columns, k]^T, unscaled, summed in float32; on a GPU with FP8 the vendor's product."""
    return jax.lax.dot_general(codes, right, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def by_rows(codes, scale, right, right_scale, dtype):
    """codes [n, k] right [columns, k]^T times scales of rows float32[n, 1] and columns float32[columns] (or None), in
    `dtype`. For bfloat16 the unscaled sums are rounded to it first.

      scale, right_scale: of rows and of columns.
    """
    # The product's result is scaled in a separate pass, which takes half the time in bfloat16; another rounding is
    # negligible beside those to e4m3. float16 would overflow.
    out = _dot(codes, right, jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32).astype(jnp.float32) * scale
    return (out if right_scale is None else out * right_scale).astype(dtype)


def by_blocks(codes, scale, right, right_scale, dtype):
    """codes [n, k] right [columns, k]^T in `dtype`, each block of 128 along k times its scales, summed in float32.

    scale, right_scale: float32[n, ceil(k / 128)] and [ceil(columns / 128), ceil(k / 128)].
    """
    codes, right = whole_blocks(codes, 1), whole_blocks(right, 1)
    columns = right.shape[0]
    column_scales = jnp.repeat(right_scale, BLOCK, axis=0)[:columns]

    def add(number, total):
        x, w = (jax.lax.dynamic_slice_in_dim(array, number * BLOCK, BLOCK, axis=1) for array in (codes, right))
        row_scales, right_scales = (
            jax.lax.dynamic_index_in_dim(array, number, 1, False) for array in (scale, column_scales)
        )
        return total + _dot(x, w, jnp.float32) * row_scales[:, None] * right_scales

    total = jnp.zeros((codes.shape[0], columns), jnp.float32)
    return jax.lax.fori_loop(0, scale.shape[1], add, total).astype(dtype)
