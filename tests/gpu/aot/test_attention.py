"""The Mosaic attention kernels lower, pass ptxas and fit a H200's shared memory, for every feature and head dim."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import dispatch, tuning
from jaxtune.pallas.attention import attention_backward, attention_forward, mosaic, packed_layout
from jaxtune.pallas.attention.tune import candidates
from tests.gpu.aot.target import H200

ROWS, LENGTH, HEADS, KV_HEADS = 2, 1024, 8, 2


@pytest.fixture
def spilled_bytes(monkeypatch, capfd):
    """Bytes of registers that the assembler spilled, in each kernel compiled since."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    return lambda: [int(number) for number in re.findall(r"(\d+) bytes spill stores", "".join(capfd.readouterr()))]


def compile_forward(dim, features, heads=HEADS, sinks=False):
    def forward(query, key, value, segment_ids, *sinks):
        layout = packed_layout((ROWS, LENGTH), segment_ids)
        options = dict(features, scale=dim**-0.5, sinks=sinks[0] if sinks else None)
        return attention_forward(query, key, value, layout, implementation="mosaic", **options)

    where = H200.sharding()

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    query, key = array(ROWS, LENGTH, heads, dim), array(ROWS, LENGTH, KV_HEADS, dim)
    given = [array(heads)] if sinks else []
    with H200.lowering():
        lowered = jax.jit(forward).lower(query, key, key, array(ROWS, LENGTH, dtype=jnp.int32), *given)
        return lowered.compile().as_text()


@pytest.mark.parametrize(
    ("dim", "heads", "change"),
    [
        (64, HEADS, dict(turns=True)),
        (64, HEADS, dict(step=64)),
        (128, HEADS, dict(step=64, stages=4)),
    ],
)
def test_the_forms_of_the_forward_that_the_tuner_tries(dim, heads, change, spilled_bytes):
    blocks = mosaic.FORWARD[dim].as_dict() | dict(turns=False, lean=True, stages=2) | change
    assert mosaic.Blocks(**blocks).as_dict() in candidates("forward", dim)
    with tuning.forced("attention forward", blocks):
        compile_forward(dim, {"window": 100}, heads)
    assert spilled_bytes() == [0]


def passes_over(text, *shape):
    """The lines of a program in which XLA makes an array of this shape, beside the kernels' results."""
    made = [line for line in text.splitlines() if f" = bf16[{','.join(map(str, shape))}]" in line]
    assert made
    return [line for line in made if "get-tuple-element(" not in line and "parameter(" not in line]


@pytest.mark.parametrize("dim", [64, 512])
def test_sinks_take_no_pass_over_the_output(dim, spilled_bytes):
    text = compile_forward(dim, {"window": 128}, sinks=True)
    assert spilled_bytes() == [0]
    assert not passes_over(text, ROWS, LENGTH, HEADS, dim)


# (rows, length, query heads, key heads). The first has so few tiles of keys that dk and dv divide the query heads of a
# key head, and no program has more than one item; the second is that of a model of 8B.
FEW_TILES, WHOLE_MODEL = (ROWS, LENGTH, HEADS, KV_HEADS), (8, 2048, 32, 8)
# Bytes of registers that dq, dk or dv may spill, by shape and head dim. They are addresses and bounds; a program with a
# single item has fewer of them.
SPILLED = {FEW_TILES: {256: 80, 512: 76}, WHOLE_MODEL: {256: 136, 512: 84}}


@pytest.mark.parametrize("dim", [64, 96, 128, 256, 512])
@pytest.mark.parametrize("features", [{}, {"window": 100}, {"soft_cap": 30.0}], ids=["plain", "window", "soft_cap"])
@pytest.mark.parametrize("shape", [FEW_TILES, WHOLE_MODEL], ids=["few_tiles", "8b"])
def test_kernels_compile_for_an_h200(shape, features, dim, spilled_bytes):
    rows, length, heads, kv_heads = shape
    where = H200.sharding()

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    def step(query, key, value, dout, segment_ids):
        layout = packed_layout((rows, length), segment_ids)
        options = dict(features, scale=dim**-0.5)
        out, lse = attention_forward(query, key, value, layout, **options)
        return attention_backward(query, key, value, out, lse, dout, layout, **options)[:3]

    query, key = array(rows, length, heads, dim), array(rows, length, kv_heads, dim)
    with H200.lowering():
        lowered = jax.jit(step).lower(query, key, key, query, array(rows, length, dtype=jnp.int32))
        assert dispatch.record["attention"] == ("mosaic", {})
        text = lowered.compile().as_text()
    # forward, dq, dk with dv, for which heads of 512 have a kernel each
    assert text.count('custom_call_target="mosaic_gpu_v2"') == (4 if dim == 512 else 3)
    if dim >= 256:
        assert max(spilled_bytes()) <= SPILLED[shape][dim]
