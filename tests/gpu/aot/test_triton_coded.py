"""The kernel of few rows over codes passes Triton's compiler and the assembler for Hopper, and keeps its order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import dispatch
from jaxtune.pallas.formats import FP8, MXFP4, NVFP4
from jaxtune.pallas.formats.fp8 import ROW, TILE
from jaxtune.pallas.formats.int8 import Int8
from jaxtune.pallas.quant_matmul import quant_matmul
from tests.gpu.aot.triton_compiler import SHARED_MEMORY_KB, compile_call, recorded_calls

HOPPER = (9, 0)
FORMATS = {
    "fp8 rows": (lambda array: FP8.encode(array, ROW), 4),
    "fp8 tiles": (lambda array: FP8.encode(array, TILE), 4),
    "int8": (Int8.encode, 4),
    "nvfp4": (NVFP4.encode, 8),
    "mxfp4": (MXFP4.encode, 8),
}


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("sizes", [(4096, 1024, 1024), (14336, 14336)], ids=["few", "many"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_kernel_fits(name, sizes, tokens, tmp_path):
    """Columns are permuted for operands of which a thread has `width` numbers in a row, multiplied by mma."""
    encode, width = FORMATS[name]
    arrays = [jax.ShapeDtypeStruct((size, 4096), jnp.bfloat16) for size in sizes]
    with dispatch.compile_for(HOPPER), recorded_calls() as calls:
        weights = [jax.eval_shape(encode, array) for array in arrays]
        jax.eval_shape(quant_matmul, jax.ShapeDtypeStruct((tokens, 4096), jnp.bfloat16), weights)
    [call] = calls
    kernel = compile_call(call, HOPPER, tmp_path)
    assert kernel.shared_bytes <= SHARED_MEMORY_KB[HOPPER] * 1024 and kernel.spilled_bytes == 0
    assert kernel.widths == [width] and "wgmma" not in kernel.ptx and "cp.async" in kernel.ptx
