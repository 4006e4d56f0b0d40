"""Attention of the one newest token of each row over the row's key/value cache, in plain jnp, which defines the result:
kernels are compared with it, and it computes the calls that they refuse. It reads the whole capacity of the cache.

score[k] = scale * query . key[k], or cap * tanh(score / cap) with a soft cap. The key at index i of a ring with
`capacity` entries was written `age` tokens before the row's newest one, age = (length - 1 - i) % capacity, and is
visible if age < min(length, window). A sink is an additional logit of its head that has no value (gpt-oss).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_MASKED = -1e30  # finite, so that a row without keys does not compute inf - inf


def decode(query, keys, values, lengths, *, scale, window=None, soft_cap=None, sinks=None):
    """The implementation of decode_attention in plain jnp, with which kernels are compared: returns the attention of
    the newest token of each row over its cache, [B, heads, D] in query's dtype. An empty row gives 0. decode_attention
    uses it for calls that all kernels refuse, such as those in float32 or without a GPU; an FP8 cache alone is a reason
    only below compute capability 8.9.

    Args:
      query: [B, heads, D], of the newest tokens.
      keys, values: the caches, [B, kv_heads, capacity, D], converted to query's dtype; the whole capacity is read, and
        must be finite. The token at position p is at index p % capacity.
      lengths: int32[B], tokens of each row with the newest one; of a row longer than the capacity the last `capacity`
        tokens are there.
      scale: factor on query . key.
      window: how many tokens the newest one sees, itself included; None: all.
      soft_cap: scores s become cap * tanh(s / cap); None: no cap.
      sinks: float[heads], an extra logit per head that has no value; None: none.
    """
    rows, heads, dim = query.shape
    kv_heads, capacity = keys.shape[1:3]
    precision = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    keys, values = keys.astype(query.dtype), values.astype(query.dtype)

    def product(equation, left, right):
        return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32, precision=precision)

    scores = product("bkgd,bktd->bkgt", query.reshape(rows, kv_heads, -1, dim), keys) * scale
    if soft_cap is not None:
        scores = jnp.tanh(scores / soft_cap) * soft_cap
    seen = lengths if window is None else jnp.minimum(lengths, window)
    age = (lengths[:, None] - 1 - jnp.arange(capacity, dtype=jnp.int32)) % capacity
    visible = (age < seen[:, None])[:, None, None]
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
