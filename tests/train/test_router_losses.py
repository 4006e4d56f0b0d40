"""The losses on routers: their gradient through the hand-written backward, padding, packing, micro-batches, devices."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import tiny_model

from jaxtune.models.config import LayerSpec, MoEConfig
from jaxtune.models.stack.residual_plan import RECOMPUTE, ResidualPlan
from jaxtune.pallas.attention import attention
from jaxtune.train.config import DataConfig, MeshConfig, OptimConfig
from jaxtune.train.data.packing.packing import pack
from jaxtune.train.objectives.loss import declared_losses, loss_sums
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import LENGTH, dataset, documents, lora_model, make_config

MOE = MoEConfig(4, 2, 8, router_bias=True, expert_bias=True, transposed=True, interleaved=True, swiglu_limit=0.5)
AUX, Z = 0.3, 0.05
SGD = OptimConfig(name="sgd", learning_rate=1.0)


def moe_model(layers: int = 2, **changes):
    specs = (LayerSpec(window=4), LayerSpec())[:layers]
    model = tiny_model(moe=dataclasses.replace(MOE, **changes), layers=specs)
    for index, layer in enumerate(model.layers):  # routers that prefer some experts
        layer.mlp.router.weight.set_value(2 * jax.random.normal(jax.random.key(index), layer.mlp.router.weight.shape))
    return model


def losses_by_definition(model, batch):
    """(load-balancing loss, z-loss): transformers' formulas over the logits of all layers, one-hot and concatenated."""
    layout = model.layout(batch.tokens.shape, batch.segment_ids, batch.positions)
    x, all_logits = model.embed(batch.tokens), []
    for block, spec in zip(model.layers, model.config.layers, strict=True):
        query, key, value = block.mixer.project(block.normed("mixer", x), layout.rotary[0])
        out = attention(query, key, value, layout, **block.mixer.options(spec.window))
        mid = block.added("mixer", x, block.mixer.output(out))
        normed = block.normed("mlp", mid)
        all_logits.append(block.mlp.router(normed.reshape(-1, mid.shape[-1])))
        choice = block.mlp.choose(normed, batch.segment_ids > 0)
        x = block.added("mlp", mid, block.mlp.down(block.mlp.gate_up(normed, choice), choice, normed))
    logits = jnp.concatenate(all_logits)
    mask = jnp.tile(batch.segment_ids.reshape(-1) > 0, len(all_logits))
    probability = jax.nn.softmax(logits, axis=-1)
    chosen = jax.nn.one_hot(jax.lax.top_k(probability, 2)[1], 4).sum(1)
    share, mean = ((values * mask[:, None]).sum(0) / mask.sum() for values in (chosen, probability))
    square = jax.nn.logsumexp(logits, axis=-1) ** 2
    return 4 * (share * mean).sum(), (square * mask).sum() / mask.sum()


def packed_batch(rows: int = 2):
    batch = jax.tree.map(lambda a: jnp.asarray(a[:rows]), pack(documents(7, seed=6), LENGTH)[0])
    assert (batch.segment_ids == 0).any() and (batch.segment_ids > 1).any()
    return batch


@pytest.mark.full
def test_gradients_through_the_stack_are_those_of_the_definition():
    model, batch = moe_model(), packed_batch()
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    plan = ResidualPlan.uniform(RECOMPUTE, 2)

    @jax.jit
    def ours(trainable):
        model = nnx.merge(graph, trainable, frozen)
        values = loss_sums(model, batch, plan=plan, aux_losses=declared_losses(model))[2]
        return AUX * values[0] + Z * values[1], values

    @jax.jit
    def plain(trainable):
        values = losses_by_definition(nnx.merge(graph, trainable, frozen), batch)
        return AUX * values[0] + Z * values[1], jnp.stack(values)

    (got, got_values), (want, want_values) = (jax.grad(f, has_aux=True)(trainable) for f in (ours, plain))
    np.testing.assert_allclose(got_values, want_values, rtol=1e-5)
    assert float(want_values[0]) > 2.01  # k for routers without preferences
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        where = jax.tree_util.keystr(path)
        if "router" in where or "q_proj" in where:
            assert np.abs(b).max() > 1e-4, where
        np.testing.assert_allclose(a, b, atol=3e-6, err_msg=where)


