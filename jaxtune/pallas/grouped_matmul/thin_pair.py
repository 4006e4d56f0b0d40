"""The two thin products of the backward of experts' adapters that read an output's gradient, in one pass over it by a
Triton kernel: jaxtune.pallas.thin_pair for rows sorted by expert.

A program multiplies one block of columns by the rows of one expert, or by a range of them if there are few experts.
Programs begin with the experts that have the most rows. Empty rows are neither read nor written: XLA gives them zeros.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, dispatch, targets
from jaxtune.pallas.grouped_matmul import mosaic, reference
from jaxtune.pallas.grouped_matmul.layout import Groups, groups_of
from jaxtune.pallas.thin_pair.triton import Tile

# Its programs for each multiprocessor are the fewest to which the rows of few experts are divided.
TILE = Tile(rows=64, columns=512, warps=4, stages=3, programs=5)
_LARGEST_RANK = _WIDTH = 16  # larger ranks write more than an eighth of the gradient's bytes, and gain little


def refusal(dout, b) -> str | None:
    """Why the kernel cannot compute a call (dout [rows, out], b [E, out, r]), or differs from plain JAX, or None."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if dout.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {dout.dtype}"
    _, out, rank = b.shape
    if out % 8:
        return f"an output of {out} numbers, no multiple of 8"
    if rank > _LARGEST_RANK:
        return f"rank {rank}, more than {_LARGEST_RANK}"
    return _first_use(jnp.dtype(dout.dtype), jnp.dtype(b.dtype), rank)


def _first_use(dtype, b_dtype, rank: int) -> str | None:

    def compare():
        groups = groups_of(jnp.asarray((300, 0, 1, 128, 700), jnp.int32), 1500)  # with tiles that no expert needs
        keys = jax.random.split(jax.random.key(0), 3)
        inside = jnp.arange(groups.tile_rows) < groups.tile_sizes[:, None]

        def rows(key, size):
            return (jax.random.normal(key, (groups.rows, size)) * inside.reshape(-1, 1)).astype(dtype)

        dout, inner = rows(keys[0], 1352), mosaic.padded_rank_axis(rows(keys[1], rank), 1)
        b = jax.random.normal(keys[2], (groups.num_experts, 1352, rank)).astype(b_dtype)
        results = jax.jit(thin_pair)(dout, b, inner, groups)

        def exact(dout, b, inner):
            dinner = mosaic.padded_rank_axis(reference.thin(dout, b, groups, 1), 1)
            return dinner, reference.contract_rows(dout, inner[:, :rank], groups, jnp.float32)

        wide = (array.astype(jnp.float32) for array in (dout, b.astype(dtype), inner))
        return results, dispatch.exactly(exact)(*wide)

    return dispatch.first_use("grouped_matmul", "thin_pair", f"{dtype}, {b_dtype}, rank {rank}", compare)


def thin_pair(dout, b, inner, groups: Groups) -> tuple[jax.Array, jax.Array]:
    """(dout b [rows, r] in dout's dtype, r padded with zeros to a multiple of 64; dout^T inner float32[E, out, r],
    summed over each expert's rows), with the same bits in each run. Empty rows of dout b are zero, whatever they are in
    dout and inner.

      dout: [rows, out], of 16 bits, sorted by expert.
      b: [E, out, r].
      inner: [rows, at least r] in dout's dtype, rows times A.
    """
    from jaxtune.pallas.grouped_matmul import triton_kernels

    rows, (experts, out, rank) = len(dout), b.shape
    blocks = -(-out // TILE.columns)
    ranges = -(-targets.multiprocessors() * TILE.programs // (blocks * experts))
    dinner, db = compat.triton_call(
        triton_kernels.thin_pair_kernel,
        (dout, b, inner, jnp.argsort(-groups.sizes), groups.starts(), groups.sizes),
        [
            jax.ShapeDtypeStruct((blocks, rows, rank), jnp.float32),
            jax.ShapeDtypeStruct((ranges, experts, out, rank), jnp.float32),
        ],
        (blocks, experts * ranges),
        warps=TILE.warps,
        stages=TILE.stages,
        ROWS=rows,
        EXPERTS=experts,
        OUT=out,
        RANK=rank,
        INNER=inner.shape[1],
        WIDTH=_WIDTH,
        BLOCK=TILE.rows,
        COLUMNS=TILE.columns,
        RANGES=ranges,
    )
    # Rows without a token were not written: what is in them could be anything, also NaN.
    inside = jnp.arange(groups.tile_rows) < groups.tile_sizes[:, None]
    total = jnp.where(inside[:, :, None], reference.tiled(dinner.sum(0), groups), 0)
    return mosaic.padded_rank_axis(total.reshape(rows, rank).astype(dout.dtype), 1), db.sum(0)
