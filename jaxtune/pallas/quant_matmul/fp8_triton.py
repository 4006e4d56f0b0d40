"""The product of two arrays of e4m3 codes as a Triton kernel, for NVIDIA GPUs that multiply in FP8 (compute capability
8.9 and later); the kernel of fp8_mosaic.py, for Hopper, is tried first. It has the options of that one: scales of rows
or of 128 numbers, an adapter, and rows that are sorted by expert. For scales of rows quant_matmul uses it only on
request, for one reason: it was not measured beside the vendor's product. grouped_matmul uses it for both kinds of
scales without a request.

`product` calls the kernel, and `refusal` says which products it supports. A program computes one tile of the output;
programs are ordered in bands of rows. The kernel's body is in fp8_triton_kernels.py, which imports triton and is
therefore imported only where it is used. It was run in Triton's interpreter only. The sizes of tiles are chosen to fit,
and were not measured.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, dispatch

ROWS = 128  # rows of a tile
_COLUMNS = (128, 64)  # columns of a tile; the first that divide the output's are taken
_BLOCK = 128  # codes along K that share a scale, if rows do not
_STEPS = (128, 64)  # codes along K at a time; the first that divide K are taken
_WARPS, _STAGES, _BAND = 8, 3, 8  # warps of a program, steps on their way, tiles of rows in a band


def refusal(in_size: int, out_size: int, rank: int, dtype, in_blocks: bool) -> str | None:
    """Returns the reason, in words, why this kernel cannot multiply [rows, in_size] by [out_size, in_size] in e4m3, add
    the product of an adapter of this rank (0: none), and return it in `dtype`; or None if it can. Reasons are: no GPU
    of compute capability 8.9 or later with jax-triton, sizes that are no multiples of 64 (128 with `in_blocks`), a
    dtype that has not 16 bits, or a rank above 64. fp8_product.multiply and grouped_matmul's fp8_experts.py ask it.
    in_blocks: True if each 128 numbers along in_size have a scale; False if a whole row has one."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    capability = dispatch.compute_capability()
    assert capability is not None
    if capability < (8, 9):
        return f"needs compute capability 8.9, this GPU has {capability[0]}.{capability[1]}"
    multiple = _BLOCK if in_blocks else _STEPS[-1]
    for size in (in_size, out_size):
        if size % multiple:
            return f"size {size} is not a multiple of {multiple}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {jnp.dtype(dtype)}"
    return f"adapters of rank {rank} in all, more than 64" if rank > 64 else None


def product(x, w, x_scale, w_scale, extra=None, tiles=None, *, dtype, in_blocks: bool):
    """Multiplies codes by the kernel: x [M, K] w [N, K]^T times the scales of both, plus the adapter's product u l^T,
    as dtype[M, N]. It has the arguments of fp8_mosaic.product. Call it only if `refusal` returns None.
    fp8_product.by_kernel calls it.

    Args:
      x, w: e4m3 codes.
      x_scale, w_scale: float32 [M] and [N]; with `in_blocks` [K / 128, M] and [N / 128, K / 128].
      extra: None, or an adapter's operands in bfloat16, u [M, R] and l [N, R], where R is from fp8_mosaic.filled_rank:
        16, 32 or 64. If `in_blocks` is False, the kernel multiplies their product by x_scale and w_scale like the rest,
        so the caller divides u by x_scale and l by w_scale.
      tiles: None, or for rows that are sorted by expert two int32[M / 128]: the expert of each 128 rows, and how many
        of the rows, which come first, are not empty. Then w, w_scale and l have a leading axis of experts.
      dtype: of the result, bfloat16 or float16.
      in_blocks: True if each 128 numbers along K have a scale; False if a whole row has one.
    """
    from jaxtune.pallas.quant_matmul import fp8_triton_kernels

    (tokens, inner), outer = x.shape, w.shape[-2]
    # A block's sum is in registers beside the total; with 128 columns both spill on Ada.
    most = 64 if in_blocks and dispatch.compute_capability() == (8, 9) else _COLUMNS[0]
    columns = next(size for size in _COLUMNS if size <= most and outer % size == 0)
    none = jnp.zeros((1,), jnp.int32)
    u, side = (x, w) if extra is None else extra
    (out,) = compat.triton_call(
        fp8_triton_kernels.product_kernel,
        (x, w, x_scale, w_scale, u, side, *(tiles or (none, none))),
        (jax.ShapeDtypeStruct((tokens, outer), dtype),),
        (math.ceil(tokens / ROWS) * (outer // columns),),
        warps=_WARPS,
        stages=_STAGES,
        TOKENS=tokens,
        INNER=inner,
        OUTER=outer,
        RANK=0 if extra is None else u.shape[1],
        GROUPED=int(tiles is not None),
        BLOCK=_BLOCK if in_blocks else 0,
        ROWS=ROWS,
        COLUMNS=columns,
        STEP=_BLOCK if in_blocks else next(size for size in _STEPS if inner % size == 0),
        BAND=_BAND,
    )
    return out
