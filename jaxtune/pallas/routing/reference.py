"""Routing in plain jnp: a counting sort by blocks, and gathers.

Sorting counts in blocks of pairs: how many of a block go to each expert, and how many of its own expert come before a
pair within its block. Both are comparisons that are summed on the spot; nothing of the size pairs x experts is stored.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtune.pallas.grouped_matmul.layout import groups_of

_BLOCK = 256


def chosen(values: jax.Array, choice: jax.Array) -> jax.Array:
    """values [T, E] at choice [T, k]; 0 past the end. Its gradient is a comparison, not a scatter."""
    index = jnp.arange(values.shape[1], dtype=jnp.int32)
    return jnp.stack([jnp.where(index == column[:, None], values, 0).sum(-1) for column in choice.T], axis=1)


def expert_counts(choice: jax.Array, num_experts: int, mask: jax.Array) -> jax.Array:
    """float32[E]: the sum of mask [N] over the pairs of choice [N, k] that go to each expert."""
    index = jnp.arange(num_experts, dtype=jnp.int32)
    columns = [jnp.where(column[:, None] == index, mask[:, None], 0.0).sum(0) for column in choice.T]
    return jnp.stack(columns).sum(0)


def sort_pairs(expert: jax.Array, num_experts: int, tile_rows: int):
    """expert int32[pairs] -> (slots int32[pairs], source int32[rows], Groups); see api.Routing."""
    pairs = expert.shape[0]
    short = -pairs % _BLOCK
    expert = jnp.where((expert >= 0) & (expert < num_experts), expert, num_experts)
    blocks = jnp.pad(expert, (0, short), constant_values=num_experts).reshape(-1, _BLOCK)
    index = jnp.arange(num_experts, dtype=jnp.int32)
    histogram = (blocks[:, :, None] == index).sum(1, dtype=jnp.int32)
    before = jnp.arange(_BLOCK)[:, None] > jnp.arange(_BLOCK)
    rank = ((blocks[:, :, None] == blocks[:, None, :]) & before).sum(2, dtype=jnp.int32)
    ends = jnp.cumsum(histogram, axis=0)
    groups = groups_of(ends[-1], pairs, tile_rows)
    firsts = groups.starts() + ends - histogram  # the row of each block's first pair of each expert
    slots = jnp.take_along_axis(firsts, jnp.minimum(blocks, num_experts - 1), axis=1) + rank
    slots = jnp.where(blocks < num_experts, slots, groups.rows).reshape(-1)[:pairs]
    numbers = jnp.arange(pairs, dtype=jnp.int32)
    source = jnp.full(groups.rows, pairs, jnp.int32).at[slots].set(numbers, mode="drop", unique_indices=True)
    return slots, source, groups


def rows_of(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index]; zero where index is past the end.

    16-bit rows are moved two numbers at a time: XLA's gather moves one element a thread (0.24 for 0.32 ms, H200).
    """
    if x.ndim == 2 and x.dtype.itemsize == 2 and x.shape[1] % 2 == 0:
        pairs = jax.lax.bitcast_convert_type(x.reshape(x.shape[0], -1, 2), jnp.uint32)
        rows = jax.lax.bitcast_convert_type(_gathered(pairs, index), x.dtype)
        return rows.reshape(*index.shape, x.shape[1])
    return _gathered(x, index)


def _gathered(x, index):
    return x.at[index].get(mode="fill", fill_value=0)


def summed(rows: jax.Array, slots: jax.Array) -> jax.Array:
    """[rows, H], slots [T, k] -> [T, H]: sum_j rows[slots[:, j]], in float32 from the first j to the last."""
    first, *others = (_gathered(rows, column).astype(jnp.float32) for column in slots.T)
    for other in others:
        first = first + other
    return first.astype(rows.dtype)
