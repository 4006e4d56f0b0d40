"""The grouped product compiles for a H200 at published shapes, both directions, adapters in the same kernel; routing
stores nothing of the size pairs x experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import dispatch
from jaxtune.pallas.grouped_matmul import GroupedLora, grouped_matmul
from jaxtune.pallas.grouped_matmul.layout import groups_of
from jaxtune.pallas.routing import route
from tests.gpu.aot.target import H200

SHAPES = {"gpt-oss": (32, 65_536, 2880, 5760, True), "qwen3-30b-a3b": (128, 131_072, 768, 2048, False)}


@pytest.mark.parametrize("model", SHAPES)
def test_kernels_compile_for_an_h200(model):
    experts, pairs, in_size, out_size, transposed = SHAPES[model]
    where = H200.sharding()

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    def step(x, weight, a, b, sizes, dout):
        groups = groups_of(sizes, pairs)

        def run(x, a, b):
            return grouped_matmul(x, weight, groups, GroupedLora(a, b, 2.0), transposed=transposed)

        out, pullback = jax.vjp(run, x, a, b)
        return out, *pullback(dout)

    sizes = array(experts, dtype=jnp.int32)
    rows = jax.eval_shape(lambda sizes: groups_of(sizes, pairs), sizes).rows
    weight = array(experts, in_size, out_size) if transposed else array(experts, out_size, in_size)
    lora = (array(experts, 16, in_size, dtype=jnp.float32), array(experts, out_size, 16, dtype=jnp.float32))
    with H200.lowering():
        lowered = jax.jit(step).lower(array(rows, in_size), weight, *lora, sizes, array(rows, out_size))
        assert dispatch.record["grouped_matmul"] == ("mosaic", {})
        text = lowered.compile().as_text()
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 2  # forward and dx


def test_routing_stores_nothing_of_the_size_pairs_times_experts():
    """131,072 tokens with 8 of 256 experts: a one-hot of that would be 268 million numbers."""
    choice = jax.ShapeDtypeStruct((131_072, 8), jnp.int32, sharding=H200.sharding())
    with H200.lowering():
        memory = jax.jit(lambda choice: route(choice, 256)).lower(choice).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 50_000_000
