"""Measures the kernels' blocks on this machine's GPU: `jaxtune info --kernels --tune`."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from jaxtune.pallas import tuning
from jaxtune.pallas.attention import mosaic
from jaxtune.pallas.attention.layout import packed_layout
from jaxtune.pallas.attention.shapes import log_normal_segments

_ROWS, _LENGTH, _MEAN_DOCUMENT = 4, 8192, 512
_STEPS, _STAGES, _TURNS = (64, 128), (2, 3, 4), (True, False)


def tune(head_dim: int = 128, heads: int = 32, kv_heads: int = 8, dtype=jnp.bfloat16) -> dict[str, dict[str, Any]]:
    """Times the blocks of the Hopper kernels on packed rows (4 x 8,192 tokens, documents of mean 512) and keeps the
    fastest in the user's cache (tuning.py). Needs the GPU and takes a minute or two.

    Returns:
      kernel -> its entry, see tuning.measure.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(_ROWS, _LENGTH, count, head_dim) for count in (heads, kv_heads, kv_heads, heads)]
    query, key, value, dout = (jax.random.normal(k, shape).astype(dtype) for k, shape in zip(keys, shapes, strict=True))
    segments = jnp.asarray(log_normal_segments(_ROWS, _LENGTH, mean=_MEAN_DOCUMENT, sigma=0.8))
    scale = head_dim**-0.5

    def forward():
        run = jax.jit(lambda q, k, v, s: mosaic.forward(q, k, v, packed_layout(s.shape, s), scale=scale))
        return lambda: run(query, key, value, segments)

    out, lse = forward()()

    def backward(kept: slice):
        def prepare():
            run = jax.jit(
                lambda q, k, v, o, l, d, s: mosaic.backward(q, k, v, o, l, d, packed_layout(s.shape, s), scale=scale)[
                    kept
                ]
            )
            return lambda: run(query, key, value, out, lse, dout, segments)

        return prepare

    candidates = [
        dict(own=64, step=step, stages=stages, turns=turns)
        for step, stages, turns in itertools.product(_STEPS, _STAGES, _TURNS)
    ]
    work = {"forward": forward, "dquery": backward(slice(0, 1)), "dkey": backward(slice(1, 3))}
    return {
        kernel: tuning.measure(f"attention {kernel}", f"head_dim={head_dim}", dtype, candidates, prepare)
        for kernel, prepare in work.items()
    }
