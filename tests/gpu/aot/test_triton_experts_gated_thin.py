"""The Triton kernels of experts' gated activation with thin products lower, and pass the compiler and the assembler for
Hopper."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import targets
from jaxtune.pallas.gated import RowGate
from jaxtune.pallas.grouped_matmul import gated_thin
from jaxtune.pallas.grouped_matmul.layout import groups_of
from tests.gpu.aot.triton_compiler import SHARED_MEMORY_KB, compile_call, recorded_calls

CAPABILITY = (9, 0)
CLIPPED = RowGate("silu", 7.0, 1.702, interleaved=True)


# Qwen3-30B-A3B and gpt-oss-20b, and others.
@pytest.mark.parametrize(
    ("experts", "size", "rank", "gate"),
    [(128, 768, 16, RowGate("silu")), (32, 2880, 16, CLIPPED), (60, 1408, 8, RowGate("gelu_tanh"))],
    ids=str,
)
def test_sums_stay_in_registers(experts, size, rank, gate, tmp_path):
    """A thread reads and writes 16 bytes at once."""
    jax.clear_caches()
    sizes = jax.ShapeDtypeStruct((experts,), jnp.int32)
    rows = jax.eval_shape(lambda sizes: jnp.zeros(groups_of(sizes, 8 * 16384).rows), sizes).shape[0]
    gate_up, dgated, dinner = (jax.ShapeDtypeStruct((rows, n), jnp.bfloat16) for n in (2 * size, size, 64))
    a, weights = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((experts, rank, size), (rows,)))

    def both(gate_up, weights, a, dgated, dinner, sizes):
        groups = groups_of(sizes, 8 * 16384)
        found = gated_thin.gated_rows_thin(gate_up, weights, a, groups, gate)
        return *found, *gated_thin.gated_rows_thin_backward(gate_up, weights, dgated, dinner, rank, groups, gate)

    with targets.compile_for(CAPABILITY), recorded_calls() as calls:
        jax.eval_shape(both, gate_up, weights, a, dgated, dinner, sizes)
    assert len(calls) == 2
    for call in calls:
        compiled = compile_call(call, CAPABILITY, tmp_path)
        assert compiled.shared_bytes <= SHARED_MEMORY_KB[CAPABILITY] * 1024
        assert compiled.spilled_bytes == 0
        assert re.search(r"wgmma\.mma_async|mma\.sync", compiled.ptx)
        assert len(re.findall(r"st\.global(?:\.[\w:]+)*\.v4\.b32", compiled.ptx)) >= 1
