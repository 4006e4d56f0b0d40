"""The grouped product as a Triton kernel, for the forward and for the gradient of the rows, on every NVIDIA GPU since
Ampere (compute capability 8.0).

Each program computes one tile of the output. All rows of a tile have one expert, so all tiles cost the same; tiles
without tokens store zeros. Programs are ordered in bands of rows, which share rows and weights in the L2 cache. Tile
sizes were chosen to fit, not measured.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, targets
from jaxtune.pallas.grouped_matmul.layout import Groups


@dataclasses.dataclass(frozen=True)
class Tile:
    """How the kernel divides its work on one kind of GPU: a program sums a tile of the output over K, step by step."""

    rows: int  # the rows of a tile of the output; Groups.tile_rows is a multiple of it
    columns: int  # the columns of a tile of the output
    step: int  # how many numbers along K a step multiplies
    warps: int  # the number of warps of a program
    stages: int  # how many steps are in shared memory at a time (Triton's num_stages)
    # programs are numbered band by band: all tiles of the output in `band` rows of tiles, then the next rows
    band: int = 8


# Tiles by the shared memory of a block in KB (9.0 has 227, 8.0 and 8.7 have 163, all others 99).
TILES = {227: Tile(128, 256, 64, 8, 3), 163: Tile(128, 128, 32, 4, 4), 99: Tile(128, 128, 32, 4, 3)}
_DTYPES = (jnp.bfloat16, jnp.float16)


def tile() -> Tile:
    """The Tile for the GPU that is compiled for, by its shared memory; other GPUs than 8.0, 8.7 and 9.0 get the
    smallest.
    """
    return TILES[targets.shared_memory_kb()]


def refusal(dtype, tile_rows: int) -> str | None:
    """The reason why this kernel cannot multiply rows of this dtype, or None; it does not check results."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if dtype not in _DTYPES:
        return f"dtype {jnp.dtype(dtype).name}"
    if tile_rows % TILES[99].rows:
        return f"tiles of {tile_rows} rows, no multiple of {TILES[99].rows}"
    return None


def product(x, weight, groups: Groups, contract: int, extra=None, *, tile_sizes: Tile | None = None):
    """Each row of x times the weight of its expert, plus an adapter's product: [rows, n] in x's dtype. Only if
    `refusal` is None.

      x: [rows, K], sorted by expert. weight: [E, n, K] (contract = 2) or [E, K, n] (contract = 1), in x's dtype.
      extra: None, or an adapter's (u [rows, r], [E, n, r] or [E, r, n]).
      tile_sizes: the sizes of tiles; None: `tile()`.
    """
    from jaxtune.pallas.grouped_matmul import triton_kernels

    tile_sizes = tile_sizes or tile()
    inner, columns = weight.shape[contract], weight.shape[3 - contract]
    rank = 0
    u, side = x, weight
    if extra is not None:
        u, side = extra
        side = side.astype(x.dtype)
        rank = u.shape[1]
    row_tiles, column_tiles = groups.rows // tile_sizes.rows, math.ceil(columns / tile_sizes.columns)
    (out,) = compat.triton_call(
        triton_kernels.product_kernel,
        (x, weight, u, side, groups.tile_expert, groups.count[None]),
        (jax.ShapeDtypeStruct((groups.rows, columns), x.dtype),),
        (row_tiles * column_tiles,),
        warps=tile_sizes.warps,
        stages=tile_sizes.stages,
        ROW_TILES=row_tiles,
        GROUP_TILES=groups.tile_rows // tile_sizes.rows,
        INNER=inner,
        OUTER=columns,
        RANK=rank,
        RANK_STEP=max(16, 1 << (rank - 1).bit_length()) if rank else 16,
        INNER_LAST=int(contract == 2),
        ROWS=tile_sizes.rows,
        COLUMNS=tile_sizes.columns,
        STEP=tile_sizes.step,
        BAND=tile_sizes.band,
    )
    return out
