"""Attention through cuDNN, NVIDIA's library, where it is exact: an implementation that api.py prefers for rows of one
document each, on Hopper GPUs mostly for long ones (api.implementations).

cuDNN has no segment ids. Its packed ("THD") path takes the starts and lengths of at most n documents a row. Measured on
an H200 with cuDNN 9.19, it is exact up to 32 documents a row, and its dq is wrong at 64. It therefore serves rows that
are one document, and (from compute capability 9.0 on) packed rows whose layout guarantees at most 32 documents;
first_use.py checks it on the GPU in use with the number that the layout guarantees. The call is private to JAX
(jaxtune.system.private_jax), and this module is the only one that makes it: `forward` and `backward` make it, and
`refusal` says which calls they cannot compute.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from jaxtune.pallas.attention.layout import PackedLayout
from jaxtune.system.private_jax import fused_attention_stablehlo as cudnn

MAX_DOCUMENTS = 32


def refusal(query, layout: PackedLayout, *, window, soft_cap, sinks) -> str | None:
    """Returns the reason why cuDNN cannot compute this call exactly; None if it can. Reasons are: no NVIDIA GPU, a
    dtype other than bfloat16 and float16, a head dim that is no multiple of 8 or above 256 (128 below compute
    capability 9.0), a soft cap, sinks, a layout without the guarantee of at most 32 documents a row, and below compute
    capability 9.0 more than one.

    Args:
      query: [B, T, heads, D]; only shape and dtype are used.
      layout: only its static guarantee max_documents is used.
      window: how many keys a query sees, of a sliding window; None: all. It is never a reason.
      soft_cap: the cap on scores, or None.
      sinks: float[heads], an extra logit for each head that has no value, or None.
    """
    from jaxtune.pallas.dispatch import compute_capability

    capability = compute_capability()
    if capability is None:
        return "no NVIDIA GPU"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {query.dtype} (cuDNN attention takes bfloat16 and float16)"
    dim = query.shape[-1]
    if dim % 8 or dim > (256 if capability >= (9, 0) else 128):
        return f"head dim {dim}"
    if soft_cap is not None:
        return "soft cap"
    if sinks is not None:
        return "sinks"
    if layout.max_documents is None:
        return "no promise of max_documents in the layout (cuDNN does not see segment ids)"
    if layout.max_documents > MAX_DOCUMENTS:
        return f"up to {layout.max_documents} documents a row (its dq is wrong beyond {MAX_DOCUMENTS})"
    if layout.max_documents > 1 and capability < (9, 0):
        return "packed rows need compute capability 9.0"
    return None


def _slots(layout: PackedLayout) -> int:
    """M, the number of documents for which each row has room in the arrays that cuDNN's packed path takes: the layout's
    max_documents, but at least two, which cuDNN needs. layout: its max_documents is not None, as `refusal` requires."""
    return max(2, layout.max_documents or 0)


def _documents(layout: PackedLayout):
    """Where the documents of each row lie, in the format of cuDNN's THD path: (int32[B, M] their lengths in tokens,
    int32[B, M + 1] the indices of their first tokens in the row). M is that of `_slots`; unused entries, and the last
    column of the second, are -1. layout: the document bounds of the batch's rows."""
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
    """Where cuDNN stores each token's log-sum-exp in a batch of this layout, two int32[B, T]: (the token's document,
    its index within the document). In cuDNN's statistics [B * M, heads, T] they index the first and the last axis. JAX
    passes the documents of all rows to cuDNN in one list without the unused entries, so documents are numbered from row
    0 on, through all rows. At padding the numbers mean nothing. `forward` reads the log-sum-exp there, and `backward`
    writes it there again."""
    index = jnp.arange(layout.doc_start.shape[1], dtype=jnp.int32)
    first = (layout.doc_start == index) & (layout.doc_end > index)
    number = jnp.cumsum(first.reshape(-1)).reshape(first.shape) - 1
    return jnp.maximum(number, 0), index - layout.doc_start


def _call_arguments(layout, query, scale, window):
    """Returns (arrays, static arguments) that JAX's call of cuDNN takes after query, key and value. `forward` and
    `backward` call it. The seven arrays are a bias, the documents' lengths for queries and for keys, their first tokens
    for both, and two page tables. Those of the documents are from `_documents` if rows are packed (max_documents is not
    1); all others are empty, which means that the feature is not used. The static arguments are a dict of keywords: the
    scale, a causal mask (within documents, if rows are packed), the window, no dropout, and the order of axes.

    Args:
      layout: the bounds of the documents of the batch's rows.
      query: only its dtype is used, for the empty arrays.
      scale: the factor on scores.
      window: how many keys a query sees, of a sliding window; None: all.
    """
    unused = jnp.zeros(0, query.dtype)
    if layout.max_documents == 1:
        mask, arrays = cudnn.MaskType.CAUSAL, (unused, unused, unused, unused)
    else:
        lengths, offsets = _documents(layout)
        mask, arrays = cudnn.MaskType.PADDING_CAUSAL, (lengths, lengths, offsets, offsets)
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
    """`array` [B, T, heads, D] with zeros at the padding of `layout`. It is out or a gradient from cuDNN, which leaves
    the memory unwritten there, or dout, which may be anything there. It is returned unchanged if the layout guarantees
    that there is no padding (`full`)."""
    if layout.full:
        return array
    real = jnp.arange(array.shape[1]) < layout.doc_end
    return jnp.where(real[:, :, None, None], array, 0)


def forward(query, key, value, layout, *, scale, window=None, soft_cap=None, sinks=None):
    """Returns (out [B, T, heads, D], lse float32[B, heads, T]) of packed causal attention, computed by cuDNN. out has
    query's dtype and is 0 at padding, where lse means nothing. soft_cap and sinks must be None, because cuDNN has
    neither; they are there because all implementations are called with the same arguments.

    Args:
      query: [B, T, heads, D].
      key, value: [B, T, kv_heads, D].
      layout: the bounds of the documents; a query sees only its own document.
      scale: the factor on scores.
      window: how many keys a query sees, itself included; None: all of its document up to itself.
    """
    arrays, static = _call_arguments(layout, query, scale, window)
    out, stats = cudnn._dot_product_attention_fwd_p_wrapper.bind(query, key, value, *arrays, **static, is_training=True)
    if layout.max_documents == 1:
        return _real(layout, out), stats
    document, offset = _stat_index(layout)
    lse = jnp.moveaxis(stats[document, :, offset], 2, 1)
    return _real(layout, out), lse


def backward(query, key, value, out, lse, dout, layout, *, scale, window=None, soft_cap=None, sinks=None):
    """Returns (dquery, dkey, dvalue, None) of packed causal attention, computed by cuDNN: the gradients of its
    operands, 0 at padding. The None is for sinks. soft_cap and sinks must be None, because cuDNN has neither.

    Args:
      query, key, value: the operands of `forward`, [B, T, heads, D] and twice [B, T, kv_heads, D].
      out, lse: its results, which were saved, [B, T, heads, D] and float32[B, heads, T].
      dout: the gradient of out, [B, T, heads, D], taken as 0 at padding.
      layout, scale, window: the arguments of `forward`.
    """
    arrays, static = _call_arguments(layout, query, scale, window)
    if layout.max_documents == 1:
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
