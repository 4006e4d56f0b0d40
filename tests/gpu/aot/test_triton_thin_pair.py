"""The Triton kernel of `thin_pair` lowers, passes the compiler and the assembler on every GPU, and takes XLA's second
pass over the gradient of an adapted output."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, use_abstract_mesh

from jaxtune.pallas import targets
from jaxtune.pallas.thin_pair import thin_pair, thin_pairs
from tests.gpu.aot.compiled_step import step_peaks
from tests.gpu.aot.target import H200
from tests.gpu.aot.triton_compiler import GPUS, SHARED_MEMORY_KB, compile_call, recorded_calls


def arguments(out: int, rank: int, tokens: int = 4096):
    dout, inner = (jax.ShapeDtypeStruct((tokens, size), jnp.bfloat16) for size in (out, rank))
    return dout, jax.ShapeDtypeStruct((out, rank), jnp.float32), inner


def pair(*arrays):
    return thin_pair(*arrays, implementation="triton")


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize(("out", "rank"), [(14336, 16), (2880, 8), (1032, 10), (4096, 32)])
def test_sums_stay_in_registers(capability, out, rank, tmp_path):
    """Nothing spills on Hopper, where tiles are read ahead to shared memory, 16 bytes at once."""
    jax.clear_caches()
    with targets.compile_for(capability), recorded_calls() as calls:
        jax.eval_shape(pair, *arguments(out, rank))
    [call] = calls
    compiled = compile_call(call, capability, tmp_path)
    assert compiled.shared_bytes <= SHARED_MEMORY_KB[capability] * 1024
    if capability == (9, 0):
        assert compiled.spilled_bytes == 0 and "wgmma.mma_async" in compiled.ptx
        assert len(re.findall(r"cp\.async\.cg\.shared\.global\S* .*0x10", compiled.ptx)) >= 16
    else:
        assert re.search(r"ld\.global(?:\.[\w:]+)*\.v4\.b32|cp\.async\.cg", compiled.ptx)


def test_outputs_that_share_a_kernel_are_read_as_one(tmp_path):
    """Query, key and value of SmolLM2-135M, each 16 bytes at once, although their sizes are data."""
    given = [arguments(out, 16, 8192) for out in (576, 192, 192)]
    inner = jax.ShapeDtypeStruct((8192, 48), jnp.bfloat16)
    with targets.compile_for((9, 0)), recorded_calls() as calls:
        jax.eval_shape(thin_pairs, [each[0] for each in given], [each[1] for each in given], inner)
    [call] = calls
    compiled = compile_call(call, (9, 0), tmp_path)
    assert compiled.spilled_bytes == 0 and "wgmma.mma_async" in compiled.ptx
    assert len(re.findall(r"cp\.async\.cg\.shared\.global\S* .*0x10", compiled.ptx)) >= 16


def test_tokens_are_divided_between_devices():
    jax.clear_caches()
    dout, b, inner = arguments(1024, 16)
    joined = jax.ShapeDtypeStruct((4096, 32), jnp.bfloat16)
    with targets.compile_for((9, 0)), recorded_calls() as calls, use_abstract_mesh(AbstractMesh((2,), ("data",))):
        dinner, db = jax.eval_shape(pair, dout, b, inner)
        dinners, dbs = jax.eval_shape(thin_pairs, [dout] * 2, [b] * 2, joined)
    assert dinner.shape == (4096, 16) and db.shape == (1024, 16)
    assert dinners.shape == joined.shape and [db.shape for db in dbs] == [(1024, 16)] * 2
    found = [[types[number].shape for number in (0, 3, 6)] for _, types, _ in calls]
    assert found == [[(2048, 1024), (1024, 16), (2048, 16)], [(2048, 1024), (1024, 16), (2048, 32)]]


def test_a_layer_reads_the_gradients_of_gate_and_up_once():
    """For their adapters; XLA multiplies them by the weights."""
    text = step_peaks(H200, "llama-3.1-8b", 2, 8, 2048, 16, None, "keep").text
    lines = [line for line in text[text.index("ENTRY") :].splitlines() if "jit(layer_backward)" in line]
    calls = [line for line in lines if 'custom_call_target="triton_kernel_call"' in line]
    assert len([line for line in calls if "f32[28,16384,16]" in line]) == 2 * 2
    thin = re.compile(r"= \(?\w+\[(14336,16|16384,16)\]\S*, s8")
    assert not [line for line in lines if "jvp(expand)" in line and thin.search(line)]
