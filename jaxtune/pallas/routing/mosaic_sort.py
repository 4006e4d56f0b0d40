"""The two passes over all pairs in the sort of pairs (a token with one of its experts) by expert, as Pallas Mosaic GPU
kernels for Hopper. It is a counting sort by blocks of 128 pairs: the first pass counts the pairs of each expert in each
block (`histogram`), and the second computes the row of each pair (`slots`).

Both passes compare a block with itself or with the experts' numbers, in registers, and sum along rows.
reference.sort_pairs calls them, and does what is between them: sums over blocks, and the first row of each expert.

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
    """Returns the reason, in words, why these kernels cannot run here, or None if they can: they need a Hopper GPU, or
    Pallas' interpreter (gpu_kernel.interpreted). api.sort_implementations calls it."""
    from jaxtune.pallas.dispatch import compute_capability

    if gpu_kernel.interpreter() is None and compute_capability() != (9, 0):
        return "needs a Hopper GPU (compute capability 9.0)"
    return None


def _kernel(body, name: str, blocks: int, out_shape):
    """Makes a function of arrays from a kernel's body, a function of references, for `histogram` and `slots`. The
    kernel has one program for each of `blocks` blocks of 128 pairs, and its result is int32 of the shape out_shape. It
    is compiled for the GPU, or run by Pallas' interpreter within gpu_kernel.interpreted. name: the kernel's, as
    profiles show it."""
    return gpu_kernel.kernel(
        body,
        name,
        gpu_kernel.interpreter(),
        out_type=jax.ShapeDtypeStruct(out_shape, jnp.int32),
        grid=(blocks,),
        grid_names=("block",),
    )


def _down(values, columns: int):
    """Broadcasts a vector, values [rows] of any dtype, to a matrix [rows, columns] whose columns are all equal to it,
    in registers. The kernel of the second pass compares it with a matrix of `_across` or `_number`, and so each pair
    with each other pair or each expert."""
    return lax.broadcast_in_dim(values, (values.shape[0], columns), (0,))


def _across(values, rows: int):
    """Broadcasts a vector, values [columns] of any dtype, to a matrix [rows, columns] whose rows are all equal to it,
    in registers. Both kernels compare it with a matrix of `_down` or `_number`, and so each pair with each other pair
    or each expert; the second also spreads the experts' first rows by it, of which each pair takes its own expert's."""
    return lax.broadcast_in_dim(values, (rows, values.shape[0]), (1,))


def _number(rows: int, columns: int, axis: int):
    """int32[rows, columns] in registers, in which each element is its own index along `axis`: 0 for the number of its
    row, 1 for that of its column. The kernels compare pairs with such numbers of experts or of places in a block."""
    return plgpu.broadcasted_iota(jnp.int32, (rows, columns), axis, layout=_ALONG)


def _histogram_kernel(expert_ref, out_ref):
    """The kernel's body of the first pass: sets out_ref[block, e] to the number of pairs of this program's block that
    go to expert e. expert_ref: int32[blocks * 128], the expert of each pair. out_ref: int32[blocks, experts padded to a
    multiple of 64]. Both are in global memory."""
    block = lax.axis_index("block")
    pairs = plgpu.load(expert_ref.at[pl.ds(block * BLOCK, BLOCK)], layout=_COLUMNS, optimized=False)
    for first in range(0, out_ref.shape[1], _EXPERTS):
        member = _across(pairs, _EXPERTS) == _number(_EXPERTS, BLOCK, 0) + first
        out_ref[block, pl.ds(first, _EXPERTS)] = jnp.where(member, 1, 0).sum(1)


def _slot_kernel(expert_ref, firsts_ref, out_ref):
    """The kernel's body of the second pass: sets out_ref[pair] to the row of each pair of this program's block. That is
    the row of the first pair of its block and expert, plus the number of pairs of that block and expert before it.
    expert_ref: int32[blocks * 128], the expert of each pair. firsts_ref: int32[blocks, experts padded to a multiple of
    64], the row of the first pair of each block and expert. out_ref: int32[blocks * 128]; it gets any number for a pair
    without an expert. All are in global memory."""
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
    """Counts, by the kernel, the pairs of each block that go to each expert: int32[n, E] for E = num_experts. blocks:
    int32[n, 128], the expert of each pair; E for a pair without one. It is the first pass of sort_pairs
    (reference.Passes)."""
    padded = num_experts + -num_experts % _EXPERTS
    count = _kernel(_histogram_kernel, "expert_histograms", len(blocks), (len(blocks), padded))
    return count(blocks.reshape(-1))[:, :num_experts]


def slots(blocks: jax.Array, firsts: jax.Array) -> jax.Array:
    """Computes, by the kernel, the row of each pair in the sorted buffer: int32[n, 128]. It is the row of the first
    pair of its block and expert, plus the number of earlier pairs of that block and expert; for a pair without an
    expert it can be any number. It is the second pass of sort_pairs (reference.Passes).

    Args:
      blocks: int32[n, 128], the expert of each pair; E, the number of experts, for a pair without one.
      firsts: int32[n, E], the row of the first pair of each block and expert.
    """
    firsts = jnp.pad(firsts, ((0, 0), (0, -firsts.shape[1] % _EXPERTS)))
    place = _kernel(_slot_kernel, "expert_slots", len(blocks), (blocks.size,))
    return place(blocks.reshape(-1), firsts).reshape(blocks.shape)
