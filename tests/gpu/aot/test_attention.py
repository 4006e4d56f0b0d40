"""The Mosaic attention kernels lower, pass ptxas and fit a H200's shared memory, for every feature and head dim."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import dispatch
from jaxtune.pallas.attention import attention_backward, attention_forward, packed_layout
from tests.gpu.aot.target import H200

ROWS, LENGTH, HEADS, KV_HEADS = 2, 1024, 8, 2


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("features", [{}, {"window": 100}, {"soft_cap": 30.0}], ids=["plain", "window", "soft_cap"])
def test_kernels_compile_for_an_h200(dim, features):
    where = H200.sharding()

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    def step(query, key, value, dout, segment_ids):
        layout = packed_layout((ROWS, LENGTH), segment_ids)
        options = dict(features, scale=dim**-0.5)
        out, lse = attention_forward(query, key, value, layout, **options)
        return attention_backward(query, key, value, out, lse, dout, layout, **options)[:3]

    query, key = array(ROWS, LENGTH, HEADS, dim), array(ROWS, LENGTH, KV_HEADS, dim)
    with H200.lowering():
        lowered = jax.jit(step).lower(query, key, key, query, array(ROWS, LENGTH, dtype=jnp.int32))
        assert dispatch.record["attention"] == ("mosaic", {})
        text = lowered.compile().as_text()
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 3  # forward, dq, dk with dv
