"""Weights in four bits through Triton, for every NVIDIA GPU since Ampere: dequantising, and products with a few tokens.

Both decode double-quantised scales in the kernel and are bound by memory. The kernels are in triton_kernels.py, which
imports triton and is therefore imported only where it is used.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat
from jaxtune.pallas.formats import Stored
from jaxtune.pallas.formats.four_bit import BLOCK, FourBit

__all__ = ["dequantize", "refusal", "small_matmul", "small_refusal"]

MAX_TOKENS = 16  # the most tokens of small_matmul
_VECTOR_TOKENS = 2  # up to this many tokens the ordinary cores are faster than the tensor cores
# (rows of W at a time, blocks of 64 of each row, warps), as measured on an H200.
_VECTOR_TILE = (4, 16, 4)
_MATRIX_TILE, _TALL_MATRIX_TILE = (16, 8, 4), (64, 2, 4)
_TALL = 8192  # from this many rows of W on, the second one is faster
_DEQUANTISE_BLOCKS, _DEQUANTISE_WARPS = 64, 4
_DTYPES = (jnp.bfloat16, jnp.float16)


def refusal(weight: Stored, dtype) -> str | None:
    """Why `dequantize` cannot serve this call, or None."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if not isinstance(weight, FourBit):
        return f"a weight in {type(weight).__name__}"
    if dtype not in (*_DTYPES, jnp.float32):
        return f"dtype {jnp.dtype(dtype).name}"
    return None


def small_refusal(weight: Stored, dtype, tokens: int) -> str | None:
    """Why `small_matmul` cannot serve this call, or None."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if not isinstance(weight, FourBit):
        return f"a weight in {type(weight).__name__}"
    if dtype not in _DTYPES:
        return f"dtype {jnp.dtype(dtype).name}"
    if not 1 <= tokens <= MAX_TOKENS:
        return f"{tokens} tokens; up to {MAX_TOKENS}"
    if weight.shape[1] % BLOCK:
        return f"{weight.shape[1]} columns, not a multiple of {BLOCK}: a block would lie in two rows"
    return None


def _parts(weight: FourBit) -> tuple[list[jax.Array], int]:
    """(the arrays of a weight in the form that the kernels take, whether its scales are quantised)."""
    scales = [s for s in (weight.nested_absmax, weight.nested_map, weight.offset) if s is not None]
    nested = len(scales) == 3
    return [weight.codes, weight.absmax, *(scales if nested else [weight.absmax] * 3), jnp.asarray(weight.table)], int(
        nested
    )


def dequantize(weight: FourBit, dtype=None) -> jax.Array:
    """FourBit.decode, bit for bit: the tensor in `dtype`, by default its original one."""
    from jaxtune.pallas.quant_matmul import triton_kernels

    arrays, nested = _parts(weight)
    (out,) = compat.triton_call(
        triton_kernels.dequantise_kernel,
        arrays,
        (jax.ShapeDtypeStruct((weight.size,), dtype or weight.dtype),),
        (math.ceil(weight.size / (BLOCK * _DEQUANTISE_BLOCKS)),),
        warps=_DEQUANTISE_WARPS,
        stages=1,
        contract=False,  # bitsandbytes rounds between the scale's product and sum
        SIZE=weight.size,
        NESTED=nested,
        BLOCKS=_DEQUANTISE_BLOCKS,
    )
    return out.reshape(weight.shape)


def small_matmul(x: jax.Array, weight: FourBit) -> jax.Array:
    """x W^T for a few tokens without writing W, in one pass over its bytes.

    Args:
      x: [1 to 16, in] bfloat16 or float16.
      weight: [out, in]; `in` is a multiple of 64.
    Returns:
      [1 to 16, out] in x's dtype; sums are float32.
    """
    from jaxtune.pallas.quant_matmul import triton_kernels

    (tokens, inner), outer = x.shape, weight.shape[0]
    arrays, nested = _parts(weight)
    on_vectors = tokens <= _VECTOR_TOKENS
    matrix_tile = _TALL_MATRIX_TILE if outer >= _TALL else _MATRIX_TILE
    rows, blocks, warps = _VECTOR_TILE if on_vectors else matrix_tile
    (out,) = compat.triton_call(
        triton_kernels.vector_kernel if on_vectors else triton_kernels.matrix_kernel,
        (x, *arrays),
        (jax.ShapeDtypeStruct((tokens, outer), x.dtype),),
        (math.ceil(outer / rows),),
        warps=warps,
        stages=1,
        COUNT=tokens,
        INNER=inner,
        OUTER=outer,
        NESTED=nested,
        ROWS=rows,
        BLOCKS=blocks,
    )
    return out
