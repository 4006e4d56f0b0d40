"""The gated activation of a layer of experts and the thin products that the adapters of its down projection need, by
Triton kernels on Hopper: pallas/gated/thin.py for rows sorted by expert.

Their time is that of memory, and neither reads the inner rows again for a thin product. In the forward a program has
some rows of one expert, and all columns; in the backward a block of columns and a chunk of rows of one expert, whose
sums stay in registers. Chunks and blocks are added in one order.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, dispatch, targets
from jaxtune.pallas.gated import RowGate
from jaxtune.pallas.gated import triton as gated
from jaxtune.pallas.gated.reference import gated_rows, gated_rows_backward
from jaxtune.pallas.grouped_matmul import mosaic, mosaic_sums, reference
from jaxtune.pallas.grouped_matmul.layout import Groups, ends_of, groups_of

_LARGEST_RANK = _WIDTH = 16  # as of thin_pair.py
_CHUNK = 8  # tiles of rows that a program of the backward has, at most


class Tile(NamedTuple):
    rows: int  # of a tile of gate and up that a program reads at once
    columns: int  # of such a tile
    warps: int  # of a program
    stages: int  # tiles in shared memory: those that are read while one is used, and that one


FORWARD = Tile(rows=16, columns=128, warps=4, stages=3)
BACKWARD = Tile(rows=32, columns=64, warps=4, stages=3)
_INTERLEAVED = Tile(rows=32, columns=32, warps=2, stages=4)  # of the backward, where gate and up are in turns


def refusal(gate_up, rank: int, gate: RowGate) -> str | None:
    """Why the kernels cannot compute a call (gate_up [rows, 2 I]), or differ from plain JAX, or None."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if (reason := targets.measured(targets.HOPPER)) is not None:
        return reason
    reason = gated.unsupported(gate_up.dtype, gate)
    if reason is not None:
        return reason
    if gate_up.shape[1] % 16:
        return f"inner rows of {gate_up.shape[1] // 2} numbers, no multiple of 8"
    if rank > _LARGEST_RANK:
        return f"rank {rank}, more than {_LARGEST_RANK}"
    return _first_use(jnp.dtype(gate_up.dtype), gate, rank)


def _first_use(dtype, gate: RowGate, rank: int) -> str | None:

    def compare():
        groups = groups_of(jnp.asarray((300, 0, 1, 128, 700), jnp.int32), 1500)  # with tiles that no expert needs
        keys = jax.random.split(jax.random.key(0), 5)
        inside = (jnp.arange(groups.tile_rows) < groups.tile_sizes[:, None]).reshape(-1, 1)

        def rows(key, size, dtype=dtype):
            return jnp.where(inside, 2 * jax.random.normal(key, (groups.rows, size)), 0).astype(dtype)

        gate_up, dgated, dinner = (rows(key, size) for key, size in zip(keys, (832, 416, rank)))
        weights = jnp.abs(rows(keys[3], 1, jnp.float32))[:, 0]
        a = jax.random.normal(keys[4], (groups.num_experts, rank, 416)).astype(dtype)
        results = jax.jit(_both, static_argnums=6)(
            gate_up, weights, a, dgated, mosaic.padded_rank_axis(dinner, 1), groups, gate
        )

        def exact(gate_up, weights, a, dgated, dinner):
            inner = gated_rows(gate_up, weights, gate)
            inner_again, dgate_up, dweights = gated_rows_backward(gate_up, weights, dgated, gate)
            da = reference.contract_rows(dinner, inner_again, groups, jnp.float32)
            return inner, mosaic.padded_rank_axis(reference.thin(inner, a, groups, 2), 1), dgate_up, dweights, da

        wide = (array.astype(jnp.float32) for array in (gate_up, weights, a, dgated, dinner))
        return results, dispatch.exactly(exact)(*wide)

    return dispatch.first_use("gated_rows_thin", "triton", f"{dtype}, {gate}, rank {rank}", compare)


def _both(gate_up, weights, a, dgated, dinner, groups: Groups, gate: RowGate):
    """Results of both operations; zero in rows of gate_up's gradient that no expert has."""
    inner = gated_rows_thin(gate_up, weights, a, groups, gate)
    dgate_up, *gradients = gated_rows_thin_backward(gate_up, weights, dgated, dinner, a.shape[1], groups, gate)
    inside = (jnp.arange(groups.tile_rows) < groups.tile_sizes[:, None]).reshape(-1, 1)
    return *inner, jnp.where(inside, dgate_up, 0), *gradients


def _called(kernel, arrays, out_types, grid, tile: Tile, gate: RowGate, aliases: dict[int, int], **sizes: int):
    """Calls a kernel with the constants that both have."""
    clipped = gate.limit is not None
    return compat.triton_call(
        kernel,
        arrays,
        out_types,
        grid,
        warps=tile.warps,
        stages=tile.stages,
        contract=True,
        aliases=aliases,
        BLOCK=tile.rows,
        COLUMNS=tile.columns,
        ACTIVATION=0 if clipped else gated.ACTIVATIONS[gate.activation],
        CLIPPED=int(clipped),
        LIMIT=float(gate.limit or 0.0),
        ALPHA=float(gate.alpha if clipped else 1.0),
        INTERLEAVED=int(gate.interleaved),
        **sizes,
    )


