"""The Triton attention kernels lower through jax-triton, pass its compiler and assembler, and fit, on every GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import dispatch, targets
from jaxtune.pallas.attention import attention_backward, attention_forward, packed_layout
from tests.gpu.aot.triton_compiler import GPUS, SHARED_MEMORY_KB, compile_call, recorded_calls, target

ROWS, LENGTH, HEADS, KV_HEADS = 2, 1024, 8, 2
CASES = [
    *((capability, dim, {}) for capability in SHARED_MEMORY_KB for dim in (64, 128)),
    *((capability, dim, {}) for capability in ((8, 9), (9, 0)) for dim in (80, 96, 192, 256)),
    *((capability, 256, {}) for capability in ((8, 0), (12, 0))),
    ((8, 0), 512, {}),
    *(((8, 6), dim, {"window": 100, "soft_cap": 30.0}) for dim in (96, 128, 256)),
    ((8, 6), 512, {"window": 100, "soft_cap": 30.0}),
    *(
        (capability, dim, {"window": 100, "runs": True})
        for capability in ((8, 0), (8, 9), (9, 0))
        for dim in (256, 512)
    ),
]


def step(query, key, value, dout, segment_ids, runs=False, **features):
    layout = packed_layout(segment_ids.shape, segment_ids)
    layout = layout.with_runs(segment_ids % 2 == 0) if runs else layout
    options = dict(features, scale=query.shape[-1] ** -0.5, implementation="triton")
    out, lse = attention_forward(query, key, value, layout, **options)
    return attention_backward(query, key, value, out, lse, dout, layout, **options)[:3]


def arguments(dim, dtype, where=None):
    shapes = [(ROWS, LENGTH, heads, dim) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=where) for shape in shapes]
    return *arrays, jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32, sharding=where)


@pytest.mark.parametrize(("capability", "dim", "features"), CASES)
def test_kernels_fit(capability, dim, features, tmp_path):
    with targets.compile_for(capability), recorded_calls() as calls:
        jax.eval_shape(lambda *a: step(*a, **features), *arguments(dim, jnp.bfloat16))
    assert [kernel.__name__ for kernel, *_ in calls] == ["forward_kernel", "query_kernel", "key_kernel"]
    for call in calls:
        compiled = compile_call(call, capability, tmp_path)
        assert 0 < compiled.shared_bytes <= SHARED_MEMORY_KB[capability] * 1024, compiled.name
        assert "mma" in compiled.ptx, compiled.name
        assert ("cp.async" in compiled.ptx) == (call[2]["stages"] > 1), compiled.name
        if dim <= 256:  # tiles of wider heads have fewer rows than it takes
            assert ("wgmma" in compiled.ptx) == (capability == (9, 0)), compiled.name
        # A few spilled registers cost little; kilobytes are a tile that is too large. A soft cap has one more number to
        # hold for each score, its slope.
        assert compiled.spilled_bytes <= (1024 if "soft_cap" in features else 512), compiled.name


@pytest.mark.parametrize("capability", GPUS)
def test_a_step_lowers_through_jax_triton_and_compiles(capability):
    gpu = target(capability)
    with gpu.lowering():
        lowered = jax.jit(step).lower(*arguments(64, jnp.float16, where=gpu.sharding()))
        assert dispatch.record["attention"] == ("triton", {})
        text = lowered.compile().as_text()
    assert text.count('custom_call_target="triton_kernel_call"') == 3  # forward, dq, dk with dv
