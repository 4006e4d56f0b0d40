"""Prefill in chunks: attention of a chunk of new tokens, and the write of the chunk into the cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtune.pallas import one_order
from jaxtune.pallas.arguments import FLOATS, INTEGERS, Arguments
from jaxtune.pallas.attention import in_tiles
from jaxtune.pallas.decode.attention import as_trained
from jaxtune.pallas.meshes import on_any_mesh

_TILE = 512  # the scores of this many queries and keys exist at a time
_MASKED = -1e30  # finite, so that a query without keys does not compute inf - inf


@on_any_mesh
def chunk_attention(
    query: jax.Array,
    new_keys: jax.Array,
    new_values: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    before: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of the next N tokens of each row over each other and over the row's cache from before them: [B,
    N, heads, D] in query's dtype. A longer cache gives the same bits.

      query: [B, N, heads, D] bfloat16, float16 or float32.
      new_keys, new_values: [B, N, kv_heads, D] in query's dtype, attended to as they are: for an FP8 cache round them.
      keys, values: [B, kv_heads, capacity, D] in query's dtype or float8_e4m3fn (no scales), finite.
      before: int32[B], tokens before the new ones; of a longer row the cache has the last `capacity`.
      scale, window, soft_cap, sinks: of decode_attention; not checked.
    """
    check = Arguments("chunk_attention")
    check.array("query", query, "B N heads D", FLOATS)
    check.array("new_keys", new_keys, "B N kv_heads D", query.dtype)
    check.array("new_values", new_values, "B N kv_heads D", query.dtype)
    check.array("keys", keys, "B kv_heads capacity D", (str(query.dtype), "float8_e4m3fn"))
    check.array("values", values, "B kv_heads capacity D", keys.dtype)
    check.array("before", before, "B", INTEGERS)
    rows, count, heads, dim = query.shape
    if one_order.runs_kernels():
        before = jnp.asarray(before, jnp.int32)
        counts = jnp.minimum(count, keys.shape[2] - before)  # behind them there is padding alone
        keys, values = (
            chunk_written(cache, new, before, counts) for cache, new in ((keys, new_keys), (values, new_values))
        )
        masking = dict(scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)
        return as_trained.attended(query, keys, values, before, **masking)
    if one_order.is_exact():
        positions = jnp.asarray(before, jnp.int32)[:, None] + jnp.arange(count, dtype=jnp.int32)
        masking = dict(scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)
        return in_tiles.cached(query, keys, values, positions, new=(new_keys, new_values), **masking)
    kv_heads, capacity = keys.shape[1:3]
    precision = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    before = jnp.asarray(before, jnp.int32)
    index = jnp.arange(capacity, dtype=jnp.int32)
    last = before[:, None] - 1
    cached = last - (last - index) % capacity  # the position of the token at each index; negative where there is none
    new_positions = before[:, None] + jnp.arange(count, dtype=jnp.int32)
    size = min(count, _TILE)
    old_tiles = _in_tiles(keys.astype(query.dtype), values.astype(query.dtype), cached)
    new_tiles = _in_tiles(jnp.swapaxes(new_keys, 1, 2), jnp.swapaxes(new_values, 1, 2), new_positions)
    # One loop, of two tiles at least: XLA unrolls a loop of a single one, and then sums in another order.
    tiles = tuple(map(jnp.concatenate, zip(old_tiles, new_tiles, strict=True)))

    def product(equation, left, right):
        return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32, precision=precision)

    def block(operands):
        query, query_positions = operands  # [B, n, heads, D], int32[B, n]
        query = query.reshape(rows, -1, kv_heads, heads // kv_heads, dim)

        def add(sums, tile):
            (top, total, out), (keys, values, positions) = sums, tile
            scores = product("bqkgd,bktd->bkgqt", query, keys) * scale
            if soft_cap is not None:
                scores = jnp.tanh(scores / soft_cap) * soft_cap
            age = query_positions[..., None] - positions[:, None]  # [B, n, keys]
            visible = (positions[:, None] >= 0) & (age >= 0)
            if window is not None:
                visible &= age < window
            scores = jnp.where(visible[:, None, None], scores, _MASKED)
            new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
            weights, shrink = jnp.exp(scores - new_top), jnp.exp(top - new_top)
            added = product("bkgqt,bktd->bkgqd", weights.astype(query.dtype), values)
            return (new_top, total * shrink + weights.sum(-1, keepdims=True), out * shrink + added), None

        # What tiles without a visible key add before the first with one is multiplied by 0 there; later they add 0.
        top = jnp.full((rows, kv_heads, query.shape[3], query.shape[1], 1), _MASKED, jnp.float32)
        total = jnp.zeros_like(top)
        if sinks is not None:
            top = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(1, kv_heads, -1, 1, 1), top.shape)
            total = jnp.ones_like(top)
        sums = top, total, jnp.zeros((*top.shape[:-1], dim), jnp.float32)
        (_, total, out), _ = jax.lax.scan(add, sums, tiles)
        return jnp.moveaxis(out / total, 3, 1).reshape(rows, -1, heads, dim).astype(query.dtype)

    padding = -count % size
    blocks = (
        jnp.moveaxis(
            jnp.pad(a, ((0, 0), (0, padding), *((0, 0),) * (a.ndim - 2))).reshape(rows, -1, size, *a.shape[2:]), 1, 0
        )
        for a in (query, new_positions)
    )
    out = jax.lax.map(block, tuple(blocks))
    return jnp.moveaxis(out, 0, 1).reshape(rows, -1, heads, dim)[:, :count]


