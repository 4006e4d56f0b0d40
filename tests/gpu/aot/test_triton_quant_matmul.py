"""The Triton kernels over four-bit weights pass Triton's compiler and assembler, and fit, on every GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import dispatch
from jaxtune.pallas.formats import NF4
from jaxtune.pallas.quant_matmul import triton
from tests.gpu.aot.triton_compiler import GPUS, SHARED_MEMORY_KB, compile_call, recorded_calls, target

OUTER, INNER = 1000, 4096


def weight_like(where=None):
    shapes = jax.eval_shape(lambda: NF4.encode(jnp.zeros((OUTER, INNER), jnp.bfloat16)))
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), shapes)


@pytest.mark.parametrize("capability", GPUS)
def test_kernels_fit(capability, tmp_path):
    def run(weight):
        x = jnp.zeros((16, INNER), jnp.bfloat16)
        return triton.dequantize(weight), triton.small_matmul(x[:1], weight), triton.small_matmul(x, weight)

    with dispatch.compile_for(capability), recorded_calls() as calls:
        jax.eval_shape(run, weight_like())
    compiled = {kernel.__name__: compile_call((kernel, *rest), capability, tmp_path) for kernel, *rest in calls}
    assert list(compiled) == ["dequantise_kernel", "vector_kernel", "matrix_kernel"]
    for kernel in compiled.values():
        assert kernel.shared_bytes <= SHARED_MEMORY_KB[capability] * 1024
        assert kernel.spilled_bytes <= 64, kernel.name
    decode = compiled["dequantise_kernel"].ptx
    # The scale is rounded between product and sum, and what goes to memory goes in whole words.
    assert "fma" not in decode and "mul.rn.f32" in decode and "add.rn.f32" in decode
    assert "st.global.v4.b32" in decode
    assert "mma" in compiled["matrix_kernel"].ptx


def test_they_lower_through_jax_triton_and_compile():
    gpu = target((8, 9))
    where = gpu.sharding()
    x = jax.ShapeDtypeStruct((4, INNER), jnp.bfloat16, sharding=where)
    with gpu.lowering():
        step = jax.jit(lambda x, w: (triton.small_matmul(x, w), triton.dequantize(w)))
        text = step.lower(x, weight_like(where)).compile().as_text()
    assert text.count('custom_call_target="triton_kernel_call"') == 2
