"""Routing in plain jnp: the sort of pairs (a token with one of its experts) by expert, the copy of tokens to their rows
and the sum of a token's rows, and the choice of a token's values among those of all experts.

`sort_pairs` is the sort, `spread` the copy and `summed` the sum; `chosen` takes the values of chosen experts,
`chosen_by` is its transpose, `expert_counts` counts the tokens of each expert, and `rows_of` gathers rows. Passes are
the two parts of the sort that kernels can replace, here `histogram` and `slots`.

Every run with experts uses this file, and it is not only the reference that kernels are compared with: nothing else
computes sums of rows, the choice of values and counts of experts; sort_pairs is the frame in which the kernels' passes
(mosaic_sort.py) run, too; and below 128 experts the sort by its own passes is the first choice.

The sort is a counting sort by blocks of pairs. The first pass counts the pairs of each expert in each block; the second
computes for each pair its row, from the number of earlier pairs of its expert in its block. Both are sums of
comparisons; no array of size pairs x experts is stored. A scatter then gives the pair of each row; its order does not
matter, because no two pairs have the same row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtune.pallas.grouped_matmul.layout import divided, groups_of

BLOCK = 256


class Passes(NamedTuple):
    """The two passes over all pairs (a token with one of its experts) of a counting sort, and the size of the blocks
    of pairs that they take. `sort_pairs` is called with the functions of this file, or with the kernels of
    mosaic_sort.py."""

    block: int  # the number of pairs of a block
    # (blocks int32[n, block] with the expert of each pair, E) -> int32[n, E], the pairs of each block and expert
    histogram: Callable[[jax.Array, int], jax.Array]
    # (blocks as before, firsts int32[n, E] with the row of the first pair of each block and expert) -> int32[n, block],
    # the row of each pair
    slots: Callable[[jax.Array, jax.Array], jax.Array]


def chosen(values: jax.Array, choice: jax.Array) -> jax.Array:
    """Selects each token's values for the experts that it chose: values [T, E], choice int32[T, k] -> [T, k], and 0
    where choice is not 0 to E - 1 (no expert). expert_weights and the derivative of token_bias call it. It compares
    each choice with all experts instead of gathering, because the derivative of a gather is a scatter, which adds in no
    fixed order."""
    index = jnp.arange(values.shape[1], dtype=jnp.int32)
    return jnp.where(index == choice[:, :, None], values[:, None], 0).sum(-1)


def chosen_by(values: jax.Array, choice: jax.Array, num_experts: int) -> jax.Array:
    """Writes each token's values for its chosen experts into an array of all experts: values [T, k], choice int32[T, k]
    -> [T, E] for E = num_experts, with 0 for experts that were not chosen; the value of a choice that is not 0 to E - 1
    is dropped. It is the transpose of `chosen`; the derivative of token_bias computes the bias's gradient with it."""
    index = jnp.arange(num_experts, dtype=jnp.int32)
    return jnp.where(index == choice[:, :, None], values[:, :, None], 0).sum(1)


def expert_counts(choice: jax.Array, num_experts: int, mask: jax.Array) -> jax.Array:
    """Counts the pairs of a token and one of its experts that go to each expert: float32[E] for E = num_experts.
    router_sums calls it, for the load-balancing loss; no kernel replaces it.

    choice: int32[N, k], each token's experts; a number other than 0 to E - 1 is no expert and is not counted. mask:
    float32[N], what each pair of a token adds to the count: 1, or 0 for a token that is left out."""
    index = jnp.arange(num_experts, dtype=jnp.int32)
    columns = [jnp.where(column[:, None] == index, mask[:, None], 0.0).sum(0) for column in choice.T]
    return jnp.stack(columns).sum(0)


def histogram(blocks: jax.Array, num_experts: int) -> jax.Array:
    """Counts the pairs of each block that go to each expert: int32[n, E] for E = num_experts. blocks: int32[n, pairs of
    a block], the expert of each pair; E for a pair without one. It is the first pass of `sort_pairs`."""
    return (blocks[:, :, None] == jnp.arange(num_experts, dtype=jnp.int32)).sum(1, dtype=jnp.int32)


def slots(blocks: jax.Array, firsts: jax.Array) -> jax.Array:
    """Computes the row of each pair in the sorted buffer: int32[n, pairs of a block]. It is the row of the first pair
    of its block and expert, plus the number of earlier pairs of that block and expert; for a pair without an expert it
    can be any number. It is the second pass of `sort_pairs`.

    Args:
      blocks: int32[n, pairs of a block], the expert of each pair; E, the number of experts, for a pair without one.
      firsts: int32[n, E], the row of the first pair of each block and expert.
    """
    index = jnp.arange(blocks.shape[1])
    before = index[:, None] > index
    rank = ((blocks[:, :, None] == blocks[:, None, :]) & before).sum(2, dtype=jnp.int32)
    return jnp.take_along_axis(firsts, jnp.minimum(blocks, firsts.shape[1] - 1), axis=1) + rank


