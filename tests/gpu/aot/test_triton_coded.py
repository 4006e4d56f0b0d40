"""The kernel of few rows over codes passes Triton's compiler and the assembler for Hopper."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import targets
from jaxtune.pallas.formats import FP8, MXFP4, NVFP4
from jaxtune.pallas.formats.fp8 import MATRIX, ROW, TILE
from jaxtune.pallas.formats.int8 import Int8
from jaxtune.pallas.quant_matmul import LoraWeights, few_product
from tests.gpu.aot.triton_compiler import SHARED_MEMORY_KB, compile_call, recorded_calls

HOPPER = (9, 0)
FORMATS = {
    "fp8 rows": lambda array: FP8.encode(array, ROW),
    "fp8 matrix": lambda array: FP8.encode(array, MATRIX),
    "fp8 tiles": lambda array: FP8.encode(array, TILE),
    "int8": Int8.encode,
    "nvfp4": NVFP4.encode,
    "mxfp4": MXFP4.encode,
}


@pytest.mark.parametrize("rank", [16, pytest.param(64, marks=pytest.mark.full)])
@pytest.mark.parametrize(("tokens", "gated"), [(1, False), (16, False), (16, True)])
@pytest.mark.parametrize("sizes", [(4096, 1024, 1024), (14336, 14336)], ids=["few", "gated"])
@pytest.mark.parametrize("name", ["fp8 rows", "nvfp4", pytest.param("int8", marks=pytest.mark.full)])
def test_adapters_are_one_kernel_more(name, sizes, tokens, gated, rank, tmp_path):
    """x A^T of all weights; the product with B is in that with the codes, before the activation. gated: each row has
    its own, beside the other activation."""
    x = jax.ShapeDtypeStruct((tokens, 4096), jnp.bfloat16)
    activation = ("gelu_tanh" if gated else "silu") if len(sizes) == 2 else None
    with targets.compile_for(HOPPER), recorded_calls() as calls:
        weights = [jax.eval_shape(FORMATS[name], jax.ShapeDtypeStruct((size, 4096), jnp.bfloat16)) for size in sizes]
        shapes = [((rank, 4096), (size, rank)) for size in sizes]
        gate = jax.ShapeDtypeStruct((tokens, rank), jnp.float32) if gated else None
        loras = [
            LoraWeights(*(jax.ShapeDtypeStruct(side, jnp.float32) for side in sides), gate=gate) for sides in shapes
        ]
        run = functools.partial(few_product, activation=activation)
        out = jax.eval_shape(lambda x, weights, loras: run(x, weights, loras=loras), x, weights, loras)
    assert out.shape == (tokens, sizes[0] if activation else sum(sizes))
    assert [kernel.__name__ for kernel, *_ in calls] == ["thin_kernel", "coded_kernel"]
    for call in calls:
        kernel = compile_call(call, HOPPER, tmp_path)
        assert kernel.shared_bytes <= SHARED_MEMORY_KB[HOPPER] * 1024 and kernel.spilled_bytes == 0


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("sizes", [(4096,), (4096, 1024, 1024), (14336, 14336)], ids=["one", "few", "gated"])
@pytest.mark.parametrize(
    ("name", "columns"),
    [
        *((name, 4096) for name in FORMATS),
        *(pytest.param(n, 3840, marks=pytest.mark.full) for n in FORMATS if "tile" not in n),
    ],
)
def test_the_kernel_fits(name, columns, sizes, tokens, tmp_path):
    """Copied 16 bytes at a time, multiplied by mma, and nothing spills."""
    x = jax.ShapeDtypeStruct((tokens, columns), jnp.bfloat16)
    activation = "silu" if len(sizes) == 2 else None
    with targets.compile_for(HOPPER), recorded_calls() as calls:
        weights = [jax.eval_shape(FORMATS[name], jax.ShapeDtypeStruct((size, columns), jnp.bfloat16)) for size in sizes]
        jax.eval_shape(functools.partial(few_product, activation=activation), x, weights)
    [call] = calls
    kernel = compile_call(call, HOPPER, tmp_path)
    assert kernel.shared_bytes <= SHARED_MEMORY_KB[HOPPER] * 1024 and kernel.spilled_bytes == 0
    assert "wgmma" not in kernel.ptx and "shfl" not in kernel.ptx
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global .*?, (0x)?(\w+)", kernel.ptx)
    assert copies and {size for _, size in copies} == {"10"}
    assert "ldmatrix" in kernel.ptx or name in ("nvfp4", "mxfp4")
