"""The cases with which implementations of attention are compared with the reference at their first use on a GPU
(dispatch.first_use), because a kernel can be wrong on a GPU, or with a version of a compiler, on which it was never
tested.

The Mosaic and the Triton kernels are checked on one small case (`refusal`). cuDNN chooses among its own kernels by the
sizes of a call, and one of them was wrong for one number of documents only, so for it (`cudnn_refusal`) packed rows are
checked with the call's own sizes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import dispatch, tuning
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


def refusal(name: str, module, query, kv_heads: int, soft_cap, blocks: Mapping[str, Mapping]) -> str | None:
    """Returns the reason why this GPU must not run the kernels of `module` for calls like this one, or None. It
    compares the forward and the gradients of a small packed case with the reference, once for each kind of call: dtype,
    head dim, whether an even number of query heads shares a key head, soft cap or not, blocks (the case has a window of
    100 and no sinks, whatever the call has). This takes some seconds; a pass is stored in the user's cache. It is None
    without a check if there is no GPU, while compiling for another GPU, or if the check is done later (dispatch.built,
    dispatch.unchecked). api.implementations asks it after the implementation's own `refusal`, and `tune` (tune.py)
    before it measures the Mosaic kernels.

    Args:
      name: the implementation's name, such as "mosaic".
      module: the implementation's module, which has the functions `forward` and `backward`.
      query: of the call, [B, T, heads, D]; only shape and dtype are used.
      kv_heads: of the call.
      soft_cap: of the call; None: no cap.
      blocks: how the kernels divide their work in the call, {name in tuning.py, such as "attention forward": the fields
        of its Blocks}; empty for an implementation that is not tuned. Other blocks are another kernel, and checked
        again.
    """
    dim, dtype = query.shape[-1], jnp.dtype(query.dtype)
    group = 2 if query.shape[2] // kv_heads % 2 == 0 else 1
    call = f"{dtype.name}, head dim {dim}, {'grouped' if group == 2 else 'single'} heads"
    if soft_cap is not None:
        call += ", soft cap"
    call = ", ".join([call, *(f"{op} {dict(chosen)}" for op, chosen in blocks.items())])

    def compare():
        segments = np.concatenate([np.repeat(number, tokens) for number, tokens in _RUNS])[None].astype(np.int32)
        layout = packed_layout(segments.shape, jnp.asarray(segments))
        real = segments[0] > 0
        arrays = _arrays(segments.shape, 2 * group, 2, dim, dtype)
        options = dict(scale=dim**-0.5, window=_WINDOW, soft_cap=soft_cap)

        def run(module, query, key, value, dout):
            out, lse = module.forward(query, key, value, layout, **options)
            gradients = module.backward(query, key, value, out, lse, dout, layout, **options)[:3]
            return (out, lse[..., real], *gradients)

        with contextlib.ExitStack() as stack:
            for op, chosen in blocks.items():
                stack.enter_context(tuning.forced(op, chosen))
            got = jax.jit(lambda *arrays: run(module, *arrays))(*arrays)
        exact = dispatch.exactly(functools.partial(run, reference))
        want = exact(*(array.astype(jnp.float32) for array in arrays))
        return got, want

    return dispatch.first_use("attention", name, call, compare)


def _arrays(shape: tuple[int, int], heads: int, kv_heads: int, dim: int, dtype) -> list[jax.Array]:
    """Makes random query, key, value and dout of `dtype` for a small case, always the same ones, as a list, each [rows,
    tokens, its number of heads, dim]: `heads` for query and dout, `kv_heads` for key and value. shape: (rows,
    tokens)."""
    keys = jax.random.split(jax.random.key(0), 4)
    counts = (heads, kv_heads, kv_heads, heads)
    return [jax.random.normal(key, (*shape, count, dim)).astype(dtype) for key, count in zip(keys, counts, strict=True)]


def cudnn_refusal(query, kv_heads: int, layout: PackedLayout, window: int | None) -> str | None:
    """Returns the reason why this GPU must not run cuDNN for calls like this one, or None. It compares the forward and
    the gradients with the reference, on packed rows of the call's own sizes, by which cuDNN chooses its kernels, or for
    rows of one document each on a single row of at most 1,024 tokens; once for each kind of call: dtype, the case's
    sizes, max_documents and window. A pass is stored in the user's cache. It is None without a check if there is no
    GPU, while compiling for another GPU, or if the check is done later (dispatch.built, dispatch.unchecked).
    api.implementations asks it after cudnn.refusal.

    Args:
      query: of the call, [B, T, heads, D]; only shape and dtype are used.
      kv_heads: of the call.
      layout: of the call; its guarantee `max_documents` must not be None.
      window: the sliding window of the call; None: none. The case's is no larger than 100 keys.
    """
    rows, length, heads, dim = query.shape
    dtype, documents = jnp.dtype(query.dtype), layout.max_documents
    assert documents is not None  # cuDNN refuses calls without it
    if documents == 1:
        rows, length = 1, min(length, _WHOLE_LENGTH)
    call = f"{dtype.name}, {rows} x {length} x {heads} over {kv_heads} heads x {dim}, up to {documents} documents a row"
    if window is not None:
        window = min(window, _WINDOW)
        call += f", window {window}"

    def compare():
        row, start, tokens = _documents(rows, length, documents)
        index = np.arange(tokens.max())
        inside = index < tokens[:, None]  # of each document and each place that the longest one has
        place = row[:, None], np.minimum(start[:, None] + index, length - 1)
        segments = np.zeros((rows, length), np.int32)
        segments[place[0].repeat(index.size, 1)[inside], place[1][inside]] = (np.arange(row.size) + 1).repeat(tokens)
        packed = packed_layout(segments.shape, jnp.asarray(segments), max_documents=documents)
        apart = packed_layout(inside.shape, jnp.asarray(inside, jnp.int32))
        options = dict(scale=dim**-0.5, window=window, soft_cap=None)

        def run(module, layout, real, query, key, value, dout):
            out, lse = module.forward(query, key, value, layout, **options)
            gradients = module.backward(query, key, value, out, lse, dout, layout, **options)[:3]
            return jnp.moveaxis(lse, 1, 2)[real], out, *gradients

        def expected(*arrays):
            """By the reference, for which each document is a row: it makes the scores of whole rows."""
            lse, *results = run(reference, apart, inside, *(array.astype(jnp.float32)[place] for array in arrays))
            return lse, *(jnp.zeros((rows, length, *each.shape[2:])).at[place].add(each) for each in results)

        arrays = _arrays(segments.shape, heads, kv_heads, dim, dtype)
        got = jax.jit(functools.partial(run, cudnn, packed, segments > 0))(*arrays)
        return got, dispatch.exactly(expected)(*arrays)

    return dispatch.first_use("attention", "cudnn", call, compare)


def _documents(rows: int, length: int, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lays out the documents of the case with which cuDNN is checked, and returns (row, first token, length in tokens),
    int[documents] each. There are `rows` rows of `length` tokens. The first row has `most` documents, the second one
    fewer, the third two fewer, the fourth `most` again, and so on; each has at least one. The numbers differ because
    cuDNN has been wrong for a single number of documents. Each document begins an equal part of its row, at most as
    long as this part; the rest of the part is padding. If `most` is 1, the only document of a row fills nine tenths of
    it. No row has more documents than tokens."""
    most = min(most, length)
    part = length // most
    sizes = [part - part // 10] if most == 1 else [min(part, tokens) for tokens in _DOCUMENT_LENGTHS]
    found = [
        (row, number * part, sizes[number % len(sizes)])
        for row in range(rows)
        for number in range(max(1, most - row % 3))
    ]
    row_of, starts, tokens_of = np.array(found).T
    return row_of, starts, tokens_of
