"""Norms rows, rounds them to e4m3 and multiplies them by a thin array, in one Triton kernel that writes no normed rows.

Its time is that of memory; the plain sequence reads rows three times and writes them once more. The thin product is of
the rows themselves, with the norm's weight inside the thin array, times the inverse root mean square, which is needed
only at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, targets
from jaxtune.pallas.quant_matmul.fp8_rounding import BLOCK

_LARGEST_RANK = 64
_WIDEST = 8192  # numbers of a row, whose scales of blocks registers hold
_HALF = BLOCK // 2  # columns that are read at once, if rows have scales and are no multiple of 128


class Tile(NamedTuple):
    rows: int  # of a program
    columns: int  # that are read at once
    warps: int  # of a program
    stages: int  # tiles in shared memory: those that are read while one is used, and that one


def tile(width: int, size: int) -> Tile:
    """For a thin array of `width` columns (0: none) and rows of `size` numbers."""
    columns = _HALF if size % BLOCK else BLOCK
    if not width:
        return Tile(16, columns, 4, 1)  # nothing is read ahead, but many programs run side by side
    if targets.here() is targets.HOPPER:
        return Tile(64, columns, 8, 3)
    return Tile(32, columns, 4, 2)


def refusal(x, rank: int, blocks: bool) -> str | None:
    """The reason why the kernel cannot compute a call, or None. x: [rows, size], an array or a shape."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if (reason := targets.fp8_refusal()) is not None:
        return reason
    if x.dtype != jnp.bfloat16:
        return f"dtype {jnp.dtype(x.dtype)}"
    multiple = BLOCK if blocks else _HALF
    if x.shape[1] % multiple:
        return f"rows of {x.shape[1]} numbers, no multiple of {multiple}"
    if x.shape[1] > _WIDEST:
        return f"rows of {x.shape[1]} numbers, more than {_WIDEST}"
    return f"rank {rank}, more than {_LARGEST_RANK}" if rank > _LARGEST_RANK else None


def width_of(rank: int) -> int:
    return max(16, 1 << (rank - 1).bit_length()) if rank else 0


def normed(
    x: jax.Array, factors: jax.Array, a: jax.Array | None, eps: float, blocks: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """(codes of the normed x e4m3[rows, size]; scales float32[rows, 1], or with `blocks` [rows, size / 128]; inverse
    root mean squares float32[rows, 1]; the normed x times a^T bfloat16[rows, r], or None). Only if `refusal` is None.

      x: bfloat16[rows, size].
      factors: float32[size], the norm's.
      a: float[r, size], or None.
      eps: added to the mean square.
      blocks: each 128 numbers have a scale, not each row.
    """
    from jaxtune.pallas.quant_matmul import fp8_normed_kernels

    rows, size = x.shape
    rank = 0 if a is None else len(a)
    shape = tile(width_of(rank), size)
    side = x if a is None else (a.astype(jnp.float32) * factors).astype(x.dtype)
    codes, scales, inner, inverses = compat.triton_call(
        fp8_normed_kernels.normed_to_fp8_kernel,
        (x, factors, side),
        [
            jax.ShapeDtypeStruct((rows, size), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((size // BLOCK, rows) if blocks else (rows,), jnp.float32),
            jax.ShapeDtypeStruct((rows, max(rank, 1)), x.dtype),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ],
        (-(-rows // shape.rows),),
        warps=shape.warps,
        stages=shape.stages,
        ROWS=rows,
        SIZE=size,
        RANK=rank,
        WIDTH=width_of(rank),
        EPS=float(eps),
        BLOCKS=int(blocks),
        BLOCK=shape.rows,
        COLUMNS=shape.columns,
    )
    return codes, scales.T if blocks else scales[:, None], inverses[:, None], inner if rank else None
