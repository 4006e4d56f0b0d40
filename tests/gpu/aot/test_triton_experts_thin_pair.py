"""The Triton kernel of the two thin products of the backward of experts' adapters lowers, passes the compiler and the
assembler for Hopper, and takes Mosaic's second pass over the gradient of gate and up."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import targets
from jaxtune.pallas.grouped_matmul import thin_pair
from jaxtune.pallas.grouped_matmul.layout import groups_of
from tests.gpu.aot.triton_compiler import SHARED_MEMORY_KB, compile_call, recorded_calls

CAPABILITY = (9, 0)


def pair(dout, b, inner, sizes):
    return thin_pair.thin_pair(dout, b, inner, groups_of(sizes, 8 * 16384))


# Gate and up of Qwen3-30B-A3B and gpt-oss-20b, and others.
@pytest.mark.parametrize(("experts", "out", "rank"), [(128, 1536, 16), (32, 5760, 16), (32, 5760, 8), (8, 1032, 5)])
def test_sums_stay_in_registers(experts, out, rank, tmp_path):
    """Tiles are read ahead to shared memory, 16 bytes at once."""
    jax.clear_caches()
    sizes = jax.ShapeDtypeStruct((experts,), jnp.int32)
    rows = jax.eval_shape(lambda sizes: jnp.zeros(groups_of(sizes, 8 * 16384).rows), sizes).shape[0]
    dout, inner = (jax.ShapeDtypeStruct((rows, size), jnp.bfloat16) for size in (out, 64))
    b = jax.ShapeDtypeStruct((experts, out, rank), jnp.float32)
    with targets.compile_for(CAPABILITY), recorded_calls() as calls:
        dinner, db = jax.eval_shape(pair, dout, b, inner, sizes)
    assert dinner.shape == (rows, 64) and db.shape == b.shape
    [call] = calls
    compiled = compile_call(call, CAPABILITY, tmp_path)
    assert compiled.shared_bytes <= SHARED_MEMORY_KB[CAPABILITY] * 1024
    assert compiled.spilled_bytes == 0 and "wgmma.mma_async" in compiled.ptx
    assert len(re.findall(r"cp\.async\.cg\.shared\.global\S* .*0x10", compiled.ptx)) >= 16
