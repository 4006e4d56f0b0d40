"""The product of two arrays of e4m3 codes as a Triton kernel, for NVIDIA GPUs with FP8 (compute capability 8.9 and
later), with the options of fp8_mosaic.py. It ran in Triton's interpreter only; tile sizes were chosen to fit, not
measured.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, targets

ROWS = 128  # rows of a tile
_COLUMNS = (128, 64)  # columns of a tile; the first that divide the output's are taken
_BLOCK = 128  # codes along K that share a scale, if rows do not
_STEPS = (128, 64)  # codes along K at a time; the first that divide K are taken
_WARPS, _STAGES, _BAND = 8, 3, 8  # warps of a program, steps on their way, tiles of rows in a band


def refusal(in_size: int, out_size: int, rank: int, dtype, in_blocks: bool) -> str | None:
    """Why this kernel cannot multiply e4m3 [tokens, in_size] by [out_size, in_size], or None."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if (reason := targets.fp8_refusal()) is not None:
        return reason
    multiple = _BLOCK if in_blocks else _STEPS[-1]
    for size in (in_size, out_size):
        if size % multiple:
            return f"size {size} is not a multiple of {multiple}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {jnp.dtype(dtype)}"
    return f"adapters of rank {rank} in all, more than 64" if rank > 64 else None


def product(x, w, x_scale, w_scale, extra=None, tiles=None, *, dtype, in_blocks: bool):
    """x [M, K] w [N, K]^T times both scales, plus u l^T: dtype[M, N]. Only if `refusal` is None.

    x, w: e4m3. x_scale, w_scale: float32[M], [N]; with `in_blocks` [K / 128, M], [N / 128, K / 128].
    extra: None, or (u [M, R], l [N, R]), R of 16, 32 or 64; without `in_blocks` the scales multiply u l^T, too.
    tiles: None, or int32[M / 128] twice: each 128 rows' expert, and its rows that are not empty; w, w_scale and l
    then
      have a leading axis of experts.
    in_blocks: each 128 numbers have a scale, not each row.
    """
    from jaxtune.pallas.quant_matmul import fp8_triton_kernels

    (tokens, inner), outer = x.shape, w.shape[-2]
    # A block's sum is in registers beside the total; with 128 columns both spill on Ada.
    widest = 64 if in_blocks and targets.here() is targets.ADA else _COLUMNS[0]
    columns = next(size for size in _COLUMNS if size <= widest and outer % size == 0)
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
