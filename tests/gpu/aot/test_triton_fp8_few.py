"""The kernels of few rows over FP8 products pass Triton's compiler and the assembler for Hopper."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import targets
from jaxtune.pallas.formats import FP8
from jaxtune.pallas.formats.fp8 import MATRIX, ROW, TILE
from jaxtune.pallas.quant_matmul import LoraWeights, fp8_few
from tests.gpu.aot.triton_compiler import SHARED_MEMORY_KB, compile_call, recorded_calls

HOPPER = (9, 0)


def calls_of(tokens: int, sizes, columns: int, block, rank: int = 0, gated: bool = False, activation: str = "silu"):
    """The recorded calls of a product of so many rows, with adapters one more; gated: of which each row takes its own.
    activation: of two weights.
    """
    activation = activation if len(sizes) == 2 else None
    with targets.compile_for(HOPPER), recorded_calls() as calls:
        weights = [
            jax.eval_shape(functools.partial(FP8.encode, block=block), jax.ShapeDtypeStruct((n, columns), jnp.bfloat16))
            for n in sizes
        ]
        gate = array(tokens, rank) if gated else None
        loras = [LoraWeights(array(rank, columns), array(n, rank), scale=2.0, gate=gate) for n in sizes if rank]
        assert fp8_few.refusal(weights, jnp.bfloat16, tokens, activation, loras) is None
        x = fp8_few.Coded(*fp8_few.coded_types(tokens, columns, block == TILE))
        run = functools.partial(fp8_few.product, activation=activation)
        jax.eval_shape(
            lambda x, weights, *more: run(x, weights, unrounded=more[0], loras=more[1]),
            x,
            weights,
            array(tokens, columns),
            loras,
        )
    return calls


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


@pytest.mark.parametrize("tokens", [1, 16, 64, 128, 256])
@pytest.mark.parametrize("sizes", [(4096,), (4096, 1024, 1024), (14336, 14336)], ids=["one", "few", "gated"])
@pytest.mark.parametrize("block", [ROW, TILE], ids=["rows", "tiles"])
def test_the_product_fits(block, sizes, tokens, tmp_path):
    """Copied 16 bytes at a time, multiplied by wgmma in e4m3, and nothing spills."""
    [call] = calls_of(tokens, sizes, 4096, block)
    kernel = compile_call(call, HOPPER, tmp_path)
    assert kernel.shared_bytes <= SHARED_MEMORY_KB[HOPPER] * 1024 and kernel.spilled_bytes == 0
    assert re.search(r"wgmma\.mma_async\S*\.f32\.e4m3\.e4m3", kernel.ptx) and "mma.sync" not in kernel.ptx
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global .*?, (0x)?(\w+)", kernel.ptx)
    sixteens = {size for _, size in copies if size == "10"}
    assert sixteens


@pytest.mark.parametrize("rank", [pytest.param(16, marks=pytest.mark.full), 64])
@pytest.mark.parametrize("tokens", [1, 64, pytest.param(128, marks=pytest.mark.full), 256])
@pytest.mark.parametrize("sizes", [(4096,), (4096, 1024, 1024), (14336, 14336)], ids=["one", "few", "gated"])
@pytest.mark.parametrize("block", [ROW, TILE], ids=["rows", "tiles"])
def test_adapters_are_two_kernels(block, sizes, tokens, rank, tmp_path):
    """One for x A^T of all weights; the product with B is in the product's."""
    calls = calls_of(tokens, sizes, 4096, block, rank)
    assert [kernel.__name__ for kernel, *_ in calls] == ["thin_kernel", "few_product_kernel"]
    for call in calls:
        kernel = compile_call(call, HOPPER, tmp_path)
        assert kernel.shared_bytes <= SHARED_MEMORY_KB[HOPPER] * 1024 and kernel.spilled_bytes == 0


@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("tokens", [17, 32])
@pytest.mark.parametrize("sizes", [(4096,), (4096, 1024, 1024), (14336, 14336)], ids=["one", "few", "gated"])
@pytest.mark.parametrize("block", [ROW, MATRIX, TILE], ids=["rows", "matrix", "tiles"])
def test_the_product_of_17_to_32_rows_fits(block, sizes, tokens, rank, tmp_path):
    """With the other activation, and adapters of which each row takes its own."""
    calls = calls_of(tokens, sizes, 4096, block, rank, gated=rank > 0, activation="gelu_tanh")
    assert [kernel.__name__ for kernel, *_ in calls] == ["thin_kernel"] * (rank > 0) + ["few_product_kernel"]
    settings = calls[-1][2]
    assert settings["TOKENS"] == 32 and settings["STRIDE"] == int(block != MATRIX)
    assert settings["ACTIVATION"] == (2 if len(sizes) == 2 else 0)
    assert all(call[2]["GATED"] for call in calls[:-1])
    for call in calls:
        kernel = compile_call(call, HOPPER, tmp_path)
        assert kernel.shared_bytes <= SHARED_MEMORY_KB[HOPPER] * 1024 and kernel.spilled_bytes == 0


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("columns", [4096, 14336])
def test_the_rounding_fits(columns, blocks, tmp_path):
    with targets.compile_for(HOPPER), recorded_calls() as calls:
        x = jax.ShapeDtypeStruct((64, columns), jnp.bfloat16)
        jax.eval_shape(functools.partial(fp8_few.rounded, blocks=blocks), x)
    [call] = calls
    kernel = compile_call(call, HOPPER, tmp_path)
    assert kernel.spilled_bytes == 0 and "cvt.rn.satfinite.e4m3x2.f32" in kernel.ptx
