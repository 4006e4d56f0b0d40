"""Cases that compare an implementation of attention with the reference at its first use on a GPU. Mosaic and Triton get
one small case. cuDNN chooses among kernels by a call's sizes, and one was wrong for a single number of documents, so
packed rows are checked with the call's sizes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import dispatch, one_order, tuning
from jaxtune.pallas.attention import cudnn, reference
from jaxtune.pallas.attention.layout import PackedLayout, packed_layout

# (segment id, tokens): padding in front, between and behind; a document of one token; one longer than the window; three
# tiles and a rest.
_RUNS = ((0, 5), (1, 90), (2, 1), (1, 160), (0, 7), (3, 110), (0, 27))
_WINDOW = 100
_WHOLE_LENGTH = 1024  # a row that is one document is checked with at most this length
# Lengths of the documents in cuDNN's case. Each is in its own part of a row and cut to it; the rest of the part is
# padding.
_DOCUMENT_LENGTHS = (90, 1, 160, 7, 110)


def refusal(
    name: str, module, query, kv_heads: int, soft_cap, blocks: Mapping[str, Mapping], runs: bool = False
) -> str | None:
    """Why this GPU must not run the kernels of `module` for calls like this one, or None (dispatch.first_use).

    Compares forward and gradients of a small packed case once for each dtype, head dim, parity of the group, soft cap
    or none, and blocks, in seconds; a pass is stored.

      query: [B, T, heads, D]; only shape and dtype are read.
      blocks: {name in tuning.py, such as "attention forward": fields of its Blocks}; other blocks are another kernel.
    """
    dim, dtype = query.shape[-1], jnp.dtype(query.dtype)
    group = 2 if query.shape[2] // kv_heads % 2 == 0 else 1
    call = f"{dtype.name}, head dim {dim}, {'grouped' if group == 2 else 'single'} heads"
    if soft_cap is not None:
        call += ", soft cap"
    if runs:
        call += ", runs"
    call = ", ".join([call, *(f"{op} {dict(fields)}" for op, fields in blocks.items())])

    def compare():
        segments = np.concatenate([np.repeat(number, tokens) for number, tokens in _RUNS])[None].astype(np.int32)
        layout = packed_layout(segments.shape, jnp.asarray(segments))
        if runs:  # of 60 tokens, which no window or tile cuts evenly, and of one
            layout = layout.with_runs(jnp.asarray(np.arange(segments.size) % 67 % 64 < 60)[None])
        real = segments[0] > 0
        arrays = _arrays(segments.shape, 2 * group, 2, dim, dtype)
        # In one order tiles begin with a document, and there are no windows.
        window = None if one_order.is_exact() else _WINDOW
        options = dict(scale=dim**-0.5, window=window, soft_cap=soft_cap)

        def run(module, query, key, value, dout):
            out, lse = module.forward(query, key, value, layout, **options)
            gradients = module.backward(query, key, value, out, lse, dout, layout, **options)[:3]
            return (out, lse[..., real], *gradients)

        with contextlib.ExitStack() as stack:
            for op, fields in blocks.items():
                stack.enter_context(tuning.forced(op, fields))
            kernel_results = jax.jit(lambda *arrays: run(module, *arrays))(*arrays)
        exact = dispatch.exactly(functools.partial(run, reference))
        reference_results = exact(*(array.astype(jnp.float32) for array in arrays))
        return kernel_results, reference_results

    return dispatch.first_use("attention", name, call, compare)


def _arrays(shape: tuple[int, int], heads: int, kv_heads: int, dim: int, dtype) -> list[jax.Array]:
    """Random query, key, value and dout [rows, tokens, heads or kv_heads, dim] of `dtype`, the same at every call."""
    keys = jax.random.split(jax.random.key(0), 4)
    counts = (heads, kv_heads, kv_heads, heads)
    return [jax.random.normal(key, (*shape, count, dim)).astype(dtype) for key, count in zip(keys, counts, strict=True)]


def cudnn_refusal(query, kv_heads: int, layout: PackedLayout, window: int | None) -> str | None:
    """Why this GPU must not run cuDNN for calls like this one, or None; checked and stored as in `refusal`.

    Packed rows are checked with the call's sizes, by which cuDNN chooses its kernels; whole rows on one row of at most
    1,024 tokens.
    """
    rows, length, heads, dim = query.shape
    dtype, documents = jnp.dtype(query.dtype), layout.max_documents
    assert documents is not None  # cuDNN refuses calls without it
    if documents == 1 and layout.causal:
        rows, length = 1, min(length, _WHOLE_LENGTH)
    call = f"{dtype.name}, {rows} x {length} x {heads} over {kv_heads} heads x {dim}, up to {documents} documents a row"
    if window is not None:
        window = min(window, _WINDOW)
        call += f", window {window}"
    if not layout.causal:
        call += ", both ways"

    def compare():
        row, start, tokens = _documents(rows, length, documents)
        index = np.arange(tokens.max())
        inside = index < tokens[:, None]  # of each document and each place that the longest one has
        token_index = row[:, None], np.minimum(start[:, None] + index, length - 1)
        segments = np.zeros((rows, length), np.int32)
        segments[token_index[0].repeat(index.size, 1)[inside], token_index[1][inside]] = (
            np.arange(row.size) + 1
        ).repeat(tokens)
        packed = packed_layout(segments.shape, jnp.asarray(segments), max_documents=documents, causal=layout.causal)
        one_document_layout = packed_layout(inside.shape, jnp.asarray(inside, jnp.int32), causal=layout.causal)
        options = dict(scale=dim**-0.5, window=window, soft_cap=None)

        def run(module, layout, real, query, key, value, dout):
            out, lse = module.forward(query, key, value, layout, **options)
            gradients = module.backward(query, key, value, out, lse, dout, layout, **options)[:3]
            return jnp.moveaxis(lse, 1, 2)[real], out, *gradients

        def expected(*arrays):
            """Each document is a row of its own, as the reference makes the scores of whole rows."""
            lse, *results = run(
                reference, one_document_layout, inside, *(array.astype(jnp.float32)[token_index] for array in arrays)
            )
            return lse, *(
                jnp.zeros((rows, length, *result.shape[2:])).at[token_index].add(result) for result in results
            )

        arrays = _arrays(segments.shape, heads, kv_heads, dim, dtype)
        kernel_results = jax.jit(functools.partial(run, cudnn, packed, segments > 0))(*arrays)
        return kernel_results, dispatch.exactly(expected)(*arrays)

    return dispatch.first_use("attention", "cudnn", call, compare)


def _documents(rows: int, length: int, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, first token, tokens), int[documents] each: the documents of cuDNN's case, in unequal numbers a row."""
    most = min(most, length)
    section = length // most
    sizes = [section - section // 10] if most == 1 else [min(section, tokens) for tokens in _DOCUMENT_LENGTHS]
    documents = [
        (row, number * section, sizes[number % len(sizes)])
        for row in range(rows)
        for number in range(max(1, most - row % 3))
    ]
    document_rows, starts, document_tokens = np.array(documents).T
    return document_rows, starts, document_tokens
