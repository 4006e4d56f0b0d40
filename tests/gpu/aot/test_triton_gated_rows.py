"""The Triton kernel of `gated_rows_backward` compiles for every GPU, and takes two passes and their memory from XLA."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import dispatch, targets
from jaxtune.pallas.gated import RowGate, gated_rows_backward
from tests.gpu.aot.target import H200
from tests.gpu.aot.triton_compiler import GPUS, compile_call, recorded_calls

CLIPPED = RowGate("silu", 7.0, 1.702, interleaved=True)


def arguments(rows: int, size: int, where=None):
    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    return array(rows, 2 * size), array(rows, dtype=jnp.float32), array(rows, size)


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize(
    ("size", "gate"), [(768, RowGate("silu")), (2880, CLIPPED), (704, RowGate("gelu_tanh"))], ids=str
)
def test_numbers_stay_in_registers(capability, size, gate, tmp_path):
    """Nothing spills on Hopper, and a thread reads and writes 16 bytes at once."""
    jax.clear_caches()
    with targets.compile_for(capability), recorded_calls() as calls:
        jax.eval_shape(lambda *arrays: gated_rows_backward(*arrays, gate), *arguments(4096, size))
    [call] = calls
    compiled = compile_call(call, capability, tmp_path)
    assert compiled.spilled_bytes == 0 or capability != (9, 0)
    vector = re.findall(r"(ld|st)\.global(?:\.[\w:]+)*\.v4\.b32", compiled.ptx)
    assert vector.count("ld") >= 3 and vector.count("st") >= 3


@pytest.mark.parametrize("gate", [RowGate("silu"), CLIPPED], ids=str)
def test_the_kernel_writes_over_its_arguments(gate):
    given = arguments(4096, 768, H200.sharding())
    with H200.lowering():
        run = jax.jit(lambda *arrays: gated_rows_backward(*arrays, gate), donate_argnums=(0, 2))
        program = run.lower(*given).compile()
    assert dispatch.record["gated_rows_backward"] == ("triton", {})
    text, memory = program.as_text(), program.memory_analysis()
    assert text.count('custom_call_target="triton_kernel_call"') == 1
    assert " copy(" not in text and " fusion(" not in text
    assert memory.alias_size_in_bytes == 3 * 4096 * 768 * 2 and memory.temp_size_in_bytes < 1000
