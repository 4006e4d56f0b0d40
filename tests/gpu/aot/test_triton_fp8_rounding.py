"""The Triton kernels that round rows to FP8 lower, pass the compiler and the assembler on every GPU that multiplies in
FP8, and keep rows in registers; a layer's backward has nothing else to do for scales of 128 x 128."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh

from jaxtune.pallas import targets
from jaxtune.pallas.formats import FP8
from jaxtune.pallas.formats.fp8 import TILE
from jaxtune.pallas.quant_matmul import fp8_product, fp8_rounding, quant_matmul
from tests.gpu.aot.target import H200
from tests.gpu.aot.triton_compiler import SHARED_MEMORY_KB, compile_call, recorded_calls

GPUS = [capability for capability in SHARED_MEMORY_KB if capability >= (8, 9)]


def arrays(*widths: int, rows: int = 4096):
    return [jax.ShapeDtypeStruct((rows, width), jnp.bfloat16) for width in widths]


def vector(size: int, dtype=jnp.float32, lead: tuple[int, ...] = ()):
    return jax.ShapeDtypeStruct((*lead, size), dtype)


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize(
    ("widths", "scaled"),
    [
        ((4096,), False),
        ((14336,), False),
        ((2880,), True),
        ((4096, 1024, 1024), True),
        ((8192,) * 2, True),
        ((14336,) * 2, True),
        ((25600,) * 2, True),
    ],
)
@pytest.mark.parametrize("blocks", [False, True])
def test_rows_stay_in_registers(widths, scaled, blocks, capability, tmp_path):
    """Numbers are read and codes written by vectors; nothing spills, but two registers of the longest rows on 12.0."""
    jax.clear_caches()
    factors = vector(sum(widths)) if scaled and not blocks else None
    with targets.compile_for(capability), recorded_calls() as calls:
        codes, scale = jax.eval_shape(lambda *given: fp8_product.side_by_side(*given, blocks), arrays(*widths), factors)
    assert codes.shape == (4096, -(-sum(widths) // 128) * 128 if blocks else sum(widths))
    assert scale.shape == (4096, codes.shape[1] // 128 if blocks else 1)
    [call] = calls
    compiled = compile_call(call, capability, tmp_path)
    assert compiled.spilled_bytes <= (8 if sum(widths) == 51200 and capability == (12, 0) else 0)
    assert compiled.shared_bytes < 5000
    assert re.search(r"ld\.global\S*\.v[24]\.b32", compiled.ptx)
    assert not re.search(r"ld\.global\S*\.b16|st\.global\S*\.b8", compiled.ptx)


@pytest.mark.parametrize(("width", "scaled", "blocks"), [(2048, True, False), (1536, True, False), (768, False, True)])
def test_rows_of_experts(width, scaled, blocks, tmp_path):
    jax.clear_caches()
    factors = vector(width, lead=(128,)) if scaled else None
    tokens, experts = vector(8192, jnp.int32), vector(64, jnp.int32)
    with targets.compile_for((9, 0)), recorded_calls() as calls:
        jax.eval_shape(
            lambda *given: fp8_rounding.rounded(*given, blocks=blocks), arrays(width), factors, experts, tokens
        )
    [call] = calls
    assert compile_call(call, (9, 0), tmp_path).spilled_bytes == 0


def test_rows_are_divided_between_devices():
    jax.clear_caches()
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    with targets.compile_for((9, 0)), recorded_calls() as calls, use_abstract_mesh(mesh):
        codes, scale = jax.eval_shape(lambda given: fp8_product.side_by_side(given, None, True), arrays(1024))
    assert codes.shape == (4096, 1024) and scale.shape == (4096, 8)
    [(_, types, _)] = calls
    assert types[0].shape == (2048, 1024)


def test_scales_of_blocks_are_neither_copied_nor_concatenated():
    """The kernels write codes side by side, and scales as the product takes them."""

    def step(x, weights, douts):
        outputs, pullback = jax.vjp(lambda x: quant_matmul(x, weights, fp8=True), x)
        return outputs, pullback(douts)

    where = H200.sharding()
    weights = [jax.eval_shape(lambda a: FP8.encode(a, TILE), arrays(1024, rows=size)[0]) for size in (2048, 1024)]
    given = arrays(1024)[0], weights, tuple(arrays(2048, 1024))
    given = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), given)
    with H200.lowering():
        text = str(jax.jit(step).lower(*given).compile().as_text())
    assert text.count('custom_call_target="triton_kernel_call"') == 2
    entry = text[text.index("ENTRY") :]
    made = re.findall(r"= (?:f8e4m3fn\[4096,\d+\]|f32\[\d+,4096\]|f32\[4096,\d+\])\S* ([\w-]+)\(", entry)
    assert len(made) == 4 and set(made) == {"get-tuple-element"}
