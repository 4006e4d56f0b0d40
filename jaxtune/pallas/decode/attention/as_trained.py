"""Attention of new tokens over a cache with the sums of attention/triton.py's forward: the same tiles of keys from the
document's start, in ascending order, by the same functions. A program is one warp, whose threads own the columns of a
row of scores that a warp of the forward's owns, so that a row's sum is added in one order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat
from jaxtune.pallas.attention import triton as forward

_STAGES = 2


def attended(query, keys, values, before, *, scale, window=None, soft_cap=None, sinks=None):
    """[B, N, heads, D], the attention of N new tokens of each row, whose keys and values the caches have; 0 where
    `before` is negative. ValueError for a window, whose tiles do not begin with the document.

      query: [B, N, heads, D] of 16 bits, D as in attention/triton.py.
      keys, values: [B, kv_heads, capacity, D] in its dtype, no rings.
      before: int32[B], the first new token's position in its row.
      scale: factor on scores. soft_cap: c of c tanh(s / c). sinks: float[heads].
    """
    from jaxtune.pallas.decode.attention import as_trained_kernels

    if window is not None:
        raise ValueError(f"decode_attention: exact: a window of {window} on a GPU")
    rows, tokens, heads, dim = query.shape
    kv_heads, capacity = keys.shape[1:3]
    sinks = jnp.full(heads, -jnp.inf, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    (out,) = compat.triton_graph_call(
        as_trained_kernels.as_trained_kernel,
        (query, keys, values, before, sinks),
        [jax.ShapeDtypeStruct(query.shape, query.dtype)],
        (rows * tokens, kv_heads),
        warps=1,
        stages=_STAGES,
        TOKENS=tokens,
        HEADS=heads,
        KV_HEADS=kv_heads,
        CAPACITY=capacity,
        DIM=dim,
        WIDTH=forward.width(dim),
        SCALE=float(scale),
        CAP=float(soft_cap or 0.0),
        GROUP=max(16, 1 << (heads // kv_heads - 1).bit_length()),
        KEYS=forward.tiles(dim).forward.keys,
    )
    return out
