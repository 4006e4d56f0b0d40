"""A layer says what it is, and the rest follows: a mixer and a feed-forward in a file each, mixed with others in one
model, are trained, placed, planned, adapted, generated from, saved and loaded, and nothing else knows them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_family
from flax import nnx
from tiny import CONFIGS
from tiny_models import shaken

import jaxtune
from jaxtune.models import registry
from jaxtune.models.decoder import Decoder, abstract_decoder
from jaxtune.models.hf import model_from_config
from jaxtune.models.layers.segment import matrix_of
from jaxtune.models.lora import matrices
from jaxtune.models.registry import config_from_hf
from jaxtune.models.stack.residual_plan import KEEP, RECOMPUTE, LayerPlan, ResidualPlan
from jaxtune.pallas.attention import attention
from jaxtune.train.config import AdapterConfig, MemoryConfig
from jaxtune.train.planning.choice import choose
from jaxtune.train.planning.cost import step_cost
from jaxtune.train.planning.devices import find_device
from jaxtune.train.planning.forecasts import forecast
from jaxtune.train.planning.plan import StepPlan, parse_plan, residuals_text
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.program.flops import flop_counter
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import dataset, documents, make_config

SEGMENTS = np.array([[1] * 5 + [2] * 7, [1] + [2] * 8 + [0] * 3], np.int32)


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(registry.FAMILIES, "toy", toy_family.FAMILY)


def toy_model():
    return model_from_config(toy_family.HF, jax.random.key(0), "float32")


def plainly(model, tokens, segment_ids):
    """The hidden states, layer by layer, without segments."""
    layout = model.layout(tokens.shape, segment_ids)
    x = model.embed(tokens)
    for block, spec in zip(model.layers, model.config.layers, strict=True):
        mixer, normed = block.mixer, block.normed("mixer", x)
        if spec.hf_names["mixer"] == "decay":
            signal, rows = mixer.in_proj(normed), []
            begins = jnp.arange(tokens.shape[1]) == layout.doc_start
            for t in range(tokens.shape[1]):
                before = jnp.where(begins[:, t, None], 0.0, rows[-1] * mixer.shape.share) if rows else 0.0
                rows.append(signal[:, t] + before)
            out = mixer.out_proj(jnp.stack(rows, 1))
        else:
            query, key, value = mixer.project(normed, layout.rotary[0])
            out = mixer.output(attention(query, key, value, layout, **mixer.options(spec.window)))
        x = block.added("mixer", x, out)
        normed, forward = block.normed("mlp", x), block.mlp
        if hasattr(forward, "wide_proj"):
            out = forward.narrow_proj(jax.nn.relu(forward.wide_proj(normed)) ** 2)
        else:
            out = forward.down(*forward.gate_up(normed))
        x = block.added("mlp", x, out)
    return model.norm(x)


def loss_and_gradients(model, plan):
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, 48, SEGMENTS.shape), jnp.int32)
    probe = jax.random.normal(jax.random.key(1), (*SEGMENTS.shape, 16))

    def total(trainable):
        model = nnx.merge(graph, trainable, frozen)
        hidden = plainly(model, tokens, SEGMENTS) if plan is None else model.hidden_states(tokens, SEGMENTS, plan=plan)
        return (hidden * probe * (SEGMENTS > 0)[..., None]).sum()

    return jax.jit(jax.value_and_grad(total))(trainable)


def close(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6 * max(1.0, np.abs(b).max()), rtol=0)


@pytest.mark.full
def test_every_placement_gives_the_definitions_gradients():
    model = toy_model()
    want = loss_and_gradients(model, None)
    mix = LayerPlan(signal="offload", trail="recompute", wide="recompute", gate="offload", query="recompute")
    for layer in (KEEP, RECOMPUTE, LayerPlan("offload"), mix):
        close(loss_and_gradients(model, ResidualPlan.uniform(layer, 4)), want)
    close(loss_and_gradients(model, ResidualPlan.uniform(RECOMPUTE, 4, tile_tokens=6)), want)


@pytest.mark.full
def test_adapters_stand_on_every_matrix_and_go_through_files(tmp_path):
    model = shaken(jaxtune.get_peft_model(toy_model(), r=2, target_modules="all-linear"))
    names = [name for name, matrix in matrices(model) if matrix.lora is not None]
    assert {"model.layers.1.decay.in_proj", "model.layers.2.square.narrow_proj"} <= set(names) and len(names) == 23
    jaxtune.save_adapter(model, tmp_path / "adapter")
    again = jaxtune.load_adapter(toy_model(), tmp_path / "adapter")
    tokens = jnp.asarray([[3, 9, 4, 1]])
    np.testing.assert_array_equal(again(tokens), model(tokens))
    merged = jaxtune.merge_adapter(model)
    np.testing.assert_allclose(merged(tokens), model(tokens), atol=1e-5)
    jaxtune.save_pretrained(merged, tmp_path / "merged")
    loaded, _ = jaxtune.from_pretrained(tmp_path / "merged", dtype="float32")
    np.testing.assert_array_equal(loaded(tokens), merged(tokens))


@pytest.mark.full
def test_generation_steps_as_the_whole_row_says():
    model = toy_model()
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    for prompt, new in zip(prompts, jaxtune.generate(model, prompts, 6, eos_token_ids=()), strict=True):
        row = list(prompt)
        for token in new:
            assert token == int(model(jnp.asarray([row]))[0, -1].argmax())
            row.append(token)


@pytest.mark.full
def test_plans_know_its_residuals_and_what_they_take():
    model = jaxtune.get_peft_model(toy_model(), r=2)
    config = make_config("out", adapter=AdapterConfig(r=2))
    parts = step_cost(model, StepSpec.of(config))
    assert {"signal", "trail", "wide", "query", "gate"} <= set(parts.layers.residuals)
    # A mean over four layers, of which two have it: 12 and 20 channels of float32.
    assert parts.layers.residuals["signal"] * 4 == (12 + 20) * 4 and parts.layers.residuals["wide"] * 4 == 32 * 4
    text = "0-1: recompute; 2-3: signal=offload, wide=recompute"
    assert residuals_text(parse_plan(text, 4, parts.layers.all_residuals)[0]) == text
    device = dataclasses.replace(find_device("RTX 4090"), link=1e9)
    kept = forecast(parts, StepPlan(ResidualPlan.uniform(KEEP, 4), 1, 64), device)
    less = choose(parts, StepSpec.of(config), device, 0.9 * kept.peak_bytes)
    assert less.peak_bytes <= 0.9 * kept.peak_bytes and less.plan != kept.plan
    assert forecast(parts, less.plan, device).peak_bytes == less.peak_bytes


def test_each_layer_counts_the_flops_of_its_own_attention():
    """Two heads of 8, two mixers that say 1, and four heads of 8 in a window of 4: 2 products forward and 4 backward,
    over the pairs of tokens that see each other."""
    lengths = np.array([900, 400])
    alone = flop_counter(toy_model())(np.ones(1300, int))  # the same tokens, of which none sees another
    keys = np.concatenate([np.arange(length) + 1 for length in lengths])
    seen = (16 + 1 + 1) * keys.sum() + 32 * np.minimum(keys, 4).sum()
    assert flop_counter(toy_model())(lengths) - alone == pytest.approx(6 * 2 * seen, rel=0.005)


@pytest.mark.full
def test_a_run_trains_it_under_a_plan(tmp_path):
    model, rows = jaxtune.get_peft_model(toy_model(), r=2), dataset(documents(20))
    losses = {}
    for text in ("keep", "signal=offload, wide=recompute, gate=recompute"):
        config = make_config(tmp_path / text[:4], memory=MemoryConfig(plan=text), adapter=AdapterConfig(r=2))
        trainer = Trainer(model, None, config, rows)
        trainer.train()
        losses[text] = [line["loss"] for line in trainer.history if "loss" in line]
    one, other = losses.values()
    assert len(one) > 2 and one == pytest.approx(other, rel=1e-5) and one[-1] != one[0]


def test_nothing_else_knows_a_segment_or_a_kind_of_layer_by_name():
    """In the package: no isinstance of a block or of its parts, no comparison with a segment's or residual's name."""
    code = """
