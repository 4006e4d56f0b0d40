"""The Triton kernels of `gated_thin`, `gated_thin_backward` and `rounded_gradients` for an H200: what they keep in
registers, that the backward writes over its arguments, and the passes over memory that they take from a layer."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, use_abstract_mesh

from jaxtune.pallas import dispatch, meshes, targets
from jaxtune.pallas.gated import gated_thin, gated_thin_backward, thin
from tests.gpu.aot.target import H200
from tests.gpu.aot.test_compile_h200 import INNER, TOKENS, compiled
from tests.gpu.aot.triton_compiler import GPUS, SHARED_MEMORY_KB, compile_call, recorded_calls

CALL = 'custom_call_target="triton_kernel_call"'
HOPPER = (9, 0)


def arguments(size: int, rank: int, tokens: int = 4096, where=None, dtype=jnp.bfloat16):
    """(gate, up, dgated, dinner, a)."""
    shapes = [(tokens, size)] * 3 + [(tokens, rank), (rank, size)]
    return [jax.ShapeDtypeStruct(shape, dtype, sharding=where) for shape in shapes]


def forward(gate, up, dgated, dinner, a):
    return gated_thin(gate, up, a, "silu", implementation="triton")


def backward(gate, up, dgated, dinner, a):
    return gated_thin_backward(gate, up, dgated, dinner, "silu", implementation="triton")


def rounded(gate, up, dgated, dinner, a):
    return thin.by_kernel(gate, up, a, "silu", "e4m3")


def rounded_backward(gate, up, dgated, dinner, a):
    """dinner stands for the low-rank inputs too, and a, transposed, for both B's."""
    return thin.rounded_gradients(gate, up, dgated, dinner, [dinner] * 2, [a.T] * 2, "silu")


RUNS = [forward, rounded, backward, rounded_backward]
PROGRAMS = {rounded_backward: 2}  # at least, on a multiprocessor; of the others 3


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("run", RUNS)
def test_other_gpus_have_room_for_several_programs(run, capability, tmp_path):
    """What Hopper has, too: nothing spills, and 16 bytes are read ahead."""
    if run in (rounded, rounded_backward) and capability < (8, 9):
        return  # it has no e4m3, and fp8_product does not call the kernel
    jax.clear_caches()
    with targets.compile_for(capability), recorded_calls() as calls:
        jax.eval_shape(run, *arguments(14336, 32))
    [call] = calls
    kernel = compile_call(call, capability, tmp_path)
    room = SHARED_MEMORY_KB[capability] * 1024
    assert kernel.spilled_bytes == 0 and PROGRAMS.get(run, 3) * (kernel.shared_bytes + 1024) <= room
    assert re.search(r"cp\.async\.cg\.shared\.global\S* .*0x10", kernel.ptx)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("size", "rank"), [(14336, 16), (2880, 8), (17408, 32)])
def test_sums_stay_in_registers(run, size, rank, tmp_path):
    """Nothing spills, 16 bytes are read ahead and written at once, and several programs fit a multiprocessor."""
    jax.clear_caches()
    with targets.compile_for(HOPPER), recorded_calls() as calls:
        jax.eval_shape(run, *arguments(size, rank))
    [call] = calls
    kernel = compile_call(call, HOPPER, tmp_path)
    assert kernel.spilled_bytes == 0 and re.search(r"wgmma\.mma_async|mma\.sync", kernel.ptx)
    assert 3 * (kernel.shared_bytes + 1024) <= SHARED_MEMORY_KB[HOPPER] * 1024
    assert len(re.findall(r"cp\.async\.cg\.shared\.global\S* .*0x10", kernel.ptx)) >= 12
    # Codes are written 8 at once, by the threads that read 8 numbers of gate.
    widths = {rounded: (2,), rounded_backward: (2, 4)}.get(run, (4,))
    for width in widths:
        assert len(re.findall(rf"st\.global(?:\.[\w:]+)*\.v{width}\.b32", kernel.ptx)) >= 2
    # Nothing is divided, and nothing rounded to bfloat16 one by one.
    assert "ex2.approx.ftz" in kernel.ptx and not re.search(r"div\.|cvt\.rn\.bf16\.f32", kernel.ptx)


