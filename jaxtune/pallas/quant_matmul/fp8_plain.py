"""Products of two operands in e4m3 in plain JAX, for calls that no kernel of fp8_product.py computes: `by_rows` and
`by_blocks`, which `fp8_product.multiply` calls, and `whole_blocks`, which fills up blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtune.pallas.quant_matmul.fp8_rounding import BLOCK


def whole_blocks(array: jax.Array, axis: int) -> jax.Array:
    """Pads the array with zeros along `axis` to a multiple of 128; an array of such a size is returned unchanged.
    `backward` calls it so that of several concatenated weights each block of 128 numbers belongs to only one, and
    `by_blocks` so that the last block along k is whole."""
    short = -array.shape[axis] % BLOCK
    return jnp.pad(array, [(0, short if a == axis else 0) for a in range(array.ndim)]) if short else array


def _dot(codes: jax.Array, side: jax.Array, dtype) -> jax.Array:
    """The product of two arrays of e4m3 codes, codes [n, k] side [columns, k]^T: [n, columns] in `dtype`, summed in
    float32. No scales are applied. On a GPU that multiplies in FP8 it is the vendor's product. `by_rows` and
    `by_blocks` call it."""
    return jax.lax.dot_general(codes, side, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def by_rows(codes, scale, side, side_scale, dtype):
    """Does in XLA what `multiply` does if `blocks` is False and `more` is None: the product of the codes, [n, columns]
    in `dtype`, multiplied at the end by the scales of its rows and of its columns. For bfloat16 the product is rounded
    to bfloat16 before it is scaled, which takes half the time.

    Args:
      codes, scale: e4m3[n, k] and float32[n, 1].
      side, side_scale: e4m3[columns, k], and float32[columns] or None for no scales.
      dtype: of the result.
    """
    # The product's result is scaled in a separate pass, which takes half the time in bfloat16; another rounding is
    # negligible beside those to e4m3. float16 would overflow.
    out = _dot(codes, side, jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32).astype(jnp.float32) * scale
    return (out if side_scale is None else out * side_scale).astype(dtype)


def by_blocks(codes, scale, side, side_scale, dtype):
    """Does in XLA what `multiply` does if `blocks` is True and `more` is None: a loop goes over blocks of 128 along k,
    multiplies each block's product by its scales, and adds these up in float32: [n, columns] in `dtype`.

    Args:
      codes, scale: e4m3[n, k] and float32[n, ceil(k / 128)].
      side, side_scale: e4m3[columns, k] and float32[ceil(columns / 128), ceil(k / 128)].
      dtype: of the result.
    """
    codes, side = whole_blocks(codes, 1), whole_blocks(side, 1)
    columns = side.shape[0]
    of_columns = jnp.repeat(side_scale, BLOCK, axis=0)[:columns]

    def add(number, total):
        x, w = (jax.lax.dynamic_slice_in_dim(each, number * BLOCK, BLOCK, axis=1) for each in (codes, side))
        ours, side_scales = (jax.lax.dynamic_index_in_dim(each, number, 1, False) for each in (scale, of_columns))
        return total + _dot(x, w, jnp.float32) * ours[:, None] * side_scales

    total = jnp.zeros((codes.shape[0], columns), jnp.float32)
    return jax.lax.fori_loop(0, scale.shape[1], add, total).astype(dtype)