def _in_tiles(keys: jax.Array, values: jax.Array, positions: jax.Array) -> tuple[jax.Array, ...]:
    """The same in tiles, whose axis comes first; keys that pad the last tile have position -1."""
    padding = -keys.shape[2] % _TILE

    def divided(array: jax.Array) -> jax.Array:  # [B, kv_heads, T, D]
        array = jnp.pad(array, ((0, 0), (0, 0), (0, padding), (0, 0)))
        return jnp.moveaxis(array.reshape(*array.shape[:2], -1, _TILE, array.shape[3]), 2, 0)

    positions = jnp.pad(positions, ((0, 0), (0, padding)), constant_values=-1)
    return divided(keys), divided(values), jnp.moveaxis(positions.reshape(len(positions), -1, _TILE), 1, 0)


@on_any_mesh
def chunk_written(cache: jax.Array, new: jax.Array, before: jax.Array, counts: jax.Array | None = None) -> jax.Array:
    """The cache [B, kv_heads, capacity, D] with the next tokens' keys or values; a ring keeps the last `capacity`, so
    that chunk_attention must come first. In place if it can be.

      new: [B, N, kv_heads, D] in the cache's dtype.
      before: int32[B], tokens before the new ones, at least 0.
      counts: int32[B], how many of the N are tokens, the first ones; None: all.
    """
    check = Arguments("chunk_written")
    check.array("cache", cache, "B kv_heads capacity D", str(cache.dtype))
    check.array("new", new, "B N kv_heads D", cache.dtype)
    check.array("before", before, "B", INTEGERS)
    rows, count, capacity = len(cache), new.shape[1], cache.shape[2]
    if counts is None:
        counts = jnp.full(rows, count, jnp.int32)
    check.array("counts", counts, "B", INTEGERS)
    index, ends = jnp.arange(count, dtype=jnp.int32), jnp.asarray(counts, jnp.int32)[:, None]
    stays = (index < ends) & (index >= ends - capacity)
    # Others have no index, each another one, so that all are unique.
    indices = jnp.where(stays, (jnp.asarray(before, jnp.int32)[:, None] + index) % capacity, capacity + index)
    return cache.at[jnp.arange(rows)[:, None], :, indices].set(new, mode="drop", unique_indices=True)
