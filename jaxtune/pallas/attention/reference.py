"""Attention in plain jnp, which defines the operation, with an fp32 softmax. Chunks of queries bound its memory.

score[q, k] = scale * query[q] . key[k];  soft cap: cap * tanh(score / cap);  key k is visible to query q iff
doc_start[q] <= k <= q < doc_end[q] and q - k < window, or if the layout is not causal, doc_start[q] <= k < doc_end[q].
In layouts with runs k < runs.end[q] takes the place of k <= q.
A sink is one more logit of its head without a value. lse is the natural logarithm of the softmax denominator, sink
included.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# The largest number of scores of one chunk of queries: 256 MB of fp32. Cases of ordinary test size are one chunk.
_MAX_SCORES = 1 << 26
_MASKED = -1e30  # finite, so that a row without visible keys stays free of inf - inf


def _precision(dtype):
    """Exact for float32, which a GPU would otherwise round to TF32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def _scores(query, key, scale, soft_cap):
    """(scores, derivative of the soft cap or None), float32[B, K, G, Q, T] each, of query [B, Q, K, G, D], key [B, T,
    K, D].
    """
    scores = jnp.einsum(
        "bqkgd,btkd->bkgqt", query, key, preferred_element_type=jnp.float32, precision=_precision(query.dtype)
    )
    scores = scores * scale
    if soft_cap is None:
        return scores, None
    capped = jnp.tanh(scores / soft_cap)
    return capped * soft_cap, 1.0 - capped * capped


def _visible(start, end, first, length, window, causal):
    """bool[B, 1, 1, Q, T]: which keys each of the queries first, first + 1, ... sees; start, end: int32[B, Q], their
    bounds.
    """
    queries = first + jnp.arange(start.shape[1], dtype=jnp.int32)
    keys = jnp.arange(length, dtype=jnp.int32)
    if causal:
        visible = (keys >= start[..., None]) & (keys <= queries[:, None]) & (queries < end)[..., None]
    else:
        visible = (keys >= start[..., None]) & (keys < end[..., None])
    if window is not None:
        visible &= queries[:, None] - keys < window
    return visible[:, None, None]


def _ends(layout):
    """(int32[B, T], whether causality bounds keys beside it): after the last key that each query may see."""
    return (layout.doc_end, layout.causal) if layout.runs is None else (layout.runs.end, False)


