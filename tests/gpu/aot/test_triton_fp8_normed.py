"""The Triton kernel that norms rows, rounds them to e4m3 and multiplies them by adapters' A, for every GPU that
multiplies in FP8, and what it takes from a layer's forward on an H200."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh

from jaxtune.pallas import dispatch, targets
from jaxtune.pallas.formats import FP8
from jaxtune.pallas.formats.fp8 import ROW, TILE
from jaxtune.pallas.quant_matmul import LoraWeights, normed_matmul
from jaxtune.pallas.quant_matmul.fp8_product import NormRounding, normed_operand
from tests.gpu.aot.target import H200
from tests.gpu.aot.triton_compiler import SHARED_MEMORY_KB, compile_call, recorded_calls

GPUS = [capability for capability in SHARED_MEMORY_KB if capability >= (8, 9)]
LLAMA, GEMMA = NormRounding(1e-5, 0.0, False), NormRounding(1e-6, 1.0, True)
HOPPER = (9, 0)


def arguments(size: int, rank: int, rows: int = 4096):
    """(x, the norm's weight, a)."""
    a = jax.ShapeDtypeStruct((rank, size), jnp.float32) if rank else None
    return jax.ShapeDtypeStruct((rows, size), jnp.bfloat16), jax.ShapeDtypeStruct((size,), jnp.bfloat16), a


def traced(blocks: bool, rounding: NormRounding, given, capability):
    """(the shapes that normed_operand returns, the recorded calls of kernels)."""
    jax.clear_caches()
    with targets.compile_for(capability), recorded_calls() as calls:
        found = jax.eval_shape(lambda x, weight, a: normed_operand(x, weight, rounding, a, blocks), *given)
    return found, calls


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize(("size", "rank"), [(4096, 48), (4096, 16), (8192, 64), (2688, 32), (4096, 0)])
@pytest.mark.parametrize("blocks", [True, False])
def test_rows_are_read_ahead_and_nothing_spills(size, rank, blocks, capability, tmp_path):
    """By 16 bytes a thread, while rows before them are multiplied by tensor cores; codes are written 8 at once."""
    rounding = GEMMA if rank == 16 else LLAMA
    found, [call] = traced(blocks, rounding, arguments(size, rank), capability)
    (codes, scales), made = found
    assert codes.shape == (4096, size) and codes.dtype == jnp.float8_e4m3fn
    assert scales.shape == (4096, size // 128 if blocks else 1)
    assert made is None if not rank else made.inner.shape == (4096, rank) and made.of_rows.shape == (4096, 1)
    kernel = compile_call(call, capability, tmp_path)
    assert kernel.spilled_bytes == 0 and 2 * (kernel.shared_bytes + 1024) <= SHARED_MEMORY_KB[capability] * 1024
    assert re.search(r"st\.global(?:\.[\w:]+)*\.v2\.b32", kernel.ptx) and not re.search(
        r"st\.global\S*\.b8", kernel.ptx
    )
    assert "div." not in kernel.ptx
    if rank:
        assert re.search("wgmma.mma_async" if capability == HOPPER else r"mma\.sync", kernel.ptx)
        assert len(re.findall(r"cp\.async\.cg\.shared\.global\S* .*0x10", kernel.ptx)) >= 8
    if rank and capability == HOPPER:
        # Tensor cores have ended before a tile that they read is written over.
        order = re.findall(r"wgmma\.(?:commit|wait_group)|bar\.sync|cp\.async\.cg", kernel.ptx)
        after = order[order.index("wgmma.commit") + 1 :]
        assert after[:3] == ["wgmma.wait_group", "bar.sync", "cp.async.cg"]
        assert re.search(r"wgmma\.wait_group\S*\s+0;", kernel.ptx)


def test_rows_of_an_odd_number_of_64s_are_read_by_64s(tmp_path):
    _, [call] = traced(False, LLAMA, arguments(576, 48), HOPPER)
    assert call[2]["COLUMNS"] == 64
    kernel = compile_call(call, HOPPER, tmp_path)
    assert kernel.spilled_bytes == 0 and "wgmma.mma_async" in kernel.ptx
    assert 2 * (kernel.shared_bytes + 1024) <= SHARED_MEMORY_KB[HOPPER] * 1024


def test_rows_are_divided_between_devices():
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    with use_abstract_mesh(mesh):
        ((codes, scales), made), [(_, types, _)] = traced(True, LLAMA, arguments(1024, 16), HOPPER)
    assert codes.shape == (4096, 1024) and scales.shape == (4096, 8)
    assert made.inner.shape == (4096, 16) and made.of_rows.shape == (4096, 1)
    assert types[0].shape == (2048, 1024) and types[2].shape == (16, 1024)


@pytest.mark.parametrize("block", [TILE, ROW])
def test_no_normed_rows_are_written(block):
    """Of query, key and value, each with an adapter: the kernel and three products, and between them nothing that has a
    row's length, nor copies of codes or scales."""
    outs = 4096, 1024, 1024

    def forward(x, norm, weights, sides):
        loras = [LoraWeights(a, b, scale=2.0) for a, b in sides]
        return normed_matmul(x, norm, weights, loras, [None] * 3, fp8=True)

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    weights = [jax.eval_shape(lambda a: FP8.encode(a, block), array(out, 4096, dtype=jnp.bfloat16)) for out in outs]
    sides = [(array(16, 4096), array(out, 16)) for out in outs]
    given = array(4096, 4096, dtype=jnp.bfloat16), array(4096), weights, sides
    where = H200.sharding()
    given = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), given)
    with H200.lowering():
        program = jax.jit(forward).lower(*given).compile()
    assert dispatch.record["normed_to_fp8"] == ("triton", {})
    text = program.as_text()
    assert text.count('custom_call_target="triton_kernel_call"') == 1
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 3
    entry = text[text.index("ENTRY") :]
    made = re.findall(
        r"= (?:f8e4m3fn\[4096,4096\]|bf16\[4096,4096\]|f32\[32,4096\]|f32\[4096,32\])\S* ([\w-]+)\(", entry
    )
    assert set(made) <= {"get-tuple-element", "parameter", "custom-call"} and made.count("custom-call") == 1
