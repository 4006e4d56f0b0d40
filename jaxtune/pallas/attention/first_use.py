"""The small case on which a kernel is compared with the reference at its first use on a GPU (dispatch.first_use)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import dispatch, tuning
from jaxtune.pallas.attention import reference
from jaxtune.pallas.attention.layout import packed_layout

# Padding in front, between and behind; a document of one token; one longer than the window; three tiles and a tail.
_RUNS = ((0, 5), (1, 90), (2, 1), (1, 160), (0, 7), (3, 110), (0, 27))
_WINDOW = 100


def refusal(name: str, module, query, kv_heads: int | None, soft_cap, blocks: Mapping[str, Mapping]) -> str | None:
    """Why this GPU must not run the kernels of `module` for calls like this one, or None.

    Args:
      blocks: op of tuning.py -> the blocks that the call takes: other blocks are another kernel.
    """
    dim, dtype = query.shape[-1], jnp.dtype(query.dtype)
    group = 2 if kv_heads is None or query.shape[2] // kv_heads % 2 == 0 else 1
    call = f"{dtype.name}, head dim {dim}, {'grouped' if group == 2 else 'single'} heads"
    if soft_cap is not None:
        call += ", soft cap"
    call = ", ".join([call, *(f"{op} {dict(chosen)}" for op, chosen in blocks.items())])

    def compare():
        segments = np.concatenate([np.repeat(number, tokens) for number, tokens in _RUNS])[None].astype(np.int32)
        layout = packed_layout(segments.shape, jnp.asarray(segments))
        real = segments[0] > 0
        keys = jax.random.split(jax.random.key(0), 4)
        heads = (2 * group, 2, 2, 2 * group)
        arrays = [
            jax.random.normal(key, (1, segments.shape[1], count, dim)).astype(dtype)
            for key, count in zip(keys, heads, strict=True)
        ]
        options = dict(scale=dim**-0.5, window=_WINDOW, soft_cap=soft_cap)

        def run(module, query, key, value, dout):
            out, lse = module.forward(query, key, value, layout, **options)
            gradients = module.backward(query, key, value, out, lse, dout, layout, **options)[:3]
            return (out, lse[..., real], *gradients)

        with contextlib.ExitStack() as stack:
            for op, chosen in blocks.items():
                stack.enter_context(tuning.forced(op, chosen))
            got = jax.jit(lambda *arrays: run(module, *arrays))(*arrays)
        exact = dispatch.exactly(lambda *arrays: run(reference, *arrays))
        want = exact(*(array.astype(jnp.float32) for array in arrays))
        return got, want

    return dispatch.first_use("attention", name, call, compare)