def _chunked(length, per_query):
    """(queries of a chunk, `length` rounded up to whole chunks): as few even chunks as keep scores
    within _MAX_SCORES.
    """
    chunk = max(1, min(length, _MAX_SCORES // max(1, per_query)))
    count = -(-length // chunk)
    chunk = -(-length // count)
    return chunk, chunk * count


def _split(array, chunk, padded):
    """[B, T, ...] -> [n, B, chunk, ...], as lax.scan takes it; T is first padded with zeros to `padded`."""
    pad = [(0, 0)] * array.ndim
    pad[1] = (0, padded - array.shape[1])
    array = jnp.pad(array, pad)
    return jnp.moveaxis(array.reshape(array.shape[0], -1, chunk, *array.shape[2:]), 1, 0)


def _join(array, length):
    array = jnp.moveaxis(array, 0, 1)
    return array.reshape(array.shape[0], -1, *array.shape[3:])[:, :length]


def forward(query, key, value, layout, *, scale, window=None, soft_cap=None, sinks=None):
    """As api.attention_forward: (out, lse), in plain JAX, which defines it."""
    rows, length, heads, dim = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(rows, length, kv_heads, heads // kv_heads, dim)
    chunk, padded = _chunked(length, rows * heads * length)
    sink = None if sinks is None else sinks.astype(jnp.float32).reshape(1, kv_heads, -1, 1)

    ends, causal = _ends(layout)

    def attend_chunk(state, chunk_input):
        first, q, start, end = chunk_input
        scores, _ = _scores(q, key, scale, soft_cap)
        visible = _visible(start, end, first, length, window, causal)
        scores = jnp.where(visible, scores, _MASKED)
        top = scores.max(-1)
        if sink is not None:
            top = jnp.maximum(top, sink)
        weights = jnp.where(visible, jnp.exp(scores - top[..., None]), 0.0)
        total = weights.sum(-1)
        if sink is not None:
            total = total + jnp.exp(sink - top)
        safe = jnp.maximum(total, 1e-30)
        out = jnp.einsum(
            "bkgqt,btkd->bqkgd",
            (weights / safe[..., None]).astype(value.dtype),
            value,
            preferred_element_type=jnp.float32,
            precision=_precision(value.dtype),
        )
        return state, (out.astype(query.dtype), jnp.moveaxis(top + jnp.log(safe), 3, 1))

    firsts = jnp.arange(0, padded, chunk, dtype=jnp.int32)
    chunk_inputs = (
        firsts,
        _split(grouped, chunk, padded),
        _split(layout.doc_start, chunk, padded),
        _split(ends, chunk, padded),
    )
    if len(firsts) == 1:
        _, (out, lse) = attend_chunk(None, jax.tree.map(lambda a: a[0], chunk_inputs))
        out, lse = out[:, :length], lse[:, :length]
    else:
        _, (out, lse) = jax.lax.scan(attend_chunk, None, chunk_inputs)
        out, lse = _join(out, length), _join(lse, length)
    return out.reshape(query.shape), jnp.moveaxis(lse.reshape(rows, length, heads), 2, 1)


def backward(query, key, value, out, lse, dout, layout, *, scale, window=None, soft_cap=None, sinks=None):
    """As api.attention_backward: (dquery, dkey, dvalue, dsinks); dout counts as 0 at padding."""
    rows, length, heads, dim = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads

    def fold(array):
        return array.reshape(rows, length, kv_heads, group, dim)

    real = jnp.arange(length) < layout.doc_end
    dout = jnp.where(real[:, :, None, None], dout, 0)
    delta = (fold(out).astype(jnp.float32) * fold(dout).astype(jnp.float32)).sum(-1)
    stats = jnp.moveaxis(lse, 1, 2).reshape(rows, length, kv_heads, group)
    chunk, padded = _chunked(length, rows * heads * length)
    precision = _precision(query.dtype)

    ends, causal = _ends(layout)

    def chunk_gradients(state, chunk_input):
        dkey, dvalue = state
        first, q, do, stat, delt, start, end = chunk_input
        scores, dcap = _scores(q, key, scale, soft_cap)
        visible = _visible(start, end, first, length, window, causal)
        stat, delt = jnp.moveaxis(stat, 1, 3)[..., None], jnp.moveaxis(delt, 1, 3)[..., None]
        weights = jnp.where(visible, jnp.exp(jnp.where(visible, scores, _MASKED) - stat), 0.0)
        dweights = jnp.einsum("bqkgd,btkd->bkgqt", do, value, preferred_element_type=jnp.float32, precision=precision)
        dscores = weights * (dweights - delt)
        if dcap is not None:
            dscores = dscores * dcap
        dscores = (dscores * scale).astype(query.dtype)
        dq = jnp.einsum("bkgqt,btkd->bqkgd", dscores, key, preferred_element_type=jnp.float32, precision=precision)
        dkey = dkey + jnp.einsum(
            "bkgqt,bqkgd->btkd", dscores, q, preferred_element_type=jnp.float32, precision=precision
        )
        dvalue = dvalue + jnp.einsum(
            "bkgqt,bqkgd->btkd",
            weights.astype(value.dtype),
            do,
            preferred_element_type=jnp.float32,
            precision=precision,
        )
        return (dkey, dvalue), dq.astype(query.dtype)

    firsts = jnp.arange(0, padded, chunk, dtype=jnp.int32)
    chunk_inputs = (firsts,) + tuple(
        _split(a, chunk, padded) for a in (fold(query), fold(dout), stats, delta, layout.doc_start, ends)
    )
    zeros = (jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32))
    if len(firsts) == 1:
        (dkey, dvalue), dquery = chunk_gradients(zeros, jax.tree.map(lambda a: a[0], chunk_inputs))
        dquery = dquery[:, :length]
    else:
        (dkey, dvalue), dquery = jax.lax.scan(chunk_gradients, zeros, chunk_inputs)
        dquery = _join(dquery, length)
    dsinks = None
    if sinks is not None:
        share = jnp.exp(sinks.astype(jnp.float32) - jnp.moveaxis(lse, 1, 2))  # [B, T, heads]
        share = jnp.where(real[..., None], share, 0.0)
        dsinks = -(share * delta.reshape(rows, length, heads)).sum((0, 1)).astype(sinks.dtype)
    return dquery.reshape(query.shape), dkey.astype(key.dtype), dvalue.astype(value.dtype), dsinks
