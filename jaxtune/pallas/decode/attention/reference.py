"""Attention of each row's newest token over its key/value cache in plain jnp, which defines the result.

score[k] = scale * query . key[k], or cap * tanh(score / cap) with a soft cap. The key at index i of a ring of
`capacity` entries is age = (length - 1 - i) % capacity tokens older than the newest, and visible if age < min(length,
window). A sink is one more logit of its head without a value.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_MASKED = -1e30  # finite, so that a row without keys does not compute inf - inf


def decode(query, keys, values, lengths, *, scale, window=None, soft_cap=None, sinks=None):
    """As api.decode_attention, in plain JAX; the whole capacity is read."""
    rows, heads, dim = query.shape
    kv_heads, capacity = keys.shape[1:3]
    precision = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    keys, values = keys.astype(query.dtype), values.astype(query.dtype)

    def product(equation, left, right):
        return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32, precision=precision)

    scores = product("bkgd,bktd->bkgt", query.reshape(rows, kv_heads, -1, dim), keys) * scale
    if soft_cap is not None:
        scores = jnp.tanh(scores / soft_cap) * soft_cap
    visible_tokens = lengths if window is None else jnp.minimum(lengths, window)
    age = (lengths[:, None] - 1 - jnp.arange(capacity, dtype=jnp.int32)) % capacity
    visible = (age < visible_tokens[:, None])[:, None, None]
    scores = jnp.where(visible, scores, _MASKED)
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, kv_heads, heads // kv_heads, 1)
        top = jnp.maximum(top, sink)
    weights = jnp.where(visible, jnp.exp(scores - top), 0.0)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - top)
    weights = (weights / jnp.maximum(total, 1e-30)).astype(query.dtype)
    return product("bkgt,bktd->bkgd", weights, values).astype(query.dtype).reshape(query.shape)
