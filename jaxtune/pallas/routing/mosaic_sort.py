"""The two passes of the counting sort over all pairs as Pallas Mosaic GPU kernels: histograms, and slots.

A block is 128 pairs. Both passes compare a block with itself or with the experts' numbers, in registers, and sum along
rows. The work between them, sums over blocks and the groups' starts, is done by the reference.

On an H200, 16,384 tokens: 0.033 ms for 32 experts, 4 a token (XLA's 0.028), 0.034 for 128 and 8 (0.056).
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas import gpu_kernel

BLOCK = 128
_EXPERTS = 64  # experts that are compared at a time
_ALONG = plgpu.Layout.WGMMA
_ROWS, _COLUMNS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def refusal() -> str | None:
    """The reason why these kernels cannot run here, or None: they need a Hopper GPU, or the interpreter."""
    from jaxtune.pallas.dispatch import compute_capability

    if gpu_kernel.interpreter() is None and compute_capability() != (9, 0):
        return "needs a Hopper GPU (compute capability 9.0)"
    return None


def _kernel(body, name: str, blocks: int, out_shape):
    """Returns the Pallas kernel of `body` as a function of arrays, with one program for each of `blocks` blocks of 128
    pairs; its result is int32 of the shape out_shape. name: the kernel's, as profiles show it."""
    return gpu_kernel.kernel(
        body,
        name,
        gpu_kernel.interpreter(),
        out_type=jax.ShapeDtypeStruct(out_shape, jnp.int32),
        grid=(blocks,),
        grid_names=("block",),
    )


def _down(values, columns: int):
    """A column vector, `values` [rows] in registers, broadcast over `columns` columns."""
    return lax.broadcast_in_dim(values, (values.shape[0], columns), (0,))


def _across(values, rows: int):
    """A row vector, `values` [columns] in registers, broadcast over `rows` rows."""
    return lax.broadcast_in_dim(values, (rows, values.shape[0]), (1,))


def _number(rows: int, columns: int, axis: int):
    """int32[rows, columns] in registers: the index along an axis."""
    return plgpu.broadcasted_iota(jnp.int32, (rows, columns), axis, layout=_ALONG)


def _histogram_kernel(expert_ref, out_ref):
    """The kernel's body: out_ref[block, e], int32, is the number of pairs of this program's block that go to expert e;
    expert_ref has each pair's expert, int32[pairs]. Both are in global memory."""
    block = lax.axis_index("block")
    pairs = plgpu.load(expert_ref.at[pl.ds(block * BLOCK, BLOCK)], layout=_COLUMNS, optimized=False)
    for first in range(0, out_ref.shape[1], _EXPERTS):
        member = _across(pairs, _EXPERTS) == _number(_EXPERTS, BLOCK, 0) + first
        out_ref[block, pl.ds(first, _EXPERTS)] = jnp.where(member, 1, 0).sum(1)


def _slot_kernel(expert_ref, firsts_ref, out_ref):
    """The kernel's body: out_ref[pair], int32[pairs], is the row of the first pair of its block and expert, firsts_ref
    int32[blocks, E], plus the number of those pairs before it; expert_ref has each pair's expert, int32[pairs]. All
    are in global memory."""
    block = lax.axis_index("block")
    here = pl.ds(block * BLOCK, BLOCK)
    pairs = plgpu.load(expert_ref.at[here], layout=_ROWS, optimized=False)
    parts = []
    for first in range(0, BLOCK, _EXPERTS):
        others = plgpu.load(expert_ref.at[pl.ds(block * BLOCK + first, _EXPERTS)], layout=_COLUMNS, optimized=False)
        before = _number(BLOCK, _EXPERTS, 0) > _number(BLOCK, _EXPERTS, 1) + first
        same = _down(pairs, _EXPERTS) == _across(others, BLOCK)
        parts.append(jnp.where(same & before, 1, 0).sum(1))
    for first in range(0, firsts_ref.shape[1], _EXPERTS):
        rows = plgpu.load(firsts_ref.at[block, pl.ds(first, _EXPERTS)], layout=_COLUMNS, optimized=False)
        own = _down(pairs, _EXPERTS) == _number(BLOCK, _EXPERTS, 1) + first
        parts.append(jnp.where(own, _across(rows, BLOCK), 0).sum(1))
    out_ref[here] = functools.reduce(operator.add, parts)


def histogram(blocks: jax.Array, num_experts: int) -> jax.Array:
    """int32[n, E] for E = num_experts: the number of pairs of each block that go to each expert; blocks has the pairs'
    experts, int32[n, 128]."""
    padded = num_experts + -num_experts % _EXPERTS
    count = _kernel(_histogram_kernel, "expert_histograms", len(blocks), (len(blocks), padded))
    return count(blocks.reshape(-1))[:, :num_experts]


def slots(blocks: jax.Array, firsts: jax.Array) -> jax.Array:
    """int32[n, 128]: firsts [n, E] of each pair's block and expert, plus the number of earlier pairs of that block and
    expert; blocks has the pairs' experts, int32[n, 128]."""
    firsts = jnp.pad(firsts, ((0, 0), (0, -firsts.shape[1] % _EXPERTS)))
    place = _kernel(_slot_kernel, "expert_slots", len(blocks), (blocks.size,))
    return place(blocks.reshape(-1), firsts).reshape(blocks.shape)
