"""Qwen3.5's layers under what a run may be: weights in four bits and in FP8, QAT, preferences, a mesh, a resume."""

from __future__ import annotations

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import CONFIGS
from tiny_models import adapted_model, golden_model

from jaxtune.models.adapters.merge import merge_adapter
from jaxtune.models.files.quant import compute_in_fp8, dequantize, prepare_qat, quantize
from jaxtune.models.hf import from_pretrained, model_from_config, save_pretrained
from jaxtune.models.lora import experts, linears, without_adapter
from jaxtune.train.config import CheckpointConfig, MeshConfig
from jaxtune.train.objectives.loss import Forward
from jaxtune.train.objectives.preference import DPO
from jaxtune.train.trainer import Trainer
from tests.train.test_preference import batch_of, pairs
from tests.train.tiny_runs import dataset, documents, make_config

TOKENS = np.random.default_rng(0).integers(3, 128, (2, 33), np.int32)
IDS = np.repeat([[1] * 5 + [2] * 16 + [3] * 11 + [0]], 2, 0).astype(np.int32)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MODULES = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")


def tiny(name: str):
    """With weights as a run from scratch has them: no output of a layer is as wide as its input."""
    return model_from_config(CONFIGS[name] | {"rms_norm_eps": 1e-6}, jax.random.key(0), "float32")


def loss_and_gradients(model):
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)

    def loss(trainable):
        return jnp.sin(nnx.merge(graph, trainable, frozen)(jnp.asarray(TOKENS), jnp.asarray(IDS))).sum()

    return jax.jit(jax.value_and_grad(loss))(trainable)


@pytest.mark.full
@pytest.mark.parametrize(("name", "load_in"), [("qwen3_5_moe", "nf4"), ("qwen3_5", "fp8")])
def test_adapters_over_few_bits_have_the_gradients_of_the_decoded_weights(name, load_in):
    experts = dict(target_parameters=EXPERTS) if name == "qwen3_5_moe" else {}
    packed = adapted_model(quantize(golden_model(name), load_in), r=2, **experts)
    adapted = {key.rsplit(".", 1)[1] for key, linear in linears(packed) if linear.lora is not None}
    assert adapted.issuperset(MODULES)
    (loss, got), (want_loss, want) = loss_and_gradients(packed), loss_and_gradients(dequantize(packed))
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        where = jax.tree_util.keystr(path)
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4 * float(jnp.abs(other).max()), err_msg=where)
        assert np.asarray(one).any(), where
    np.testing.assert_allclose(merge_adapter(packed)(TOKENS, IDS), packed(TOKENS, IDS), atol=1e-4)


@pytest.mark.full
def test_products_in_fp8_are_near_those_in_16_bits():
    base = quantize(tiny("qwen3_5_moe"), "fp8")
    got, want = compute_in_fp8(base)(TOKENS, IDS), base(TOKENS, IDS)
    assert 0 < float(jnp.linalg.norm(got - want)) < 0.05 * float(jnp.linalg.norm(want))


@pytest.mark.full
def test_rounded_weights_are_those_that_are_saved(tmp_path):
    """Of QAT, in every matrix of a delta net, with the gradients of the rounded weight; experts are rounded too."""
    model = prepare_qat(adapted_model(golden_model("qwen3_5"), r=2), group_size=32)
    merged = merge_adapter(model)
    np.testing.assert_array_equal(merged(TOKENS, IDS), model(TOKENS, IDS))
    save_pretrained(merged, tmp_path / "model")
    again, _ = from_pretrained(tmp_path / "model", dtype="float32")
    np.testing.assert_array_equal(again(TOKENS, IDS), model(TOKENS, IDS))
    levels = {name: np.asarray(linear.weight[...], np.float32).reshape(-1, 32) for name, linear in linears(again)}
    assert all(max(len(np.unique(group)) for group in groups) <= 16 for groups in levels.values())
    assert {name.rsplit(".", 1)[1] for name in levels}.issuperset(MODULES)
    _, gradients = loss_and_gradients(model)
    whole = dict(linears(nnx.merge(nnx.graphdef(merged), nnx.grad(lambda m: jnp.sin(m(TOKENS, IDS)).sum())(merged))))
    graph, _, frozen = nnx.split(model, nnx.Param, ...)
    ours = dict(linears(nnx.merge(graph, gradients, frozen)))
    for name, linear in linears(model):
        a, b, scale = linear.lora.a[...], linear.lora.b[...], linear.lora.scale
        dweight = whole[name].weight[...]
        for got, want in ((ours[name].lora.a[...], b.T @ dweight), (ours[name].lora.b[...], dweight @ a.T)):
            want = scale * want
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4 * float(jnp.abs(want).max()), err_msg=name)
    of_experts = [matrix for _, matrix in experts(prepare_qat(golden_model("qwen3_5_moe"), group_size=32))]
    assert of_experts and all(matrix.fake_quant is not None for matrix in of_experts if matrix.sizes[-1] % 32 == 0)


