"""benchmarks/train/qwen35.py: what it compares is what it says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.table import qwen35_table
from benchmarks.train import qwen35
from jaxtune.models.hf import model_from_config
from jaxtune.models.lora import linears
from jaxtune.train.data.packing import Document, pack


def documents(*lengths: int) -> list[Document]:
    draw = np.random.default_rng(0)
    return [Document(draw.integers(3, 512, n, np.int32), np.ones(n, bool)) for n in lengths]


def test_rows_without_borders_predict_the_same_tokens():
    steps = [documents(5, 9, 4)]
    packed = qwen35.arm_batches("packed", steps, 24).batch_at(0)
    ignored = qwen35.arm_batches("borders ignored", steps, 24).batch_at(0)
    for field in ("tokens", "targets", "weights"):
        np.testing.assert_array_equal(getattr(packed, field), getattr(ignored, field))
    assert packed.segment_ids.max() == 3 and ignored.segment_ids.max() == 1
    np.testing.assert_array_equal(ignored.positions[0, :18], np.arange(18))
    alone, reordered = (qwen35.arm_batches(name, steps, 24).batch_at(0) for name in ("alone", "reordered"))
    np.testing.assert_array_equal(alone.tokens, reordered.tokens[::-1])
    assert alone.weights.sum() == packed.weights.sum() == 15


@pytest.mark.usefixtures("compiled_quickly")
def test_a_matrix_that_four_bits_hold_exactly_is_not_harmed():
    """Of weights that are all plus or minus one number, NF4 loses nothing; of all others something, layer by layer."""
    shape = qwen35.config(64, 2) | {"layer_types": ["linear_attention", "full_attention"]}
    model = model_from_config(shape, jax.random.key(0), "float32")
    exact = ("model.layers.0.linear_attn.out_proj", "model.layers.1.self_attn.q_proj")
    for name, linear in linears(model):
        if name in exact:
            linear.weight[...] = jnp.where(linear.weight[...] < 0, -0.125, 0.125)
    batch = jax.tree.map(jnp.asarray, pack(documents(12, 7), 16, packing=False)[0])
    found = qwen35.four_bits(model, batch, show=lambda line: None)
    rows = {row["name"]: row for row in found["matrices"]}
    assert list(rows) == [name for name, _ in linears(model)]
    for name, row in rows.items():
        if name in exact:
            assert row["output_error"] == row["weight_error"] == 0, name
        else:
            assert 0.05 < row["weight_error"] < 0.15 and row["output_error"] > 0, name
    kinds = found["kinds"]
    assert kinds["self_attn.q_proj"]["loss_rises"] == 0 != kinds["mlp.up_proj"]["loss_rises"]
    assert sum(kind["share"] for kind in kinds.values()) == pytest.approx(1)
    assert f"| `mlp.up_proj` | {kinds['mlp.up_proj']['share']:.1%} |" in "\n".join(qwen35_table(fake(found)))


def fake(four_bits: dict) -> dict:
    """A record with these results."""
    arm = {"held_out": 1.0, "rows": 2, "length": 16, "losses": [2.0, 1.5]}
    return {
        "device": "cpu", "versions": {"jax": "0"}, "commit": "0000000", "parameters": 1, "documents_per_step": 2,
        "rank": 8, "options": {"hidden": 64, "layers": 2, "steps": 2}, "before": 2.0, "four_bits": four_bits,
        "pretraining": {"tokens": 10, "held_out": 2.0}, "arms": {"alone": arm, "packed": arm},
        "differences": {"packed": {"step": 0.0, "held_out": 0.0}},
    }  # fmt: skip
