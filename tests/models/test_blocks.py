"""Layers of every kind of stage: one part alone, two mixers in parallel, experts beside the dense MLP with norms of
their own. Each equals a plain computation, forward and backward, under plans; trains, generates and takes adapters."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import shaken, tiny_model
from toy_mixer import Decay

import jaxtune
from jaxtune.models.config import LayerSpec, MoEConfig, Part, Stage, in_sequence
from jaxtune.models.layers.attention import AttentionShape
from jaxtune.models.layers.experts import ExpertsShape
from jaxtune.models.lora import matrices
from jaxtune.models.stack.residual_plan import KEEP, RECOMPUTE, LayerPlan, ResidualPlan
from jaxtune.pallas.attention import attention
from jaxtune.train.config import AdapterConfig, MemoryConfig
from jaxtune.train.objectives.loss import declared_losses
from jaxtune.train.planning.choice import choose
from jaxtune.train.planning.cost import step_cost
from jaxtune.train.planning.devices import find_device
from jaxtune.train.planning.forecasts import forecast
from jaxtune.train.planning.plan import StepPlan
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import dataset, documents, make_config

SEGMENTS = np.array([[1] * 5 + [2] * 7, [1] + [2] * 8 + [0] * 3], np.int32)
EXPERTS = ExpertsShape(MoEConfig(4, 2, 8), hf_name="")
SCALED = ExpertsShape(MoEConfig(4, 2, 8, scaled_router=True), hf_name="")
WIDE = AttentionShape(4, 2, 8, 0.25, qk_norm="head", hf_name="wide_attn")
# {what: (a layer, what it computes of x; `block` has the modules, `of` runs one)}
LAYERS = {
    "one mixer": (
        LayerSpec(stages=in_sequence(Part("mixer", Decay(12)))),
        lambda block, of, x: x + of(block.mixer, block.mixer_norm(x)),
    ),
    "attention alone, normed after": (
        LayerSpec(window=4, stages=in_sequence(Part("mixer", norm=False, post_norm=True))),
        lambda block, of, x: x + block.mixer_post_norm(of(block.mixer, x)),
    ),
    "experts alone": (
        LayerSpec(stages=in_sequence(Part("mlp", EXPERTS))),
        lambda block, of, x: x + of(block.mlp, block.mlp_norm(x)),
    ),
    "two mixers in parallel on one norm, then an MLP": (
        LayerSpec(stages=(Stage((Part("mixer"), Part("decay", Decay(12), norm="mixer"))), Stage((Part("mlp"),)))),
        lambda block, of, x: mlp_after(
            block, of, x + of(block.mixer, block.mixer_norm(x)) + of(block.decay, block.mixer_norm(x))
        ),
    ),
    "two attentions in parallel, of which each names its residuals": (
        LayerSpec(window=4, stages=(Stage((Part("mixer"), Part("wide", WIDE))), Stage((Part("mlp"),)))),
        lambda block, of, x: mlp_after(
            block, of, x + of(block.mixer, block.mixer_norm(x)) + of(block.wide, block.wide_norm(x))
        ),
    ),
    "experts beside the MLP, with norms of their own and of the sum, a scaled router, and a scale": (
        LayerSpec(
            stages=(
                Stage((Part("mixer", post_norm=True),)),
                Stage((Part("mlp", post_norm=True), Part("experts", SCALED, post_norm=True)), post_norm=True),
            ),
            output_scale=True,
        ),
        lambda block, of, x: beside_experts(block, of, x + block.mixer_post_norm(of(block.mixer, block.mixer_norm(x)))),
    ),
}


def mlp_after(block, of, x):
    return x + of(block.mlp, block.mlp_norm(x))


def beside_experts(block, of, x):
    dense = block.mlp_post_norm(of(block.mlp, block.mlp_norm(x)))
    sparse = block.experts_post_norm(dense_experts(block.experts, block.experts_norm(x), x))
    return (x + block.mlp_sum_norm(dense + sparse)) * block.layer_scalar[...]


def make(name: str):
    model = tiny_model(layers=(LAYERS[name][0],) * 2)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        if "scal" in str(path[-1]) or "norm" in str(path[-2]):  # ones at the start
            draw = jax.random.uniform(jax.random.key(len(path)), variable.shape, minval=0.5, maxval=1.5)
            variable.set_value(draw)
    return model


def plainly(name: str, model, tokens):
    layout = model.layout(tokens.shape, SEGMENTS)
    x = model.embed(tokens)
    for block, spec in zip(model.layers, model.config.layers, strict=True):

        def of(module, x, window=spec.window):
            if hasattr(module, "in_proj"):
                signal, rows = module.in_proj(x), []
                begins = jnp.arange(x.shape[1]) == layout.doc_start
                for t in range(x.shape[1]):
                    before = jnp.where(begins[:, t, None], 0.0, rows[-1] * module.shape.share) if rows else 0.0
                    rows.append(signal[:, t] + before)
                return module.out_proj(jnp.stack(rows, 1))
            if hasattr(module, "q_proj"):
                query, key, value = module.project(x, layout.rotary[0])
                return module.output(attention(query, key, value, layout, **module.options(window)))
            if hasattr(module, "router"):
                return dense_experts(module, x)
            return module.down(*module.gate_up(x))

        x = LAYERS[name][1](block, of, x)
    return model.norm(x)


def dense_experts(moe, x, stream=None):
    """Every expert of every token, times the weights of the chosen ones; a scaled router reads the stream."""
    router, scales = moe.router, None
    if stream is not None:
        normed = stream * jax.lax.rsqrt(jnp.mean(stream * stream, -1, keepdims=True) + router.eps)
        seen, matrix = normed * router.scale[...] / jnp.sqrt(stream.shape[-1]), router.proj.weight[...]
        scales = router.per_expert_scale[...]
    else:
        seen, matrix = x, router.weight[...]
    top, choice = jax.lax.top_k(jnp.einsum("btd,ed->bte", seen, matrix, precision="highest"), 2)
    weights = jax.nn.softmax(top, -1) * (1.0 if scales is None else scales[choice])
    gate_up = jnp.einsum("btd,efd->btef", x, moe.experts.gate_up_proj.weight[...], precision="highest")
    gate, up = jnp.split(gate_up, 2, -1)
    out = jnp.einsum("btef,edf->bted", jax.nn.silu(gate) * up, moe.experts.down_proj.weight[...], precision="highest")
    return (jnp.take_along_axis(out, choice[..., None], 2) * weights[..., None]).sum(2)


def loss_and_gradients(name: str, model, plan):
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, 48, SEGMENTS.shape), jnp.int32)
    probe = jax.random.normal(jax.random.key(1), (*SEGMENTS.shape, 16))

    def total(trainable):
        model = nnx.merge(graph, trainable, frozen)
        hidden = plainly(name, model, tokens) if plan is None else model.hidden_states(tokens, SEGMENTS, plan=plan)
        return (hidden * probe * (SEGMENTS > 0)[..., None]).sum()

    return jax.jit(jax.value_and_grad(total))(trainable)


@pytest.mark.full
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_what_its_stages_say(name):
    model = make(name)
    want = loss_and_gradients(name, model, None)
    rounding = 2e-5 if "of the sum" in name else 5e-6  # three norms in a row, each of which magnifies it
    for plan in (ResidualPlan.uniform(KEEP, 2), ResidualPlan.uniform(RECOMPUTE, 2, tile_tokens=6)):
        got = loss_and_gradients(name, model, plan)
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
            where = jax.tree_util.keystr(path)
            assert "head" in where or np.abs(b).max() > 0, where
            np.testing.assert_allclose(a, b, atol=rounding * max(1.0, np.abs(b).max()), rtol=0, err_msg=where)


@pytest.mark.full
@pytest.mark.parametrize("name", LAYERS)
def test_it_generates_step_by_step_what_the_whole_row_says(name):
    model = make(name)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    for prompt, new in zip(prompts, jaxtune.generate(model, prompts, 4, eos_token_ids=()), strict=True):
        row = jnp.asarray([[*prompt, *new]])
        assert new == model(row)[0, len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.full
@pytest.mark.parametrize("name", LAYERS)
def test_every_matrix_takes_an_adapter_that_trains(name, tmp_path):
    base = make(name)
    experts = [n for n, matrix in matrices(base) if matrix.num_experts]
    linears = [n for n, matrix in matrices(base) if not matrix.num_experts]
    last = sorted({n.rsplit(".", 1)[1] for n in linears}) or None
    model = jaxtune.get_peft_model(base, r=2, target_modules=last or [], target_parameters=experts or None)
    assert all(matrix.lora is not None for _, matrix in matrices(model))
    before = [matrix.lora.b[...] for _, matrix in matrices(model)]
    plan = ", ".join(
        f"{r.name}=recompute"
        for r in step_cost(base, StepSpec.of(make_config("out"))).layers.all_residuals
        if r.recomputable
    )
    config = make_config(tmp_path, steps=3, memory=MemoryConfig(plan=plan), adapter=AdapterConfig(r=2))
    trainer = Trainer(model, None, config, dataset(documents(20)))
    trained = trainer.train()
    for (where, matrix), start in zip(matrices(trained), before, strict=True):
        assert np.abs(matrix.lora.b[...] - start).max() > 0, where
    jaxtune.save_adapter(shaken(model), tmp_path / "adapter")
    tokens = jnp.asarray([[3, 9, 4, 1]])
    np.testing.assert_array_equal(jaxtune.load_adapter(base, tmp_path / "adapter")(tokens), model(tokens))


@pytest.mark.full
def test_names_of_residuals_and_matrices():
    block = make("two attentions in parallel, of which each names its residuals").layers[0]
    names = [residual.name for residual in block.residuals()]
    assert names[:6] == ["layer_input", "query", "key", "value", "attention_out", "lse"]
    assert names[6:13] == ["mid", "wide_query", "wide_key", "wide_value", "wide_attention_out", "wide_lse", "mid_2"]
    assert len(set(names)) == len(names)
    model = make("experts beside the MLP, with norms of their own and of the sum, a scaled router, and a scale")
    found = [name for name, _ in matrices(model)]
    assert {"model.layers.0.mlp.down_proj", "model.layers.1.experts.gate_up_proj"} <= set(found)
    assert declared_losses(model).names == ("router_aux_loss", "router_z_loss")


@pytest.mark.parametrize("name", LAYERS)
def test_plans_are_found_for_it(name):
    config = make_config("out")
    parts = step_cost(make(name), StepSpec.of(config))
    device = dataclasses.replace(find_device("RTX 4090"), link=1e9)
    kept = forecast(parts, StepPlan(ResidualPlan.uniform(KEEP, 2), 1, 64), device)
    less = forecast(parts, StepPlan(ResidualPlan.uniform(RECOMPUTE, 2), 1, 64), device)
    assert 0 < less.peak_bytes < kept.peak_bytes and less.device_seconds > kept.device_seconds > 0
    assert choose(parts, StepSpec.of(config), device, kept.peak_bytes).peak_bytes <= kept.peak_bytes
    with pytest.raises(ValueError, match="no layer has a residual 'gates'"):
        model = make(name)
        model.hidden_states(jnp.ones((1, 4), jnp.int32), plan=ResidualPlan.uniform(LayerPlan(gates="offload"), 2))


def test_a_layer_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="'decay' has no config"):
        LayerSpec(stages=in_sequence(Part("mixer"), Part("decay")))
    with pytest.raises(ValueError, match="no name twice"):
        LayerSpec(stages=in_sequence(Part("mlp"), Part("mlp")))
    with pytest.raises(ValueError, match="norm = 'mixer': must be an earlier part of its stage"):
        in_sequence(Part("mlp", norm="mixer"))