@pytest.mark.full
def test_preferences_over_packed_pairs_are_the_definition():
    """DPO's loss and gradients, whose reference is the base: of documents in rows of their own."""
    documents, model, objective = pairs(5), adapted_model(tiny("qwen3_5_moe"), r=2, target_parameters=EXPERTS), DPO(0.3)
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    packed, each = batch_of(documents), [documents[index] for index in range(len(documents))]
    assert packed.tokens.shape[0] < 5
    tokens, mask, ids = (np.zeros((10, max(len(one.tokens) for one in each)), kind) for kind in (int, bool, np.int32))
    for row, one in enumerate(each):
        size = len(one.tokens)
        tokens[row, :size], mask[row, :size], ids[row, :size] = one.tokens, one.mask, 1

    def answers(model):
        chosen = jnp.take_along_axis(jax.nn.log_softmax(model(tokens, ids))[:, :-1], tokens[:, 1:, None], -1)[..., 0]
        return (chosen * mask[:, 1:]).sum(1)

    def ours(trainable):
        return objective.loss(nnx.merge(graph, trainable, frozen), packed, Forward(chunk_tokens=7))[0]

    def plain(trainable):
        model = nnx.merge(graph, trainable, frozen)
        moved = answers(model) - answers(without_adapter(model))
        return jnp.log1p(jnp.exp(-objective.beta * (moved[0::2] - moved[1::2]))).sum()

    (loss, got), (want_loss, want) = (jax.jit(jax.value_and_grad(each))(trainable) for each in (ours, plain))
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        where = jax.tree_util.keystr(path)
        np.testing.assert_allclose(one, other, atol=1e-4 * float(jnp.abs(other).max()), err_msg=where)
        assert np.asarray(one).any(), where


def trained(folder, mesh: MeshConfig | None = None):
    """(losses, what trains) of a run of four steps over packed rows, by experts and delta nets."""
    model = adapted_model(tiny("qwen3_5_moe"), r=2, target_parameters=EXPERTS)
    save = CheckpointConfig(every_steps=2, every_minutes=None)
    config = make_config(folder, steps=4, micro_batches=1, checkpoint=save, mesh=mesh)
    trainer = Trainer(model, None, config, dataset(documents(60)))
    result = trainer.train()
    losses = [line["loss"] for line in trainer.history if "loss" in line]
    return losses, jax.tree.map(np.asarray, jax.tree.leaves(nnx.state(result, nnx.Param)))


@pytest.mark.full
def test_a_run_over_a_mesh_and_one_that_goes_on_are_the_run(tmp_path):
    """Rows and weights divided over four devices; and from a checkpoint, bit for bit."""
    losses, weights = trained(tmp_path / "alone")
    divided, theirs = trained(tmp_path / "divided", MeshConfig(data=2, fsdp=2))
    np.testing.assert_allclose(divided, losses, rtol=1e-4)
    distance = np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(theirs, weights, strict=True)))
    assert distance < 1e-3 * np.sqrt(sum((a**2).sum() for a in weights))
    shutil.rmtree(tmp_path / "alone" / "checkpoints" / "step_00000004")
    rest, again = trained(tmp_path / "alone")
    assert rest == losses[2:]
    for got, want in zip(again, weights, strict=True):
        np.testing.assert_array_equal(got, want)