import ast, pathlib, sys
names = {"project", "attend", "mix", "expand", "contract", "route", "balance", "query", "attention_out", "lse", "mid",
         "gate", "up", "gate_up", "choice", "layer_input"}
kinds = {"Block", "Attention", "MLP", "MoE", "Experts"}
for file in pathlib.Path("jaxtune").rglob("*.py"):
    if file.parts[:3] == ("jaxtune", "models", "layers") or file.parts[1] in ("pallas", "profile", "compat"):
        continue
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            if {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)} & kinds:
                print(file, node.lineno)
        if isinstance(node, ast.Compare) and "name" in ast.unparse(node.left):
            if any(isinstance(n, ast.Constant) and n.value in names for c in node.comparators for n in ast.walk(c)):
                print(file, node.lineno)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found == ""


@pytest.mark.parametrize("family", CONFIGS)
def test_a_layer_has_the_matrices_of_its_segments_in_their_order(family):
    model = abstract_decoder(config_from_hf(CONFIGS[family]), "float32")
    for layer in model.layers:
        names = [f"{part}.{name}" for part, name, _ in layer.matrices()]
        assert names == [name for segment in layer.segments() for name in segment.matrices]
        assert all(matrix is matrix_of(layer, name) for name, (*_, matrix) in zip(names, layer.matrices(), strict=True))


def test_each_abstract_model_has_variables_of_its_own():
    one, other = (abstract_decoder(config_from_hf(CONFIGS["llama"]), "bfloat16") for _ in range(2))
    one.layers[0].mixer.q_proj.lora = "changed"
    one.norm.weight.set_value(jnp.zeros(3))
    assert other.layers[0].mixer.q_proj.lora is None and other.norm.weight.get_value().shape != (3,)
    want = nnx.eval_shape(lambda: Decoder(config_from_hf(CONFIGS["llama"]), jax.random.key(0)))
    assert nnx.graphdef(other) == nnx.graphdef(want)
