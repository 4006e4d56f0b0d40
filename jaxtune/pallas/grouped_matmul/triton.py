"""The grouped product as a Triton kernel, forward and dx, for every NVIDIA GPU since Ampere (compute capability 8.0).

A program has a tile of the output. A tile of rows has one expert, so all tiles cost the same; empty ones store zeros.
Programs are ordered in bands of rows, so that programs that run at the same time share rows and weights in the L2
cache. An adapter's product is one more step along K. The kernel is in triton_kernels.py, which imports triton and is
therefore imported only where it is used.

It was run on an H200 (README.md). Tiles are chosen to fit, and not measured.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, dispatch
from jaxtune.pallas.grouped_matmul.layout import Groups


@dataclasses.dataclass(frozen=True)
class Tile:
    """How the kernel divides its work on one kind of GPU."""

    rows: int  # of a tile of the output
    columns: int  # of a tile of the output
    step: int  # columns along K at a time
    warps: int  # warps of a program
    stages: int  # steps that are loaded ahead
    band: int = 8  # tiles of rows in a band


# Tiles by the shared memory of a block in KB (9.0 has 227, 8.0 and 8.7 have 163, all others 99).
TILES = {227: Tile(128, 256, 64, 8, 3), 163: Tile(128, 128, 32, 4, 4), 99: Tile(128, 128, 32, 4, 3)}
_SHARED_MEMORY_KB = {(9, 0): 227, (8, 0): 163, (8, 7): 163}
_DTYPES = (jnp.bfloat16, jnp.float16)


def tile() -> Tile:
    """The tile for the GPU to lower for; an unknown GPU gets the one that fits everywhere."""
    capability = dispatch.compute_capability()
    return TILES[_SHARED_MEMORY_KB.get(capability, 99) if capability else 99]


def refusal(dtype, tile_rows: int) -> str | None:
    """The reason why this kernel cannot multiply rows of this dtype in tiles of tile_rows rows, or None."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if dtype not in _DTYPES:
        return f"dtype {jnp.dtype(dtype).name}"
    if tile_rows % TILES[99].rows:
        return f"tiles of {tile_rows} rows, no multiple of {TILES[99].rows}"
    return None


def product(x, weight, groups: Groups, contract: int, extra=None, *, cut: Tile | None = None):
    """The grouped product by the kernel: x [rows, K] times each expert's weight [E, n, K] (contract = 2) or [E, K, n]
    (contract = 1) -> [rows, n] in x's dtype.

    Args:
      x: rows sorted as `groups` says.
      weight: an array in x's dtype.
      groups: of the rows.
      contract: the axis of the weight that is summed over.
      extra: None, or (u [rows, r], l [E, n, r] or [E, r, n]), whose product is added: an adapter's.
      cut: None: the tile of this GPU.
    """
    from jaxtune.pallas.grouped_matmul import triton_kernels

    cut = cut or tile()
    inner, columns = weight.shape[contract], weight.shape[3 - contract]
    rank = 0
    u, side = x, weight
    if extra is not None:
        u, side = extra
        side = side.astype(x.dtype)
        rank = u.shape[1]
    row_tiles, column_tiles = groups.rows // cut.rows, math.ceil(columns / cut.columns)
    (out,) = compat.triton_call(
        triton_kernels.product_kernel,
        (x, weight, u, side, groups.tile_expert, groups.count[None]),
        (jax.ShapeDtypeStruct((groups.rows, columns), x.dtype),),
        (row_tiles * column_tiles,),
        warps=cut.warps,
        stages=cut.stages,
        ROW_TILES=row_tiles,
        GROUP_TILES=groups.tile_rows // cut.rows,
        INNER=inner,
        OUTER=columns,
        RANK=rank,
        RANK_STEP=max(16, 1 << (rank - 1).bit_length()) if rank else 16,
        FAST=int(contract == 2),
        ROWS=cut.rows,
        COLUMNS=cut.columns,
        STEP=cut.step,
        BAND=cut.band,
    )
    return out
