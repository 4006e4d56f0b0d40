"""The Triton kernel of fp8_gradients.py passes the compiler and the assembler on every GPU that has e4m3, and takes the
other passes over the gradients of a layer's outputs."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, use_abstract_mesh

from jaxtune.pallas import dispatch, meshes, targets
from jaxtune.pallas.formats import FP8
from jaxtune.pallas.formats.fp8 import TILE
from jaxtune.pallas.quant_matmul import LoraWeights, fp8_product, quant_matmul
from tests.gpu.aot.target import H200
from tests.gpu.aot.triton_compiler import GPUS, SHARED_MEMORY_KB, compile_call, recorded_calls

CALL = 'custom_call_target="triton_kernel_call"'
HOPPER = (9, 0)


def arguments(widths, rank: int, tokens: int = 4096, where=None):
    """(gradients of outputs, low-rank inputs, B's)."""
    shaped = functools.partial(jax.ShapeDtypeStruct, sharding=where)
    douts = [shaped((tokens, width), jnp.bfloat16) for width in widths]
    bs = [shaped((width, rank), jnp.float32) for width in widths]
    return douts, shaped((tokens, rank * len(widths)), jnp.bfloat16), bs


def rounded(douts, inner, bs):
    return fp8_product.rounded_gradients(douts, inner, bs, True)


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("widths", [(4096,), (4096, 1024, 1024), (128, 640)])
@pytest.mark.parametrize("rank", [8, 16, 32])
def test_sums_stay_in_registers(capability, widths, rank, tmp_path):
    """Nothing spills, 16 bytes are read at once, and several programs fit a multiprocessor."""
    if capability < (8, 9):
        return  # it has no e4m3
    jax.clear_caches()
    with targets.compile_for(capability), recorded_calls() as calls:
        jax.eval_shape(rounded, *arguments(widths, rank, 16384))
    [call] = calls
    kernel = compile_call(call, capability, tmp_path)
    assert kernel.spilled_bytes == 0
    assert 2 * (kernel.shared_bytes + 1024) <= SHARED_MEMORY_KB[capability] * 1024
    # Codes are written 8 at once, and nothing is divided.
    assert re.search(r"st\.global(?:\.[\w:]+)*\.v2\.b32", kernel.ptx) and "div." not in kernel.ptx
    if capability == HOPPER:  # which reads tiles ahead, and multiplies them where they were read to
        assert "wgmma.mma_async" in kernel.ptx
        assert len(re.findall(r"cp\.async\.cg\.shared\.global\S* .*0x10", kernel.ptx)) >= 16
        # Both products have ended before a tile that they read is written over.
        order = re.findall(r"wgmma\.(?:commit|wait_group)|bar\.sync|cp\.async\.cg", kernel.ptx)
        in_step = [each for each in order[order.index("wgmma.commit") :] if each != "bar.sync"]
        assert in_step[:5] == ["wgmma.commit", "wgmma.wait_group"] * 2 + ["cp.async.cg"]
        last = len(order) - 1 - order[::-1].index("wgmma.commit")
        assert order[last + 1 : last + 3] == ["wgmma.wait_group", "bar.sync"]
        assert set(re.findall(r"wgmma\.wait_group\S*\s+(\d+);", kernel.ptx)) == {"0"}
    else:
        assert re.search(r"ld\.global(?:\.[\w:]+)*\.v4\.b32|cp\.async\.cg", kernel.ptx)


def test_tokens_are_divided_between_devices():
    jax.clear_caches()
    with targets.compile_for(HOPPER), recorded_calls() as calls, use_abstract_mesh(AbstractMesh((2,), ("data",))):
        (codes, scales), products, dbs = jax.eval_shape(meshes.on_any_mesh(rounded), *arguments((1024, 512), 16))
    assert codes.shape == (4096, 1536) and scales.shape == (4096, 12) and products.shape == (4096, 32)
    assert [db.shape for db in dbs] == [(1024, 16), (512, 16)]
    [(_, types, _)] = calls
    assert [array.shape for array in types[:2]] == [(2048, 1024), (2048, 512)]


@pytest.mark.parametrize("refused", [{"width": 1032}, {"rank": 48}, {"tokens": 1024}, {"dtype": jnp.float32}])
def test_other_calls_round_and_multiply_apart(refused):
    width, rank, tokens, dtype = ({"width": 1024, "rank": 16, "tokens": 4096, "dtype": jnp.bfloat16} | refused).values()
    douts, inner, bs = arguments((width,), rank, tokens)
    with targets.compile_for(HOPPER):
        assert jax.eval_shape(rounded, *arguments((1024,), 16)) is not None
        given = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, dtype), (douts, inner))
        assert jax.eval_shape(rounded, *given, bs) is None
        assert jax.eval_shape(lambda *of: fp8_product.rounded_gradients(*of, False), douts, inner, bs) is None


def test_the_backward_of_weights_that_share_x_reads_each_gradient_once():
    """By one call for all of them; nothing is copied."""
    shaped = functools.partial(jax.ShapeDtypeStruct, sharding=H200.sharding())
    widths, tokens, rank = (4096, 1024, 1024), 4096, 16
    x, douts = shaped((tokens, 4096), jnp.bfloat16), [shaped((tokens, size), jnp.bfloat16) for size in widths]
    like = jax.eval_shape(lambda w: FP8.encode(w, TILE), shaped((4096, 4096), jnp.bfloat16))
    weights = [
        jax.tree.map(lambda part, size=size: shaped((part.shape[0] * size // 4096, part.shape[1]), part.dtype), like)
        for size in widths
    ]
    pairs = [(shaped((rank, 4096), jnp.float32), shaped((size, rank), jnp.float32)) for size in widths]

    def backward(x, weights, pairs, douts):
        def outputs(x, pairs):
            return quant_matmul(x, weights, [LoraWeights(*pair, scale=2.0) for pair in pairs], fp8=True)

        return jax.vjp(outputs, x, pairs)[1](tuple(douts))

    with H200.lowering():
        text = jax.jit(backward).lower(x, weights, pairs, douts).compile().as_text()
    assert dispatch.record["gradients_to_fp8"] == ("triton", {})
    calls = [line for line in text[text.index("ENTRY") :].splitlines() if CALL in line]
    ours = [line for line in calls if f"f8e4m3fn[{tokens},6144]" in line.split("custom-call(")[0]]
    assert len(ours) == 1 and len(calls) == 1
    assert not re.search(rf"= bf16\[{tokens},(4096|1024)\]\S* copy\(", text)
