"""The kernel of the gated activation's backward, and what it takes from a train step's peak, for an H200."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import dispatch, gpu_kernel
from jaxtune.pallas.gated import gated_backward
from tests.gpu.aot.target import H200
from tests.gpu.aot.test_compile_h200 import HIDDEN, INNER, INPUT, KV_HEADS, TOKENS, WIDE, memory

KERNEL = 'custom_call_target="mosaic_gpu_v2"'


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("tokens", [TOKENS, 16 * TOKENS])
def test_the_kernel_writes_over_its_arguments(activation, tokens, monkeypatch, capfd):
    """16 bytes a lane and access; no copies. The larger size has more elements than 2^31: their numbers are unsigned
    (mosaic.refusal: fewer than 2^32), and bytes are counted in 64 bits."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    array = jax.ShapeDtypeStruct((tokens, INNER), jnp.bfloat16, sharding=H200.sharding())

    def call(*arrays):
        return gated_backward(*arrays, activation)

    with H200.lowering():
        program = jax.jit(call, donate_argnums=(0, 1, 2)).lower(array, array, array).compile()
    assert dispatch.record["gated_backward"] == ("mosaic", {})
    assert program.as_text().count(KERNEL) == 1 and " copy(" not in program.as_text()
    analysis = program.memory_analysis()
    assert analysis.alias_size_in_bytes == 3 * tokens * INNER * 2 and analysis.temp_size_in_bytes < 1000
    text = "".join(capfd.readouterr())
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", text)) == len(re.findall(r"st\.global\S*\.v4\.b32", text)) == 3
    assert len(re.findall(r"(?:ld|st)\.global", text)) == 6 and "mul.wide.u32" in text and "mul.wide.s32" not in text
    assert not any(int(size) for size in re.findall(r"(\d+) bytes spill", text))
    assert int(re.findall(r"Used (\d+) registers", text)[0]) <= 48  # 1,280 lanes of a multiprocessor


@pytest.mark.full
def test_the_peak_of_a_step_that_recomputes():
    """Inputs of layers, a layer's residuals, one wide array more, and what is half ready; it was four wide arrays."""
    residuals = TOKENS * (3 * HIDDEN + 2 * KV_HEADS * 128) * 2
    assert memory("recompute").temp_size_in_bytes < 4 * INPUT + residuals + 3 * WIDE + 2.5 * INPUT


def test_kernels_compiled_beside_a_program_are_not_compiled_in_it(monkeypatch, capfd):
    """Each once, though one is called twice; by XLA itself, for nothing of it can be kept."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setattr(jax.stages.Lowered, "compile", jax.stages.Lowered.compile.__wrapped__)
    array = jax.ShapeDtypeStruct((96, INNER), jnp.bfloat16, sharding=H200.sharding())

    def call(gate, up, dgated):
        first = [gated_backward(gate, up, dgated, activation) for activation in ("silu", "gelu_tanh")]
        return first, gated_backward(up, gate, dgated, "silu")

    with H200.lowering():
        program = jax.jit(call).lower(array, array, array)
    with ThreadPoolExecutor(2) as pool:
        kernels = gpu_kernel.kernels_of(program)
        begun = gpu_kernel.compile_beside(kernels, H200.sharding().device_set.pop(), pool)
        assert [future.result() for future in begun] == [None, None]
    beside = "".join(capfd.readouterr())
    text = program.compile().as_text()
    assert text.count(KERNEL) == 3
    assert beside.count("Used ") == 2 and "Used " not in "".join(capfd.readouterr())
