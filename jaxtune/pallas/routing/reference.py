"""Routing in plain jnp: the sort of pairs (a token with one of its experts) by expert, the copy of tokens to rows and
the sum of a token's rows. Kernels replace only the copy and the two passes of the sort.

The sort is a counting sort by blocks of pairs. The first pass counts the pairs of each expert in each block; the second
computes each pair's row, from the number of earlier pairs of its expert in its block. Both are sums of comparisons; no
array of size pairs x experts is stored. A scatter then gives the pair of each row; its order does not matter, because
no two pairs have the same row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtune.pallas.grouped_matmul.layout import floor_divided, groups_of

BLOCK = 256


class Passes(NamedTuple):
    """The two passes of the counting sort, which kernels can replace, and the size of their blocks of pairs."""

    block: int  # the number of pairs of a block
    # (blocks int32[n, block] with the expert of each pair, E) -> int32[n, E], the pairs of each block and expert
    histogram: Callable[[jax.Array, int], jax.Array]
    # (blocks as before, firsts int32[n, E] with the row of the first pair of each block and expert) -> int32[n, block],
    # the row of each pair
    slots: Callable[[jax.Array, jax.Array], jax.Array]


def chosen_values(values: jax.Array, choice: jax.Array) -> jax.Array:
    """Each token's values for its chosen experts: values [T, E], choice int32[T, k] -> [T, k], 0 for no expert.

    It compares each choice with all experts, because a gather's derivative is a scatter, which adds in no fixed order.
    """
    index = jnp.arange(values.shape[1], dtype=jnp.int32)
    return jnp.where(index == choice[:, :, None], values[:, None], 0).sum(-1)


def chosen_by(values: jax.Array, choice: jax.Array, num_experts: int) -> jax.Array:
    """The transpose of `chosen_values`: values [T, k], choice int32[T, k] -> [T, E], 0 for experts not chosen.

    num_experts: E.
    """
    index = jnp.arange(num_experts, dtype=jnp.int32)
    return jnp.where(index == choice[:, :, None], values[:, :, None], 0).sum(1)


def expert_counts(choice: jax.Array, num_experts: int, mask: jax.Array) -> jax.Array:
    """Pairs that go to each expert, float32[E]. choice: int32[N, k]; a number other than 0 to E - 1 is not counted.
    mask: float32[N], what each pair of a token adds: 1, or 0.
    num_experts: E.
    """
    index = jnp.arange(num_experts, dtype=jnp.int32)
    columns = [jnp.where(column[:, None] == index, mask[:, None], 0.0).sum(0) for column in choice.T]
    return jnp.stack(columns).sum(0)


def histogram(blocks: jax.Array, num_experts: int) -> jax.Array:
    """Pairs of each block that go to each expert, int32[n, E]. blocks: int32[n, pairs], the expert of each pair; E for
    none.
    """
    return (blocks[:, :, None] == jnp.arange(num_experts, dtype=jnp.int32)).sum(1, dtype=jnp.int32)


def slots(blocks: jax.Array, firsts: jax.Array) -> jax.Array:
    """The row of each pair in the sorted buffer, int32[n, pairs of a block]; any number for a pair without an expert.

    blocks: int32[n, pairs of a block], the expert of each pair; E for none.
    firsts: int32[n, E], the row of the first pair of each block and expert.
    """
    index = jnp.arange(blocks.shape[1])
    before = index[:, None] > index
    rank = ((blocks[:, :, None] == blocks[:, None, :]) & before).sum(2, dtype=jnp.int32)
    return jnp.take_along_axis(firsts, jnp.minimum(blocks, firsts.shape[1] - 1), axis=1) + rank


def sort_pairs(expert: jax.Array, num_experts: int, tile_rows: int, passes: Passes):
    """Sorts pairs by expert, stably, into rows; each expert's rows are padded to a multiple of tile_rows. Returns
    (slots int32[pairs], the row of each pair, or the number of rows for no expert, which a gather must drop; source
    int32[rows], the pair of each row, or the number of pairs for an empty row; the Groups of the rows).

      expert: int32[pairs]; a number other than 0 to num_experts - 1 means no expert.
      passes: the two passes of the sort.
    """
    pairs = expert.shape[0]
    padding = -pairs % passes.block
    expert = jnp.where((expert >= 0) & (expert < num_experts), expert, num_experts)
    blocks = jnp.pad(expert, (0, padding), constant_values=num_experts).reshape(-1, passes.block)
    counts = passes.histogram(blocks, num_experts)
    ends = jnp.cumsum(counts, axis=0)
    groups = groups_of(ends[-1], pairs, tile_rows)
    firsts = groups.starts() + ends - counts  # the row of each block's first pair of each expert
    pair_slots = passes.slots(blocks, firsts)
    pair_slots = jnp.where(blocks < num_experts, pair_slots, groups.rows).reshape(-1)[:pairs]
    numbers = jnp.arange(pairs, dtype=jnp.int32)
    source = jnp.full(groups.rows, pairs, jnp.int32).at[pair_slots].set(numbers, mode="drop", unique_indices=True)
    return pair_slots, source, groups


def spread(x: jax.Array, slots: jax.Array, source: jax.Array) -> jax.Array:
    """x [T, H] in the rows of its pairs, [rows, H], with zeros in empty rows, by a gather. slots: int32[T, k]. source:
    int32[rows], the pair of each row, or T * k for an empty row.
    """
    tokens, k = slots.shape
    return rows_of(x, jnp.where(source < tokens * k, floor_divided(source, k), tokens))


def rows_of(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index] along the first axis, zero where index (int32, not negative) is past the end.

    16-bit rows are moved as words of four numbers, or two, because XLA's gather moves one element per thread (one
    number at a time takes 0.32 ms, two 0.24, on an H200).
    """
    if x.ndim != 2 or x.dtype.itemsize != 2 or x.shape[1] % 2:
        return _gathered(x, index)
    count, word = (2, jnp.uint32) if x.shape[1] % 4 else (4, jnp.uint64)
    with jax.enable_x64(True):  # 64-bit words need x64
        words = jax.lax.bitcast_convert_type(x.reshape(x.shape[0], -1, count), word)
        rows = jax.lax.bitcast_convert_type(_gathered(words, index), x.dtype)
        return rows.reshape(*index.shape, x.shape[1])


def _gathered(x, index):
    # The same as jnp's mode "fill" with a quarter of the instructions, because no index is negative. A layer of experts
    # has eight of these, and XLA compiles each separately.
    in_range = index < x.shape[0]
    return jnp.where(jnp.expand_dims(in_range, range(index.ndim, index.ndim + x.ndim - 1)), _row(x, index), 0)


def _row(x, index):
    """x[index] along the first axis; an index past the end gets the last row."""
    return x.at[index].get(mode="clip", wrap_negative_indices=False)


def summed(rows: jax.Array, slots: jax.Array) -> jax.Array:
    """Sums each token's rows: [rows, H] -> [T, H] in rows' dtype, in float32, in the order of its experts.

    Empty rows must be zero: a pair without an expert has a slot past the end, which reads the last row, which is then
    empty, and so adds zero without a comparison. slots: int32[T, k].
    """
    first, *later_rows = (_row(rows, column).astype(jnp.float32) for column in slots.T)
    for row in later_rows:
        first = first + row
    return first.astype(rows.dtype)
