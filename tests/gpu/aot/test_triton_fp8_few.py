"""The kernels of few rows over FP8 products pass Triton's compiler and the assembler for Hopper."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import dispatch
from jaxtune.pallas.formats import FP8
from jaxtune.pallas.formats.fp8 import ROW, TILE
from jaxtune.pallas.quant_matmul import fp8_few
from tests.gpu.aot.triton_compiler import SHARED_MEMORY_KB, compile_call, recorded_calls

HOPPER = (9, 0)


def call_of(tokens: int, sizes, columns: int, block):
    """The recorded call of a product of so many rows."""
    activation = "silu" if len(sizes) == 2 else None
    with dispatch.compile_for(HOPPER), recorded_calls() as calls:
        weights = [
            jax.eval_shape(functools.partial(FP8.encode, block=block), jax.ShapeDtypeStruct((n, columns), jnp.bfloat16))
            for n in sizes
        ]
        assert fp8_few.refusal(weights, jnp.bfloat16, tokens, activation) is None
        x = fp8_few.Coded(*fp8_few.coded_types(tokens, columns, block == TILE))
        jax.eval_shape(functools.partial(fp8_few.product, activation=activation), x, weights)
    [call] = calls
    return call


@pytest.mark.parametrize("tokens", [1, 16, 64, 128, 256])
@pytest.mark.parametrize("sizes", [(4096,), (4096, 1024, 1024), (14336, 14336)], ids=["one", "few", "gated"])
@pytest.mark.parametrize("block", [ROW, TILE], ids=["rows", "tiles"])
def test_the_product_fits(block, sizes, tokens, tmp_path):
    """Copied 16 bytes at a time, multiplied by wgmma in e4m3, and nothing spills."""
    kernel = compile_call(call_of(tokens, sizes, 4096, block), HOPPER, tmp_path)
    assert kernel.shared_bytes <= SHARED_MEMORY_KB[HOPPER] * 1024 and kernel.spilled_bytes == 0
    assert re.search(r"wgmma\.mma_async\S*\.f32\.e4m3\.e4m3", kernel.ptx) and "mma.sync" not in kernel.ptx
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global .*?, (0x)?(\w+)", kernel.ptx)
    sixteens = {size for _, size in copies if size == "10"}
    assert sixteens


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("columns", [4096, 14336])
def test_the_rounding_fits(columns, blocks, tmp_path):
    with dispatch.compile_for(HOPPER), recorded_calls() as calls:
        x = jax.ShapeDtypeStruct((64, columns), jnp.bfloat16)
        jax.eval_shape(functools.partial(fp8_few.rounded, blocks=blocks), x)
    [call] = calls
    kernel = compile_call(call, HOPPER, tmp_path)
    assert kernel.spilled_bytes == 0 and "cvt.rn.satfinite.e4m3x2.f32" in kernel.ptx
