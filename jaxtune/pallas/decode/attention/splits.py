"""Division of a row's keys into splits (flash-decoding), at multiples of SPLIT whatever the batch or capacity, so that
a row has the same bits in any batch and slot.
"""

from __future__ import annotations

import jax.numpy as jnp

SPLIT = 256  # keys of a split; the bits of results depend on it
LOG2E = 1.4426950408889634  # log2(e): scores are computed in units of log2
MASKED = -1e30  # score of a key that is not visible


def live_tiles(lengths, capacity: int, window: int | None, step: int):
    """Tiles of `step` keys that each split must read, (first, count), int32[B, splits] each.

    `first` counts from the cache's start and means nothing where count is 0. `step` divides the capacity and SPLIT.

      lengths: int32[B], tokens of each row.
      window: tokens that a row's newest sees, itself included; None: all.
    """
    splits, per_split = -(-capacity // SPLIT), SPLIT // step
    visible_tokens = jnp.minimum(seen_of(lengths, window), capacity)[:, None]
    end = newest_of(lengths, capacity)[:, None] + 1
    begins = jnp.arange(splits * per_split, dtype=jnp.int32) * step
    # The visible indices are [end - visible_tokens, end); those below 0 are at the end of the ring.
    below = (begins < end) & (begins + step > end - visible_tokens)
    above = (begins + step > capacity + end - visible_tokens) & (begins < capacity)
    live = ((below | above) & (visible_tokens > 0)).reshape(len(lengths), splits, per_split)
    first = jnp.argmax(live, -1).astype(jnp.int32)
    last = per_split - jnp.argmax(live[..., ::-1], -1).astype(jnp.int32)
    count = jnp.where(live.any(-1), last - first, 0)
    return first + jnp.arange(splits, dtype=jnp.int32) * per_split, count


def seen_of(lengths, window: int | None):
    """int32[B]: tokens that each row's newest may see, itself included; it may exceed the capacity."""
    return lengths if window is None else jnp.minimum(lengths, window)


def newest_of(lengths, capacity: int):
    """int32[B]: index of a row's newest key in the ring; 0 for an empty row."""
    return jnp.maximum(lengths - 1, 0) % capacity


def order_of(tiles):
    """(a row's splits int32[B, splits], those with tiles first and ascending; how many have, int32[B]), so that a row's
    sum always has the same order.

      tiles: int32[B, splits], the counts of live_tiles.
    """
    live = tiles > 0
    return jnp.argsort(~live, axis=1, stable=True).astype(jnp.int32), live.sum(1, dtype=jnp.int32)


def log2_sinks(sinks, heads: int):
    """float32[heads] in units of log2; MASKED where `sinks` is None."""
    return jnp.full(heads, MASKED, jnp.float32) if sinks is None else sinks.astype(jnp.float32) * LOG2E