def sort_pairs(expert: jax.Array, num_experts: int, tile_rows: int, passes: Passes):
    """Sorts pairs (a token with one of its experts) by expert, stably, into a buffer of rows. Each expert's rows are
    padded with empty rows to a multiple of tile_rows. `route` calls it.

    Args:
      expert: int32[pairs], the expert of each pair, 0 to E - 1; any other number is a pair without an expert.
      num_experts: E.
      tile_rows: the rows of a tile, which all belong to one expert.
      passes: the functions of the two passes over all pairs, and their block size.
    Returns:
      (slots int32[pairs], the row of each pair, or the number of rows if it has no expert; source int32[rows], the pair
        of each row, or the number of pairs for an empty row; the Groups of the rows)
    """
    pairs = expert.shape[0]
    short = -pairs % passes.block
    expert = jnp.where((expert >= 0) & (expert < num_experts), expert, num_experts)
    blocks = jnp.pad(expert, (0, short), constant_values=num_experts).reshape(-1, passes.block)
    counts = passes.histogram(blocks, num_experts)
    ends = jnp.cumsum(counts, axis=0)
    groups = groups_of(ends[-1], pairs, tile_rows)
    firsts = groups.starts() + ends - counts  # the row of each block's first pair of each expert
    rows = passes.slots(blocks, firsts)
    rows = jnp.where(blocks < num_experts, rows, groups.rows).reshape(-1)[:pairs]
    numbers = jnp.arange(pairs, dtype=jnp.int32)
    source = jnp.full(groups.rows, pairs, jnp.int32).at[rows].set(numbers, mode="drop", unique_indices=True)
    return rows, source, groups


def spread(x: jax.Array, slots: jax.Array, source: jax.Array) -> jax.Array:
    """Copies each token to the rows of its pairs by a gather: x [T, H] -> [rows, H], with zeros in empty rows. slots:
    int32[T, k], the row of each pair (a token with one of its experts). source: int32[rows], the pair of each row, t *
    k + j, or T * k for an empty row. It is the implementation "reference" of api._spread, and first_use.refusal
    compares the kernel with it."""
    tokens, k = slots.shape
    return rows_of(x, jnp.where(source < tokens * k, divided(source, k), tokens))


def rows_of(x: jax.Array, index: jax.Array) -> jax.Array:
    """Gathers rows (or elements, if x has one axis) of x: x[index], and zero where index is past the end, which stands
    for an empty row. index: int32 of any shape, not negative. `spread`, the weights of rows (row_weights) and their
    derivative use it.

    16-bit rows of an even number of numbers are moved as words of four numbers, or two, because XLA's gather moves one
    element per thread (one number at a time 0.32 ms, two 0.24, H200).
    """
    if x.ndim != 2 or x.dtype.itemsize != 2 or x.shape[1] % 2:
        return _gathered(x, index)
    count, word = (2, jnp.uint32) if x.shape[1] % 4 else (4, jnp.uint64)
    with jax.enable_x64(True):  # 64-bit words need x64
        words = jax.lax.bitcast_convert_type(x.reshape(x.shape[0], -1, count), word)
        rows = jax.lax.bitcast_convert_type(_gathered(words, index), x.dtype)
        return rows.reshape(*index.shape, x.shape[1])


def _gathered(x, index):
    """Gathers x[index] along the first axis: [*index.shape, *x.shape[1:]], zero where index is past the end. index may
    have any shape and must not be negative, which spares the tests that jnp's own filling gather makes. `rows_of` calls
    it, with x itself or with its numbers as wider words."""
    # The same as jnp's mode "fill" with a quarter of the instructions, because no index is negative. A layer of experts
    # has eight of these, and XLA compiles each separately.
    there = index < x.shape[0]
    return jnp.where(jnp.expand_dims(there, range(index.ndim, index.ndim + x.ndim - 1)), _row(x, index), 0)


def _row(x, index):
    """Gathers x[index] along the first axis, [*index.shape, *x.shape[1:]]; an index past the end gets the last element,
    and none may be negative. XLA's gather limits indices to the array by itself, so this costs nothing. `_gathered` and
    `summed` call it."""
    return x.at[index].get(mode="clip", wrap_negative_indices=False)


def summed(rows: jax.Array, slots: jax.Array) -> jax.Array:
    """Sums each token's rows: rows [rows, H] -> [T, H] in rows' dtype. The sums are float32, over the token's experts
    from the first to the last. slots: int32[T, k], the row of each pair of a token with one of its experts, or the
    number of rows for a pair without an expert.

    Empty rows must be zero. If a pair has no expert, there are fewer pairs with rows than rows, and the last row is
    empty. A slot past the end reads that last row, and so adds zero, without a comparison. `unpermute` and
    matmul_to_tokens compute with it, and so do the derivatives of `permute` and matmul_of_tokens.
    """
    first, *others = (_row(rows, column).astype(jnp.float32) for column in slots.T)
    for other in others:
        first = first + other
    return first.astype(rows.dtype)
