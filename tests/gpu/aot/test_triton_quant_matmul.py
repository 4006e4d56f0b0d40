"""The Triton kernels over weights in few bits pass Triton's compiler and assembler, and fit, on every GPU."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import targets
from jaxtune.pallas.formats import FP8, NF4
from jaxtune.pallas.formats.fp8 import ROW, TILE
from jaxtune.pallas.grouped_matmul import GroupedLora, grouped_matmul
from jaxtune.pallas.grouped_matmul.layout import groups_of
from jaxtune.pallas.quant_matmul import fp8_product, quant_matmul, triton
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

    with targets.compile_for(capability), recorded_calls() as calls:
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


@pytest.mark.parametrize("block", [ROW, TILE])
@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 0)])
def test_products_of_codes_fit(capability, block, tmp_path):
    """One kernel, for linears and for experts, on GPUs that multiply in FP8, B200 among them; with adapters, one
    of them beyond the 64 columns that the kernel takes."""
    tokens, inner, outer, experts = 300, 1024, 512, 4

    def run(x, weight, u, side):
        coded = fp8_product.rounded(x, block == TILE)
        return fp8_product.forward(coded, weight, (u, side), jnp.bfloat16, "triton")

    def of_experts(x, weight, a, b, sizes):
        groups = groups_of(sizes, tokens)
        return grouped_matmul(x, weight, groups, GroupedLora(a, b), fp8=True, implementation="triton")

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def encoded(*shape):
        return jax.eval_shape(lambda a: FP8.encode(a, block), array(*shape))

    sizes = array(experts, dtype=jnp.int32)
    rows = jax.eval_shape(lambda sizes: groups_of(sizes, tokens), sizes).rows
    with targets.compile_for(capability), recorded_calls() as calls:
        for rank in (16, 96):
            jax.eval_shape(run, array(tokens, inner), encoded(outer, inner), array(tokens, rank), array(outer, rank))
        sides = array(experts, 16, inner), array(experts, outer, 16)
        jax.eval_shape(of_experts, array(rows, inner), encoded(experts, outer, inner), *sides, sizes)
    found = [call for call in calls if call[2].get("BLOCK") == (128 if block == TILE else 0)]
    assert [(settings["GROUPED"], settings["RANK"]) for *_, settings in found] == [(0, 16), (0, 64), (1, 16)]
    for call in found:
        kernel = compile_call(call, capability, tmp_path)
        assert kernel.shared_bytes <= {(10, 0): 227, **SHARED_MEMORY_KB}[capability] * 1024
        assert kernel.spilled_bytes == 0
        # tcgen05 names the kind of its operands, wgmma and mma their types.
        assert re.search(r"(mma|wgmma)\S*e4m3|tcgen05\.mma\S*kind::f8f6f4", kernel.ptx)


def test_they_lower_through_jax_triton_and_compile():
    gpu = target((8, 9))
    where = gpu.sharding()
    x = jax.ShapeDtypeStruct((4, INNER), jnp.bfloat16, sharding=where)
    with gpu.lowering():
        step = jax.jit(lambda x, w: (triton.small_matmul(x, w), triton.dequantize(w)))
        text = step.lower(x, weight_like(where)).compile().as_text()
    assert text.count('custom_call_target="triton_kernel_call"') == 2


@pytest.mark.parametrize(("tokens", "shape"), [(64, (14336, 4096)), (17, (4096, 14336))])
def test_products_of_some_dozen_rows_fit_an_h200_and_decode_no_weight(tokens, shape, tmp_path):
    gpu = target((9, 0))
    where = gpu.sharding()
    like = jax.eval_shape(lambda: NF4.encode(jnp.zeros(shape, jnp.bfloat16)))
    weight = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), like)
    x = jax.ShapeDtypeStruct((tokens, shape[1]), jnp.bfloat16, sharding=where)
    with gpu.lowering(), recorded_calls() as calls:
        text = jax.jit(lambda x, weight: quant_matmul(x, [weight])[0]).lower(x, weight).compile().as_text()
    assert text.count('custom_call_target="triton_kernel_call"') == 1 and "mosaic_gpu" not in text
    (call,) = calls
    compiled = compile_call(call, (9, 0), tmp_path)
    assert compiled.shared_bytes <= SHARED_MEMORY_KB[9, 0] * 1024 and compiled.spilled_bytes == 0
    assert "wgmma" in compiled.ptx and "lop3.b32" in compiled.ptx
