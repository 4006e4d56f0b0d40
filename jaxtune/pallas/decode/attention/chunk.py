"""Prefill in chunks: attention of a chunk of new tokens over each other and over the cache of earlier tokens, and the
write of the chunk into the cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtune.pallas.arguments import FLOATS, INTEGERS, Arguments
from jaxtune.pallas.meshes import on_any_mesh

_QUERIES = 128  # the scores of this many queries exist at a time
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
    N, heads, D] in query's dtype. XLA computes it, 128 of the N tokens at a time over the whole capacity.

      query: [B, N, heads, D] bfloat16, float16 or float32.
      new_keys, new_values: [B, N, kv_heads, D] in query's dtype, attended to as they are. For an FP8 cache the caller
      rounds them for `chunk_written`; here, too, if later tokens shall see the same numbers.
      keys, values: [B, kv_heads, capacity, D] in query's dtype or float8_e4m3fn (no scales), finite.
      before: int32[B], tokens before the new ones; of a longer row the cache has the last `capacity`.
      scale: factor on scores. window: a token sees itself and the window - 1 before it; None: all.
      soft_cap: scores s become cap * tanh(s / cap). sinks: float[heads], a logit per head without a value. None of
      these four is checked, nor the ratio of heads.
    """
    check = Arguments("chunk_attention")
    check.array("query", query, "B N heads D", FLOATS)
    check.array("new_keys", new_keys, "B N kv_heads D", query.dtype)
    check.array("new_values", new_values, "B N kv_heads D", query.dtype)
    check.array("keys", keys, "B kv_heads capacity D", (str(query.dtype), "float8_e4m3fn"))
    check.array("values", values, "B kv_heads capacity D", keys.dtype)
    check.array("before", before, "B", INTEGERS)
    rows, count, heads, dim = query.shape
    kv_heads, capacity = keys.shape[1:3]
    precision = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    before = jnp.asarray(before, jnp.int32)
    index = jnp.arange(capacity, dtype=jnp.int32)
    last = before[:, None] - 1
    cached = last - (last - index) % capacity  # the position of the token at each index; negative where there is none
    new_positions = before[:, None] + jnp.arange(count, dtype=jnp.int32)
    positions = jnp.concatenate([cached, new_positions], axis=1)
    keys, values = (
        jnp.concatenate([cache.astype(query.dtype), jnp.swapaxes(fresh, 1, 2)], axis=2)
        for cache, fresh in ((keys, new_keys), (values, new_values))
    )

    def product(equation, left, right):
        return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32, precision=precision)

    def block(operands):
        query, query_positions = operands  # [B, n, heads, D], int32[B, n]
        scores = product("bqkgd,bktd->bkgqt", query.reshape(rows, -1, kv_heads, heads // kv_heads, dim), keys) * scale
        if soft_cap is not None:
            scores = jnp.tanh(scores / soft_cap) * soft_cap
        age = query_positions[..., None] - positions[:, None]  # [B, n, keys]
        visible = (positions[:, None] >= 0) & (age >= 0)
        if window is not None:
            visible &= age < window
        scores = jnp.where(visible[:, None, None], scores, _MASKED)
        top = scores.max(-1, keepdims=True)
        if sinks is not None:
            sink = sinks.astype(jnp.float32).reshape(1, kv_heads, -1, 1, 1)
            top = jnp.maximum(top, sink)
        weights = jnp.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        if sinks is not None:
            total = total + jnp.exp(sink - top)
        out = product("bkgqt,bktd->bqkgd", (weights / total).astype(query.dtype), values)
        return out.reshape(query.shape).astype(query.dtype)

    size = min(count, _QUERIES)
    padding = -count % size
    blocks = (
        jnp.moveaxis(
            jnp.pad(a, ((0, 0), (0, padding), *((0, 0),) * (a.ndim - 2))).reshape(rows, -1, size, *a.shape[2:]), 1, 0
        )
        for a in (query, new_positions)
    )
    out = jax.lax.map(block, tuple(blocks))
    return jnp.moveaxis(out, 0, 1).reshape(rows, -1, heads, dim)[:, :count]


@on_any_mesh
def chunk_written(cache: jax.Array, new: jax.Array, before: jax.Array) -> jax.Array:
    """The cache with the next N tokens' keys or values at index `position % capacity`; a ring keeps the last
    `capacity`. chunk_attention of these tokens needs the cache from before. It is not copied if the old one is donated
    or not read again.

      new: [B, N, kv_heads, D] in the cache's dtype.
      before: int32[B], tokens before the new ones, at least 0.
      cache: [B, kv_heads, capacity, D].
    """
    check = Arguments("chunk_written")
    check.array("cache", cache, "B kv_heads capacity D", str(cache.dtype))
    check.array("new", new, "B N kv_heads D", cache.dtype)
    check.array("before", before, "B", INTEGERS)
    capacity, count = cache.shape[2], new.shape[1]
    skipped = max(0, count - capacity)  # how many new tokens later ones would overwrite
    index = (jnp.asarray(before, jnp.int32)[:, None] + jnp.arange(skipped, count, dtype=jnp.int32)) % capacity
    rows = jnp.arange(len(cache))[:, None]
    return cache.at[rows, :, index].set(new[:, skipped:], unique_indices=True)
