"""Weights in NF4 and FP4 through Triton: dequantising, and products with a few tokens, on every NVIDIA GPU since
Ampere. For 17 to 64 tokens and a large weight in NF4 there is a kernel for Hopper. All decode double-quantised scales
in the kernel. Refusals include the check at first use.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import compat, dispatch, targets
from jaxtune.pallas.formats import Stored
from jaxtune.pallas.formats.four_bit import BLOCK, NF4, FourBit
from jaxtune.pallas.quant_matmul.reference import exact_product

__all__ = ["dequantize", "few_matmul", "few_refusal", "refusal", "small_matmul", "small_refusal"]

MAX_TOKENS = 16  # the most tokens of small_matmul
_VECTOR_TOKENS = 2  # up to this many tokens the ordinary cores are faster than the tensor cores
# (rows of W at a time, blocks of 64 of each row, warps), as measured on an H200.
_VECTOR_TILE = (4, 16, 4)
_MATRIX_TILE, _TALL_MATRIX_TILE = (16, 8, 4), (64, 2, 4)
_TALL = 8192  # from this many rows of W on, the second one is faster
_DEQUANTISE_BLOCKS, _DEQUANTISE_WARPS = 64, 4
# Of few_matmul: the most tokens, rows of W of a program, blocks on their way, and the smallest weight for which it was
# faster than decoding the weight for the vendor's product, on an H200.
_FEW_TOKENS, _FEW_ROWS, _FEW_STAGES, _FEW_SIZE = 64, 64, 4, 1 << 24
_DTYPES = (jnp.bfloat16, jnp.float16)


def refusal(weight: Stored, dtype) -> str | None:
    """The reason why `dequantize` cannot decode this weight to `dtype`, or None."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if not isinstance(weight, FourBit):
        return f"a weight in {type(weight).__name__}"
    if dtype not in (*_DTYPES, jnp.float32):
        return f"dtype {jnp.dtype(dtype).name}"

    def compare():
        # Several programs, of which the last has less to do.
        small = weight.random_like((11, BLOCK * _DEQUANTISE_BLOCKS // 4), np.random.default_rng(0))
        return [dequantize(small, dtype)], [small.decode(jnp.float32)]

    return dispatch.first_use("quant_matmul", "triton", f"{weight.kind} to {jnp.dtype(dtype).name}", compare)


def small_refusal(weight: Stored, dtype, tokens: int) -> str | None:
    """The reason why `small_matmul` cannot multiply this number of tokens in `dtype` by this weight, or None."""
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
    _, tile = _kernel_of(tokens, weight.shape[0])

    def compare():
        draw = np.random.default_rng(0)
        # Neither the rows nor the blocks of a row are a multiple of the tile's.
        rows, columns = _TALL * (tile == _TALL_MATRIX_TILE) + 2 * tile[0] + 3, BLOCK * (2 * tile[1] + 1)
        small = weight.random_like((rows, columns), draw)
        x = jnp.asarray(draw.standard_normal((tokens, columns)), dtype)
        return [small_matmul(x, small)], [exact_product(x, small)]

    call = f"{jnp.dtype(dtype).name}, {weight.kind}, {tokens} tokens, {tile}"
    return dispatch.first_use("quant_matmul", "triton, up to 16 tokens", call, compare)


def _kernel_of(tokens: int, rows: int) -> tuple[str, tuple[int, int, int]]:
    """The kernel's name and tile (rows of W at a time, blocks of 64 of each row, warps)."""
    if tokens <= _VECTOR_TOKENS:
        return "vector_kernel", _VECTOR_TILE
    return "matrix_kernel", _TALL_MATRIX_TILE if rows >= _TALL else _MATRIX_TILE


def _parts(weight: FourBit) -> tuple[list[jax.Array], int]:
    """(the arrays of triton_kernels.py, whether absmax are quantised)."""
    scales = [s for s in (weight.nested_absmax, weight.nested_map, weight.offset) if s is not None]
    nested = len(scales) == 3
    return [weight.codes, weight.absmax, *(scales if nested else [weight.absmax] * 3), jnp.asarray(weight.table)], int(
        nested
    )


def few_refusal(weight: Stored, dtype, tokens: int) -> str | None:
    """Why `few_matmul` should not multiply 17 to 64 tokens by this weight, or None."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if (reason := targets.measured(targets.HOPPER)) is not None:
        return reason
    if not isinstance(weight, NF4) or dtype != jnp.bfloat16:
        return f"{type(weight).__name__} in {jnp.dtype(dtype).name}; NF4 in bfloat16 alone"
    if tokens > _FEW_TOKENS:
        return f"{tokens} tokens; up to {_FEW_TOKENS}"
    rows, columns = weight.shape if len(weight.shape) == 2 else (0, 0)
    if rows % _FEW_ROWS or columns % BLOCK or weight.size < _FEW_SIZE:
        return f"weight {weight.shape}; multiples of {_FEW_ROWS} and {BLOCK}, and {_FEW_SIZE} numbers or more"
    return None


def few_matmul(x: jax.Array, weight: FourBit) -> jax.Array:
    """x W^T, [tokens, out] in x's dtype with float32 sums. An element of W is the table's value rounded to bfloat16,
    times the scale, rounded to bfloat16 again. Only if `few_refusal` is None.

      x: [17 to 64, in] bfloat16.
      weight: [out, in] in NF4.
    """
    from jaxtune.pallas.quant_matmul import triton_few_kernels

    (tokens, inner), outer = x.shape, weight.shape[0]
    arrays, nested = _parts(weight)
    blocks, programs = inner // BLOCK, outer // _FEW_ROWS
    # Programs enough for all multiprocessors, each with a sum over 16 blocks or more.
    splits = next(n for n in (8, 4, 2, 1) if n == 1 or (blocks % n == 0 and blocks // n >= 16 and programs * n <= 512))
    halves = jnp.moveaxis(x.reshape(tokens, inner // 2, 2), 2, 0)
    (split_sums,) = compat.triton_call(
        triton_few_kernels.few_kernel,
        (halves, *arrays),
        (jax.ShapeDtypeStruct((splits, tokens, outer), x.dtype if splits == 1 else jnp.float32),),
        (programs, splits),
        warps=4,
        stages=_FEW_STAGES,
        COUNT=tokens,
        INNER=inner,
        OUTER=outer,
        NESTED=nested,
        ROWS=_FEW_ROWS,
        TOKENS=32 if tokens <= 32 else 64,
        SPLITS=splits,
        STAGES=_FEW_STAGES,
    )
    return split_sums[0] if splits == 1 else split_sums.sum(0).astype(x.dtype)


def dequantize(weight: FourBit, dtype=None) -> jax.Array:
    """The weight in `dtype` (None: dtype_name), bit for bit as FourBit.decode. Only if `refusal` is None."""
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
    """x W^T, [tokens, out] in x's dtype with float32 sums, without writing the decoded W. Decoded elements are float32
    for one or two tokens; for more they are rounded to x's dtype. Only if `small_refusal` is None.

      x: [1 to 16, in] bfloat16 or float16.
      weight: [out, in] in NF4 or FP4; `in` is a multiple of 64.
    """
    from jaxtune.pallas.quant_matmul import triton_kernels

    (tokens, inner), outer = x.shape, weight.shape[0]
    arrays, nested = _parts(weight)
    name, (rows, blocks, warps) = _kernel_of(tokens, outer)
    (out,) = compat.triton_call(
        getattr(triton_kernels, name),
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
