"""Decode attention with the sums of attention/triton.py's forward: the same tiles of keys from the document's start, in
ascending order, by the same functions. A program is one warp, whose threads own the columns of a row of scores that a
warp of the forward's owns, so that a row's sum is added in one order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat
from jaxtune.pallas.attention import triton as forward

_STAGES = 2


def refusal(query, keys, window: int | None) -> str | None:
    """Why this kernel cannot compute a call, or None."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    dim = query.shape[-1]
    if query.dtype not in (jnp.bfloat16, jnp.float16) or keys.dtype != query.dtype:
        return f"dtype {query.dtype}, a cache of {keys.dtype}"
    if dim % 8 or not forward.LEAST <= dim <= forward.MOST:
        return f"head dim {dim}; multiples of 8 from {forward.LEAST} to {forward.MOST}"
    if window is not None:
        return f"a window of {window}, whose tiles do not begin at the document's start"
    return None


def decode(query, keys, values, lengths, *, scale, soft_cap=None, sinks=None):
    """As api.decode_attention without a window: [B, heads, D]. Only if `refusal` is None; caches are no rings.

    query: [B, heads, D] of 16 bits. keys, values: [B, kv_heads, capacity, D] in its dtype.
    lengths: int32[B], tokens of each row with the newest; 0 gives 0.
    scale: factor on scores. soft_cap: c of c tanh(s / c). sinks: float[heads].
    """
    from jaxtune.pallas.decode.attention import ordered_kernels

    rows, heads, dim = query.shape
    kv_heads, capacity = keys.shape[1:3]
    sinks = jnp.full(heads, -jnp.inf, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    (out,) = compat.triton_graph_call(
        ordered_kernels.ordered_kernel,
        (query, keys, values, lengths, sinks),
        [jax.ShapeDtypeStruct(query.shape, query.dtype)],
        (kv_heads, rows),
        warps=1,
        stages=_STAGES,
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
