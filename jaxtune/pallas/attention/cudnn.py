"""Attention by cuDNN, where it is exact. cuDNN has no segment ids: its packed ("THD") path takes starts and lengths of
at most n documents a row. On an H200 with cuDNN 9.19 it is exact up to 32 documents a row; its dq is wrong at 64. JAX's
call is private (jaxtune.system.private_jax).
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from jaxtune.pallas import targets
from jaxtune.pallas.attention.layout import PackedLayout
from jaxtune.system.private_jax import fused_attention_stablehlo as cudnn

MAX_DOCUMENTS = 32


def refusal(query, layout: PackedLayout, *, window, soft_cap, sinks) -> str | None:
    """Why cuDNN cannot compute this call exactly, or None. The window is never a reason."""
    target = targets.here()
    if target is None:
        return "no NVIDIA GPU"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {query.dtype} (cuDNN attention takes bfloat16 and float16)"
    dim = query.shape[-1]
    if dim % 8 or dim > (256 if target.has_packed_rows else 128):
        return f"head dim {dim}"
    if soft_cap is not None:
        return "soft cap"
    if sinks is not None:
        return "sinks"
    if layout.runs is not None:
        return "tokens that see later ones"
    if layout.max_documents is None:
        return "no promise of max_documents in the layout (cuDNN does not see segment ids)"
    if layout.max_documents > MAX_DOCUMENTS:
        return f"up to {layout.max_documents} documents a row (its dq is wrong beyond {MAX_DOCUMENTS})"
    if not _whole(layout) and not target.has_packed_rows:
        return "packed rows need compute capability 9.0"
    return None


def _whole(layout: PackedLayout) -> bool:
    """Whether cuDNN gets whole rows, in which padding comes last and is hidden by causality alone."""
    return layout.max_documents == 1 and layout.causal


def _slots(layout: PackedLayout) -> int:
    return max(2, layout.max_documents or 0)


def _documents(layout: PackedLayout):
    """The rows' documents as cuDNN's THD path takes them: (lengths int32[B, M], first tokens int32[B, M + 1]), -1 where
    unused and in the last column.
    """
    rows, length = layout.doc_start.shape
    count = _slots(layout)
    index = jnp.arange(length, dtype=jnp.int32)
    first = (layout.doc_start == index) & (layout.doc_end > index)
    slot = jnp.where(first, jnp.cumsum(first, axis=1) - 1, count)  # an index past the end is dropped
    row = jnp.broadcast_to(jnp.arange(rows)[:, None], slot.shape)
    empty = jnp.full((rows, count), -1, jnp.int32)
    starts = empty.at[row, slot].set(jnp.broadcast_to(index, slot.shape), mode="drop")
    ends = empty.at[row, slot].set(layout.doc_end, mode="drop")
    lengths = jnp.where(starts >= 0, ends - starts, -1)
    return lengths, jnp.concatenate([starts, jnp.full((rows, 1), -1, jnp.int32)], axis=1)


def _stat_index(layout: PackedLayout):
    """(document, index within it), int32[B, T] each: where cuDNN's statistics [B * M, heads, T] store each token's
    log-sum-exp.
    """
    index = jnp.arange(layout.doc_start.shape[1], dtype=jnp.int32)
    first = (layout.doc_start == index) & (layout.doc_end > index)
    number = jnp.cumsum(first.reshape(-1)).reshape(first.shape) - 1
    return jnp.maximum(number, 0), index - layout.doc_start


def _call_arguments(layout, query, scale, window):
    """(arrays, keywords) of JAX's cuDNN call, after query, key and value; an empty array: the feature is off."""
    unused = jnp.zeros(0, query.dtype)
    if _whole(layout):
        mask, arrays = cudnn.MaskType.CAUSAL, (unused, unused, unused, unused)
    else:
        lengths, offsets = _documents(layout)
        mask = cudnn.MaskType.PADDING_CAUSAL if layout.causal else cudnn.MaskType.PADDING
        arrays = (lengths, lengths, offsets, offsets)
    static = dict(
        scale=scale,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=mask,
        layout=cudnn.AttentionLayout.BTNH.value,
        sliding_window_length=window,
    )
    return (unused, *arrays, unused, unused), static


def _real(layout, array):
    """`array` [B, T, heads, D] with zeros at padding, where cuDNN leaves results unwritten and dout may be anything."""
    if layout.full:
        return array
    real = jnp.arange(array.shape[1]) < layout.doc_end
    return jnp.where(real[:, :, None, None], array, 0)


def forward(query, key, value, layout, *, scale, window=None, soft_cap=None, sinks=None):
    """As api.attention_forward: (out, lse); soft_cap and sinks must be None."""
    arrays, static = _call_arguments(layout, query, scale, window)
    out, stats = cudnn._dot_product_attention_fwd_p_wrapper.bind(query, key, value, *arrays, **static, is_training=True)
    if _whole(layout):
        return _real(layout, out), stats
    document, offset = _stat_index(layout)
    lse = jnp.moveaxis(stats[document, :, offset], 2, 1)
    return _real(layout, out), lse


def backward(query, key, value, out, lse, dout, layout, *, scale, window=None, soft_cap=None, sinks=None):
    """As api.attention_backward: (dquery, dkey, dvalue, None); soft_cap and sinks must be None, and dout counts as 0 at
    padding.
    """
    arrays, static = _call_arguments(layout, query, scale, window)
    if _whole(layout):
        stats = lse
    else:
        rows, heads, length = lse.shape
        document, offset = _stat_index(layout)
        real = jnp.arange(length) < layout.doc_end
        count = rows * _slots(layout)
        document = jnp.where(real, document, count)
        stats = jnp.zeros((count, heads, length), jnp.float32)
        stats = stats.at[document, :, offset].set(jnp.moveaxis(lse, 1, 2), mode="drop")
    dquery, dkey, dvalue = cudnn._dot_product_attention_bwd_p_wrapper.bind(
        query, key, value, *arrays, stats, out, _real(layout, dout), **static
    )
    clean = functools.partial(_real, layout)
    return clean(dquery), clean(dkey), clean(dvalue), None