def gated_rows_thin(
    gate_up, weights, a, groups: Groups, gate: RowGate, *, thin_alone: bool = False
) -> tuple[jax.Array, jax.Array]:
    """(inner rows times their weights [rows, I]; these times a^T of their expert [rows, r], r padded with zeros to a
    multiple of 64), in gate_up's dtype. Empty rows are zero.

      gate_up: [rows, 2 I], of 16 bits, sorted by expert.
      weights: float32[rows], the router's.
      a: [E, r, I].
      thin_alone: the first result means nothing.
    """
    from jaxtune.pallas.grouped_matmul import gated_kernels

    (rows, double), (experts, rank, size) = gate_up.shape, a.shape
    assert double == 2 * size
    width = mosaic.padded_rank(rank)
    inner_rows, inner = _called(
        gated_kernels.gated_rows_thin_kernel,
        (gate_up, weights, a.astype(gate_up.dtype), groups.tile_expert, groups.tile_sizes),
        [
            jax.ShapeDtypeStruct(shape, gate_up.dtype)
            for shape in ((1, 1) if thin_alone else (rows, size), (rows, width))
        ],
        (rows // FORWARD.rows,),
        FORWARD,
        gate,
        {},
        EXPERTS=experts,
        SIZE=size,
        RANK=rank,
        INNER=width,
        WIDTH=_WIDTH,
        TILE_ROWS=groups.tile_rows,
        STORES=int(not thin_alone),
    )
    return inner_rows, inner


def gated_rows_thin_backward(
    gate_up, weights, dgated, dinner, rank: int, groups: Groups, gate: RowGate
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(gradient of gate_up [rows, 2 I] in its dtype; of the weights, float32[rows]; dinner^T times the inner rows,
    which are computed again, float32[E, r, I]), with the same bits in each run.

    The first takes gate_up's memory if nothing else reads it. Empty rows of an expert's tiles get zeros, but in tiles
    that no expert needs gate_up stays in place of a gradient: nothing may read them.

      dgated: [rows, I], the gradient of the inner rows times their weights.
      dinner: [rows, at least r], the gradient of the low-rank input.
      gate_up, weights: the forward's. rank: r.
    """
    from jaxtune.pallas.grouped_matmul import gated_kernels

    rows, size = len(gate_up), dgated.shape[1]
    tile = _INTERLEAVED if gate.interleaved else BACKWARD
    blocks = -(-size // tile.columns)
    bounds, chunk_first, chunk_rows = _chunks(groups)
    dgate_up, dweights, da = _called(
        gated_kernels.gated_rows_thin_backward_kernel,
        (gate_up, weights, dgated, dinner, chunk_first, chunk_rows),
        [
            jax.ShapeDtypeStruct(gate_up.shape, gate_up.dtype),
            jax.ShapeDtypeStruct((blocks, rows), jnp.float32),
            jax.ShapeDtypeStruct((len(chunk_first), rank, size), jnp.float32),
        ],
        (blocks, len(chunk_first)),
        tile,
        gate,
        {0: 0},
        ROWS=rows,
        SIZE=size,
        RANK=rank,
        INNER=dinner.shape[1],
        WIDTH=_WIDTH,
        TILE_ROWS=groups.tile_rows,
    )
    # Rows of tiles without an expert were not written: what is in them could be anything, also NaN.
    inside = jnp.arange(groups.tile_rows) < groups.tile_sizes[:, None]
    return dgate_up, jnp.where(inside.reshape(-1), dweights.sum(0), 0), mosaic_sums.of_runs(da, bounds)


def _chunks(groups: Groups) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Divides each expert's tiles into chunks: (int32[E + 1], first chunks; each chunk's first row; its rows that are
    not empty).
    """
    chunk_rows = _CHUNK * groups.tile_rows
    count = -(-groups.sizes // chunk_rows)
    ends = ends_of(count)
    number = jnp.arange(-(-groups.tiles // _CHUNK) + groups.num_experts, dtype=jnp.int32)
    expert = (number[:, None] >= ends).sum(1, dtype=jnp.int32)
    real_expert = jnp.minimum(expert, groups.num_experts - 1)
    first_in_expert = (number - (ends - count)[real_expert]) * chunk_rows
    rows = jnp.where(
        expert < groups.num_experts, jnp.clip(groups.sizes[real_expert] - first_in_expert, 0, chunk_rows), 0
    )
    first = jnp.where(rows > 0, groups.starts()[real_expert] + first_in_expert, 0)
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), ends.astype(jnp.int32)])
    return bounds, first.astype(jnp.int32), rows.astype(jnp.int32)