@pytest.mark.parametrize("run", RUNS)
def test_float16_is_rounded_to_float16(run, tmp_path):
    jax.clear_caches()
    with targets.compile_for(HOPPER), recorded_calls() as calls:
        jax.eval_shape(run, *arguments(2880, 8, dtype=jnp.float16))
    [call] = calls
    kernel = compile_call(call, HOPPER, tmp_path)
    assert kernel.spilled_bytes == 0 and re.search(r"cvt\.rn\.f16", kernel.ptx) and "bf16" not in kernel.ptx


def test_the_backward_writes_over_its_arguments():
    """Beside them it has the partial sums alone."""
    given = arguments(INNER, 16, TOKENS, H200.sharding())
    with H200.lowering():
        program = jax.jit(backward, donate_argnums=(0, 1)).lower(*given).compile()
    assert dispatch.record["gated_thin_backward"] == ("triton", {})
    text, memory = program.as_text(), program.memory_analysis()
    assert text.count(CALL) == 1 and " copy(" not in text
    assert memory.alias_size_in_bytes == 2 * TOKENS * INNER * 2
    assert memory.temp_size_in_bytes < 20 * 16 * INNER * 4


def test_tokens_are_divided_between_devices():
    jax.clear_caches()
    with targets.compile_for(HOPPER), recorded_calls() as calls, use_abstract_mesh(AbstractMesh((2,), ("data",))):
        dgate, dup, da = jax.eval_shape(backward, *arguments(1024, 16))
        gated, inner = jax.eval_shape(forward, *arguments(1024, 16))
        found = jax.eval_shape(meshes.on_any_mesh(rounded_backward), *arguments(1024, 16))
    wide = [(4096, 2048), (4096, 16), (4096, 32)]
    assert [each.shape for each in jax.tree.leaves(found)] == [*wide, (16, 1024), (1024, 16), (1024, 16)]
    assert dgate.shape == dup.shape == gated.shape == (4096, 1024)
    assert da.shape == (16, 1024) and inner.shape == (4096, 16)
    assert [types[0].shape for _, types, _ in calls] == [(2048, 1024)] * 3


@pytest.mark.full
@pytest.mark.parametrize("plan", ["keep", "recompute"])
def test_a_layer_s_activation_is_read_by_its_product_with_the_weight_alone(plan):
    """The forward writes it once, and no thin product reads it; the backward does not have it, and copies nothing. A
    plan that computes gate and up again does not keep the product with A either, and computes it from them."""
    text = compiled(plan).as_text()
    entry = text[text.index("ENTRY") :].splitlines()
    wide = rf"bf16\[(?:8,2048|{TOKENS}),{INNER}\]"
    calls = [line for line in entry if CALL in line]
    ours = [line for line in calls if re.search(rf"= \({wide}", line)]
    back = [line for line in ours if "layer_backward" in line]
    assert len(ours) == 2 * 4 and len(back) == 4
    assert sum(f"f32[1]{{0}}, bf16[{TOKENS},16]" in line for line in calls) == (4 + 4 * (plan == "recompute"))
    assert all("output_to_operand_aliasing={{0}: (0, {}), {1}: (1, {})}" in line for line in back)
    assert not re.search(rf"= {wide}\S* copy\(", text)
    # No product of the adapter's A or its gradient is left to XLA.
    contract = [line for line in entry if re.search(r"/contract/|\(contract\)", line)]
    assert not [line for line in contract if re.search(rf"= \(?\w+\[(16,{INNER}|{INNER},16)\]\S*, s8", line)]
    thin = [line for line in contract if re.search(rf"= \(?\w+\[{TOKENS},16\]\S*, s8", line)]
    assert not [line for line in thin if "layer_forward" in line]
