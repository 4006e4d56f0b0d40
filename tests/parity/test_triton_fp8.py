"""The Triton product of codes in Triton's interpreter, beside the reference: linears and experts, both scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton_interpreter import interpreted

from jaxtune.pallas import dispatch
from jaxtune.pallas.formats import FP8
from jaxtune.pallas.formats.fp8 import ROW, TILE
from jaxtune.pallas.grouped_matmul import GroupedLora, grouped_matmul
from jaxtune.pallas.grouped_matmul.layout import groups_of
from jaxtune.pallas.quant_matmul import LoraWeights, fp8_product, quant_matmul

RANK = 5


@pytest.fixture(autouse=True)
def few_rows_too(monkeypatch):
    """Kernels round the operands, however few rows they have."""
    monkeypatch.setattr(fp8_product, "_LEAST_ROWS", 1)


def compared(function, dout, *arrays):
    """Results and gradients by Triton's body, beside the reference's."""
    results = []
    for name in ("reference", "triton"):
        with interpreted((8, 9)):
            out, pull = jax.vjp(lambda *arrays, name=name: function(*arrays, name), *arrays)
            results.append(jax.tree.leaves((out, pull(dout))))
    for want, got in zip(*results, strict=True):
        want, got = (np.asarray(each, np.float32) for each in (want, got))
        assert np.linalg.norm(got - want) < 4e-3 * np.linalg.norm(want)
    return results[1][0]


def array(draw, *shape, dtype=jnp.float16):
    return jnp.asarray(draw.standard_normal(shape), dtype)


@pytest.mark.parametrize(("block", "shape", "rank"), [(ROW, (192, 64), RANK), (TILE, (128, 256), 70)])
def test_linears(block, shape, rank):
    """The last tile of rows is not whole; columns that tiles of 128 do not divide; a rank beyond what the kernel
    takes."""
    draw, (out, width) = np.random.default_rng(0), shape
    weight = FP8.encode(draw.standard_normal(shape).astype(np.float32), block)

    def run(x, a, b, name):
        return quant_matmul(x, [weight], [LoraWeights(a, b, None, 0.5)], fp8=True, implementation=name)[0]

    compared(run, array(draw, 140, out), array(draw, 140, width), array(draw, rank, width), array(draw, out, rank))
    assert dispatch.record["fp8_matmul"] == dispatch.record["to_fp8"] == ("triton", {})


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("block", "shape"), [(ROW, (192, 64)), (TILE, (128, 256))])
def test_experts(block, shape, transposed):
    draw, sizes = np.random.default_rng(0), [130, 0, 1]
    groups = groups_of(jnp.asarray(sizes, jnp.int32), sum(sizes))
    held = np.concatenate([np.arange(128 * -(-n // 128)) < n for n in sizes])
    held = np.pad(held, (0, groups.rows - held.size))
    weight = FP8.encode(draw.standard_normal((3, *shape)).astype(np.float32), block)
    out, width = reversed(shape) if transposed else shape

    def run(x, a, b, name):
        lora = GroupedLora(a, b, 0.5)
        return grouped_matmul(x, weight, groups, lora, transposed=transposed, fp8=True, implementation=name)

    x = array(draw, groups.rows, width) * held[:, None]
    got = compared(
        run, array(draw, groups.rows, out) * held[:, None], x, array(draw, 3, RANK, width), array(draw, 3, out, RANK)
    )
    assert dispatch.record["fp8_matmul of experts"] == ("triton", {})
    assert not np.asarray(got)[~held].any(), "rows that hold nothing must be zero"