def test_packed_rows_have_the_losses_of_padded_ones():
    model, made = moe_model(), documents(7, seed=6)
    each = jax.tree.map(jnp.asarray, dataset(made, packing=False).batches(len(made), shuffle=False).batch_at(0))
    packed = jax.tree.map(jnp.asarray, pack(made, LENGTH)[0])
    assert len(packed.tokens) < len(each.tokens)
    sums = jax.jit(functools.partial(loss_sums, aux_losses=declared_losses(model)))
    one, other = (sums(model, batch) for batch in (each, packed))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("changes", [dict(micro_batches=2), dict(mesh=MeshConfig(data=2))], ids=["micro", "devices"])
def test_a_step_adds_what_is_documented(tmp_path, changes):
    """A micro-batch is pooled over its devices; micro-batches are weighted by their targets."""
    base, data = moe_model(1), dataset(documents(8, seed=3), packing=False)
    config = make_config(
        tmp_path / "run",
        steps=1,
        rows_per_step=8,
        optim=SGD,
        max_grad_norm=None,
        router_aux_loss_coef=AUX,
        router_z_loss_coef=Z,
        data=DataConfig(train="rows", length=LENGTH, packing=False),
        **changes,
    )
    trainer = Trainer(base, None, config, train_rows=data)
    batch, parts = trainer.batches.batch_at(0), config.micro_batches or 1
    size = 8 // parts
    batches = [jax.tree.map(lambda a, i=i: jnp.asarray(a[i * size : (i + 1) * size]), batch) for i in range(parts)]
    counts = [float(part.weights.sum()) for part in batches]
    assert parts == 1 or counts[0] != counts[1]
    graph, trainable, frozen = nnx.split(base, nnx.Param, ...)

    def step_loss(trainable):
        model = nnx.merge(graph, trainable, frozen)
        found = [loss_sums(model, part, aux_losses=declared_losses(model)) for part in batches]
        values = sum(count * value for count, (_, _, value) in zip(counts, found, strict=True)) / sum(counts)
        return sum(loss for loss, _, _ in found) / sum(counts) + AUX * values[0] + Z * values[1], values

    gradients, values = jax.jit(jax.grad(step_loss, has_aux=True))(trainable)
    trained = trainer.train()
    line = trainer.history[-1]
    np.testing.assert_allclose([line["router_aux_loss"], line["router_z_loss"]], values, rtol=1e-5)
    moved = jax.tree.map(lambda a, b: a - b, trainable, nnx.state(trained, nnx.Param))
    assert np.abs(moved["layers"][0]["mlp"]["router"]["weight"][...]).max() > 1e-3
    for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)


@pytest.mark.full
def test_the_coefficient_is_the_models_where_the_config_names_none(tmp_path):
    def coefficients(model, **settings):
        trainer = Trainer(model, None, make_config(tmp_path, **settings), train_rows=dataset(documents(8)))
        losses = trainer.program.aux_losses
        assert losses.names == ("router_aux_loss", "router_z_loss")
        aux, z = (coefficient for *_, coefficient in losses.losses)
        said = f"added to the loss: load-balancing loss times {aux:g}, z-loss times {z:g}"
        assert trainer.notes()[1:] == ([said] if aux or z else [])
        return aux, z

    on = dict(router_aux_loss_coef=0.02, output_router_logits=True)
    assert coefficients(moe_model(**on)) == (0.02, 0.0)
    assert coefficients(moe_model(**on), router_aux_loss_coef=0.0, router_z_loss_coef=0.1) == (0.0, 0.1)
    assert coefficients(moe_model(router_aux_loss_coef=0.02)) == (0.0, 0.0)
    assert coefficients(moe_model(), router_aux_loss_coef=0.5) == (0.5, 0.0)
    with pytest.raises(ValueError, match=r"router_z_loss_coef = 0\.1: a llama model has no experts; unset it"):
        coefficients(lora_model(), router_z_loss_coef=0.1)
    with pytest.raises(ValueError, match="router_aux_loss_coef"):
        make_config(tmp_path, router_aux_loss_coef=-1.0)
