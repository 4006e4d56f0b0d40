"""How the keys of a row are cut into splits, which the kernels of all GPUs share.

The keys are cut at multiples of SPLIT, whatever the batch or the capacity, and a split is summed in one order, from its
first tile that the row sees to its last one. So a row has the same bits alone, in any batch and in any slot.
"""

from __future__ import annotations

import jax.numpy as jnp

SPLIT = 256  # keys; part of what a result's bits depend on
LOG2E = 1.4426950408889634
MASKED = -1e30


def live_tiles(lengths, capacity: int, window: int | None, step: int):
    """(first, count) int32[B, splits]: the tiles of `step` keys of each split that hold what a row sees, from the first
    such tile to the last one; a split of which it sees nothing has count 0. capacity is a multiple of step.
    """
    splits, per_split = -(-capacity // SPLIT), SPLIT // step
    seen = jnp.minimum(seen_of(lengths, window), capacity)[:, None]
    end = newest_of(lengths, capacity)[:, None] + 1
    begins = jnp.arange(splits * per_split, dtype=jnp.int32) * step
    # What is seen is [end - seen, end) and, where that begins before index 0, as much at the ring's end.
    below = (begins < end) & (begins + step > end - seen)
    above = (begins + step > capacity + end - seen) & (begins < capacity)
    live = ((below | above) & (seen > 0)).reshape(len(lengths), splits, per_split)
    first = jnp.argmax(live, -1).astype(jnp.int32)
    last = per_split - jnp.argmax(live[..., ::-1], -1).astype(jnp.int32)
    count = jnp.where(live.any(-1), last - first, 0)
    return first + jnp.arange(splits, dtype=jnp.int32) * per_split, count


def seen_of(lengths, window: int | None):
    """int32[B], how many keys a row's newest token sees."""
    return lengths if window is None else jnp.minimum(lengths, window)


def newest_of(lengths, capacity: int):
    """int32[B], the index of a row's newest key; 0 for an empty row."""
    return jnp.maximum(lengths - 1, 0) % capacity


def order_of(tiles):
    """(order int32[B, splits], a row's live splits in ascending order, then the others; count int32[B], its live ones)
    of live_tiles' count."""
    live = tiles > 0
    return jnp.argsort(~live, axis=1, stable=True).astype(jnp.int32), live.sum(1, dtype=jnp.int32)


def log2_sinks(sinks, heads: int):
    """float32[heads], sinks in powers of two, or MASKED for none."""
    return jnp.full(heads, MASKED, jnp.float32) if sinks is None else sinks.astype(jnp.float32) * LOG2E
