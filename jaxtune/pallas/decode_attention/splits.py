"""How the keys of a row are divided into splits, which different programs of a kernel take at the same time
(flash-decoding), for all kernels of decode attention except Triton's kernel for short caches. `live_tiles` says which
tiles of keys each split reads, `seen_of` and `newest_of` which keys of a row are visible, `order_of` in which order
splits are combined, and `log2_sinks` converts sinks to the kernels' units.

The keys are divided at multiples of SPLIT, whatever the batch or the capacity, and a split is summed in one order, from
its first tile that the row sees to its last. A row's result therefore has the same bits alone, in any batch and in any
slot.
"""

from __future__ import annotations

import jax.numpy as jnp

SPLIT = 256  # keys of a split; the bits of results depend on it
LOG2E = 1.4426950408889634  # log2(e): scores are computed in units of log2
MASKED = -1e30  # score of a key that is not visible


def live_tiles(lengths, capacity: int, window: int | None, step: int):
    """For the functions `decode` of the kernels: which tiles of keys each split of a row must read: (first, count),
    both int32[B, splits]. A split is SPLIT consecutive entries of the cache (the last one may have fewer) and consists
    of tiles of `step` keys. It reads the tiles from the first to the last that contain a key which the row's newest
    token sees.

    `first` is the number of the first of these tiles, counted from the start of the cache; `count` is how many there
    are, 0 for a split without visible keys, whose `first` means nothing. Tiles between the first and the last of them
    may have no visible key, in a ring.

    Args:
      lengths: int32[B], tokens of each row.
      capacity: of the cache, in keys of a row; a multiple of step.
      window: how many keys a token sees, of a sliding window; None: all.
      step: keys of a tile, which divide SPLIT.
    """
    splits, per_split = -(-capacity // SPLIT), SPLIT // step
    seen = jnp.minimum(seen_of(lengths, window), capacity)[:, None]
    end = newest_of(lengths, capacity)[:, None] + 1
    begins = jnp.arange(splits * per_split, dtype=jnp.int32) * step
    # The visible indices are [end - seen, end); those below 0 are at the end of the ring.
    below = (begins < end) & (begins + step > end - seen)
    above = (begins + step > capacity + end - seen) & (begins < capacity)
    live = ((below | above) & (seen > 0)).reshape(len(lengths), splits, per_split)
    first = jnp.argmax(live, -1).astype(jnp.int32)
    last = per_split - jnp.argmax(live[..., ::-1], -1).astype(jnp.int32)
    count = jnp.where(live.any(-1), last - first, 0)
    return first + jnp.arange(splits, dtype=jnp.int32) * per_split, count


def seen_of(lengths, window: int | None):
    """int32[B]: how many tokens each row's newest token may see, itself included: all of `lengths`, int32[B], or the
    last `window` (None: all). It is not limited to the capacity, so a row longer than its cache gets more than the
    cache has. live_tiles limits it; the kernels (mosaic_kernels.py) need not, because they only compare it with how
    many tokens a key is older than the newest one."""
    return lengths if window is None else jnp.minimum(lengths, window)


def newest_of(lengths, capacity: int):
    """int32[B]: the index of a row's newest key in the cache, a ring of `capacity` keys; 0 for an empty row. lengths:
    int32[B], tokens of each row. Counted back from there, an index tells how old its key is, and so whether it is
    visible."""
    return jnp.maximum(lengths - 1, 0) % capacity


def order_of(tiles):
    """Returns the order in which the splits of a row are combined, so that those without keys are not read and a row's
    sum always has the same order: (int32[B, splits], the numbers of a row's splits, those that have tiles to read in
    ascending order before the others; int32[B], how many have). tiles: int32[B, splits], the number of tiles that each
    split reads, the second result of live_tiles."""
    live = tiles > 0
    return jnp.argsort(~live, axis=1, stable=True).astype(jnp.int32), live.sum(1, dtype=jnp.int32)


def log2_sinks(sinks, heads: int):
    """float32[heads]: the sinks (a logit of each head that takes a share of the softmax and has no value) in units of
    log2, in which the kernels compute scores; MASKED if `sinks` is None. sinks: float[heads], or None for none; heads:
    the number of query heads."""
    return jnp.full(heads, MASKED, jnp.float32) if sinks is None else sinks.astype(jnp.float32) * LOG2E
