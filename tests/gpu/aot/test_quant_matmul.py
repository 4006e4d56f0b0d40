"""The kernels of quant_matmul and 8-bit Adam lower, pass ptxas without spilling, and stand where they should."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import dispatch
from jaxtune.pallas.quant_matmul import NF4, mosaic, quant_matmul
from jaxtune.train.adam8 import scale_by_adam_8bit
from tests.gpu.aot.target import H200

KERNEL = 'custom_call_target="mosaic_gpu_v2"'


def compiled(function, *arguments):
    where = H200.sharding()
    arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), arguments)
    with H200.lowering():
        return jax.jit(function).lower(*arguments).compile()


def packed(rows, columns, double_quant=True):
    array = jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16)
    return jax.eval_shape(lambda a: NF4.encode(a, double_quant), array)


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.fixture
def ptxas(monkeypatch, capfd):
    """Bytes of registers that the assembler spilled, in each function compiled since."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")

    def report():
        captured = capfd.readouterr()
        text = captured.out + captured.err
        assert text.count("Compiling entry function") == 1
        return [int(number) for number in re.findall(r"(\d+) bytes spill", text)]

    return report


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dequantising(dtype, double_quant, ptxas):
    program = compiled(lambda w: mosaic.dequantize(w, dtype), packed(1024, 4096, double_quant))
    assert program.as_text().count(KERNEL) == 1
    assert program.memory_analysis().temp_size_in_bytes == 0  # nothing beside the codes and the result
    assert not any(ptxas())


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("double_quant", [True, False])
def test_small_product(tokens, double_quant, ptxas):
    program = compiled(mosaic.small_matmul, array(tokens, 4096), packed(1024, 4096, double_quant))
    assert program.as_text().count(KERNEL) == 1
    assert program.memory_analysis().temp_size_in_bytes == 0
    assert not any(ptxas())


def test_both_directions_decode_by_the_kernel():
    def step(x, weights, dout):
        outputs, pullback = jax.vjp(lambda x: quant_matmul(x, weights), x)
        return pullback((dout, *outputs[1:]))

    program = compiled(step, array(256, 1024), [packed(2048, 1024), packed(1024, 1024)], array(256, 2048))
    assert dispatch.record["quant_matmul"] == ("mosaic", {})
    assert program.as_text().count(KERNEL) == 3  # forward of the second (its result is the cotangent), backward of both


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_adam_is_one_kernel(dtype, ptxas):
    """Beside it: the step count and the corrections, no tensor."""
    adam = scale_by_adam_8bit(0.9, 0.999, 1e-8)
    gradient = array(1024, 4096, dtype=dtype)
    program = compiled(adam.update, gradient, jax.eval_shape(adam.init, gradient))
    assert dispatch.record["adamw_8bit"] == ("mosaic", {})
    assert program.as_text().count(KERNEL) == 1
    assert program.memory_analysis().temp_size_in_bytes < 100_000  # the tables
    assert not any(ptxas())
