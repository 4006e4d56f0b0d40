"""Attention in the order of one_order/sums.py, in plain JAX: a query adds tiles of KEYS keys from its document's start
in ascending order, with an online softmax (arXiv 2205.14135) whose weights are rounded to the values' dtype before they
multiply. A tile without a visible key changes nothing, so neither padding nor capacity matters.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxtune.pallas import one_order
from jaxtune.pallas.attention import reference
from jaxtune.pallas.attention.layout import PackedLayout

KEYS = 64
_MASKED = -1e30  # finite, so that a query without keys stays free of inf - inf


def refusal(query, layout: PackedLayout, *, window, soft_cap, sinks) -> str | None:
    """Why a call has no such order, or None."""
    del query, window, soft_cap, sinks
    return None if layout.causal and layout.runs is None else "tokens that see later ones"


def attended(
    query: jax.Array,
    tile_of: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    positions: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(out [B, Q, heads, D] in query's dtype, log-sum-exp float32[B, Q, heads]).

    query: [B, Q, heads, D].
    tile_of: int32[KEYS] positions within the document -> their keys and values, each [B, Q or 1, KEYS, kv_heads, D].
    positions: int32[B, Q], of the queries in their documents; negative: it sees nothing.
    scale, window, soft_cap, sinks: as of attention_forward.
    """
    rows, count, heads, dim = query.shape
    kv_heads = tile_of(jnp.arange(KEYS, dtype=jnp.int32))[0].shape[3]
    grouped = query.reshape(rows, count, kv_heads, -1, 1, dim)
    shape = grouped.shape[:-2]

    def add(tile, so_far):
        top, total, out = so_far
        index = tile * KEYS + jnp.arange(KEYS, dtype=jnp.int32)
        key, value = (jnp.moveaxis(array, 2, 3)[:, :, :, None] for array in tile_of(index))  # [B, Q, kv, 1, KEYS, D]
        scores = one_order.contracted(grouped, key) * scale
        if soft_cap is not None:
            scores = one_order.tanh(scores / soft_cap) * soft_cap
        age = positions[..., None] - index
        visible = age >= 0 if window is None else (age >= 0) & (age < window)
        visible = visible[:, :, None, None]
        scores = jnp.where(visible, scores, _MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.where(visible, one_order.exp(scores - new_top[..., None]), 0.0)
        fade = one_order.exp(top - new_top)
        rounded = weights.astype(query.dtype)[..., None, :]
        added = one_order.contracted(rounded, jnp.swapaxes(value, -1, -2))
        return new_top, total * fade + one_order.total(weights), out * fade[..., None] + added

    top = jnp.full(shape, _MASKED, jnp.float32)
    start = top, jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, dim), jnp.float32)
    tiles = jnp.maximum(positions.max(), 0) // KEYS + 1
    top, total, out = jax.lax.fori_loop(0, tiles, add, start)
    if sinks is not None:  # one more term of the sum, behind all keys
        sink = sinks.astype(jnp.float32).reshape(kv_heads, -1)
        final = jnp.maximum(top, sink)
        fade = one_order.exp(top - final)
        top, total, out = final, total * fade + one_order.exp(sink - final), out * fade[..., None]
    total = jnp.maximum(total, 1e-30)
    out = jnp.where((positions >= 0)[:, :, None, None, None], out / total[..., None], 0.0)
    return out.astype(query.dtype).reshape(query.shape), (top + one_order.log(total)).reshape(rows, count, heads)


def forward(query, key, value, layout: PackedLayout, *, scale, window=None, soft_cap=None, sinks=None):
    """As api.attention_forward: (out, lse)."""
    length = query.shape[1]
    alone = layout.max_documents == 1  # then each row's document begins at 0, and its queries share their keys
    positions = jnp.where(layout.doc_end > layout.doc_start, layout.positions(), -1)

    def tile_of(index):
        if alone:
            places = jnp.minimum(index, length - 1)
            return tuple(array[:, None, places] for array in (key, value))
        places = jnp.minimum(layout.doc_start[..., None] + index, length - 1)
        return tuple(jax.vmap(lambda row, index: row[index])(array, places) for array in (key, value))

    out, lse = attended(query, tile_of, positions, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)
    return out, jnp.moveaxis(lse, 2, 1)


backward = reference.backward


def cached(query, keys, values, positions, *, new=None, scale, window=None, soft_cap=None, sinks=None):
    """Attention of tokens [B, Q, heads, D] at int32[B, Q] positions over caches [B, kv_heads, capacity, D]; a negative
    position sees nothing.

    new: (keys, values, each [B, Q, kv_heads, D]) of these tokens, at positions that follow each other; None: the caches
      have them already. A ring has room for all that the first of them sees.
    """
    capacity = keys.shape[2]

    def tile_of(index):
        # What a ring no longer has lies before every window.
        key, value = (jnp.swapaxes(cache[:, :, index % capacity], 1, 2)[:, None] for cache in (keys, values))
        if new is None:
            return key, value
        place = index - positions[:, :1]  # [B, KEYS]
        is_new = (place >= 0)[:, None, :, None, None]
        place = jnp.clip(place, 0, query.shape[1] - 1)[..., None, None]
        new_key, new_value = (jnp.take_along_axis(array, place, axis=1)[:, None] for array in new)
        return jnp.where(is_new, new_key, key), jnp.where(is_new, new_value, value)

    return attended(query, tile_of, positions, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)[0]
