"""The grouped product (rows sorted by expert, each times the weight of its expert) as a Triton kernel, for the forward
and for the gradient of the rows, dx. It is for every NVIDIA GPU since Ampere (compute capability 8.0).

Each program computes one tile of the output. All rows of a tile have one expert, so all tiles cost the same; tiles
without tokens store zeros. Programs are ordered in bands of rows, so that programs that run at the same time share rows
and weights in the L2 cache. An adapter's product is one more step of the sum over K. `product` calls the kernel,
`refusal` says whether it supports a call, and `tile` returns the sizes of its tiles on this GPU. The kernel's body is
in triton_kernels.py, which imports triton and is therefore imported only where it is used.

It was run on an H200 (README.md). The sizes of tiles are chosen to fit, and were not measured against others.
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
    """The sizes by which the kernel divides its work on one kind of GPU. A program computes one tile of the output, and
    sums over K, the axis that both operands share, step by step."""

    rows: int  # the rows of a tile of the output; Groups.tile_rows is a multiple of it
    columns: int  # the columns of a tile of the output
    step: int  # how many numbers along K a step multiplies
    warps: int  # the number of warps of a program
    stages: int  # how many steps are in shared memory at a time (Triton's num_stages)
    # programs are numbered band by band: all tiles of the output in `band` rows of tiles, then the next rows
    band: int = 8


# Tiles by the shared memory of a block in KB (9.0 has 227, 8.0 and 8.7 have 163, all others 99).
TILES = {227: Tile(128, 256, 64, 8, 3), 163: Tile(128, 128, 32, 4, 4), 99: Tile(128, 128, 32, 4, 3)}
_SHARED_MEMORY_KB = {(9, 0): 227, (8, 0): 163, (8, 7): 163}
_DTYPES = (jnp.bfloat16, jnp.float16)


def tile() -> Tile:
    """The tile sizes for the GPU that is compiled for, by how much shared memory a program may have there. GPUs of
    other compute capabilities than 8.0, 8.7 and 9.0 get the sizes that fit on every supported GPU. `product` calls
    it."""
    capability = dispatch.compute_capability()
    return TILES[_SHARED_MEMORY_KB.get(capability, 99) if capability else 99]


def refusal(dtype, tile_rows: int) -> str | None:
    """Returns the reason, in words, why this kernel cannot multiply rows of this dtype, or None if it can: no GPU on
    which Triton is usable (compat.triton_refusal), a dtype other than bfloat16 and float16, or tile_rows that is no
    multiple of 128. tile_rows is the number of rows of a tile, which belong to one expert (Groups.tile_rows). The
    function runs no check of the kernel's results; first_use.refusal does. `implementations` of api.py asks both."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if dtype not in _DTYPES:
        return f"dtype {jnp.dtype(dtype).name}"
    if tile_rows % TILES[99].rows:
        return f"tiles of {tile_rows} rows, no multiple of {TILES[99].rows}"
    return None


def product(x, weight, groups: Groups, contract: int, extra=None, *, cut: Tile | None = None):
    """Multiplies each row of x [rows, K] by the weight of its expert, by the kernel: -> [rows, n] in x's dtype.

    Args:
      x: rows sorted by expert as `groups` says.
      weight: [E, n, K] if contract is 2, or [E, K, n] if contract is 1, in x's dtype.
      groups: which expert each tile of rows belongs to.
      contract: the axis of `weight` that is summed over, K's: for weights [E, out, in] it is 2 in the forward and 1 for
        the gradient of x; for transposed ones [E, in, out] it is 1 and 2.
      extra: None, or two operands of an adapter, whose product is added to the result: u [rows, r], and for each expert
        [E, n, r] (contract = 2) or [E, r, n] (contract = 1). In the forward they are scale x A^T and B, for the
        gradient of x scale dy B and A.
      cut: the sizes of tiles; None: those of `tile()` for this GPU. Only tests pass it.
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
