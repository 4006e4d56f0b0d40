"""The Triton kernel of `normed_stream` lowers, passes the compiler and the assembler on every GPU, holds rows in
registers, and leaves XLA one pass over the stream for a norm of a layer's backward."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, use_abstract_mesh

from jaxtune.pallas import targets
from jaxtune.pallas.normed_stream import normed_stream
from tests.gpu.aot.compiled_step import step_peaks
from tests.gpu.aot.target import H200
from tests.gpu.aot.triton_compiler import GPUS, compile_call, recorded_calls

ROWS, LENGTH = 2, 512


def gradient(x, weight, *gradients):
    return jax.vjp(lambda x: normed_stream(x, weight, implementation="triton"), x)[1](gradients)


def gradients(x, weight, *gradients):
    return jax.vjp(lambda *given: normed_stream(*given, implementation="triton"), x, weight)[1](gradients)


def arguments(size: int):
    x = jax.ShapeDtypeStruct((ROWS, LENGTH, size), jnp.bfloat16)
    return x, jax.ShapeDtypeStruct((size,), jnp.bfloat16), x, x


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("size", [1024, 2880, 4096, 5120, 8192])
def test_rows_stay_in_registers(capability, size, tmp_path):
    """Nothing spills on Hopper, and a thread reads and writes 16 bytes at once."""
    jax.clear_caches()
    with targets.compile_for(capability), recorded_calls() as calls:
        for run in (gradient, gradients):
            jax.eval_shape(run, *arguments(size))
    assert len(calls) == 2
    for call in calls:
        compiled = compile_call(call, capability, tmp_path)
        assert compiled.spilled_bytes == 0 or capability != (9, 0)
        vector = re.findall(r"(ld|st)\.global(?:\.[\w:]+)*\.v4\.b32", compiled.ptx)
        assert vector.count("ld") >= 3 and vector.count("st") >= 1


def test_every_array_is_divided_between_devices():
    """The weight's gradient is added up over devices."""
    jax.clear_caches()
    with targets.compile_for((9, 0)), recorded_calls() as calls, use_abstract_mesh(AbstractMesh((ROWS,), ("data",))):
        jax.eval_shape(gradients, *arguments(1024))
    for _, types, _ in calls:
        assert {array.shape[0] for array in types if len(array.shape) > 2} == {1}


@pytest.mark.full
@pytest.mark.parametrize("shape", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_a_layer_computes_the_gradients_of_its_norms_by_a_kernel_each(shape):
    """Beside it the backward reads the stream of a norm for the sums of its squares and for the gradients of adapters'
    A; only experts read the normed rows, which XLA makes once for them."""
    text = step_peaks(H200, shape, 2, 8, 2048, 16, None, "keep").text
    hidden, experts = {"llama-3.1-8b": (4096, False), "qwen3-30b-a3b": (2048, True)}[shape]
    backward = [line for line in text[text.index("ENTRY") :].splitlines() if "jit(layer_backward)" in line]
    norms = [line for line in backward if "_norm/" in line and 'custom_call_target="triton_kernel_call"' in line]
    assert len(norms) == 2 * 2 - 1  # the first layer reads frozen embeddings
    sums = [line for line in backward if re.search(r"= \(?f32\[8,2048\]\S* fusion", line) and "reduce" in line]
    assert len(sums) == (2 if experts else 2 * 2)
    normed = [line for line in backward if re.search(rf"= bf16\[8,2048,{hidden}\]\S* fusion", line)]
    assert len(normed) == (2 if experts else 0)
