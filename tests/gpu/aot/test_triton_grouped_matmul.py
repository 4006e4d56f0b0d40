"""The Triton grouped product passes Triton's compiler and assembler, and fits, on every GPU, in both directions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import targets
from jaxtune.pallas.grouped_matmul import GroupedLora, grouped_matmul, triton
from jaxtune.pallas.grouped_matmul.layout import groups_of
from tests.gpu.aot.triton_compiler import GPUS, SHARED_MEMORY_KB, compile_call, recorded_calls, target

EXPERTS, PAIRS, IN, OUT = 32, 65_536, 2880, 5760


def step(x, weight, a, b, sizes, dout):
    groups = groups_of(sizes, PAIRS)

    def run(x):
        return grouped_matmul(x, weight, groups, GroupedLora(a, b, 2.0), implementation="triton")

    out, pullback = jax.vjp(run, x)
    return out, *pullback(dout)


def arguments(where=None):
    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    sizes = array(EXPERTS, dtype=jnp.int32)
    rows = jax.eval_shape(lambda sizes: groups_of(sizes, PAIRS), sizes).rows
    lora = (array(EXPERTS, 16, IN), array(EXPERTS, OUT, 16))
    return array(rows, IN), array(EXPERTS, OUT, IN), *lora, sizes, array(rows, OUT)


@pytest.mark.parametrize("capability", GPUS)
def test_kernels_fit(capability, tmp_path):
    with targets.compile_for(capability), recorded_calls() as calls:
        jax.eval_shape(lambda *arrays: step(*arrays), *arguments())  # traced anew for each GPU
        assert triton.tile() == triton.TILES[SHARED_MEMORY_KB[capability]]
    assert [settings["INNER_LAST"] for *_, settings in calls] == [1, 0]
    for call in calls:
        kernel = compile_call(call, capability, tmp_path)
        assert kernel.shared_bytes <= SHARED_MEMORY_KB[capability] * 1024
        assert kernel.spilled_bytes == 0
        assert "mma" in kernel.ptx


def test_it_lowers_through_jax_triton_and_compiles():
    gpu = target((8, 9))
    with gpu.lowering():
        text = jax.jit(step).lower(*arguments(gpu.sharding())).compile().as_text()
    assert text.count('custom_call_target="triton_kernel_call"') == 2
