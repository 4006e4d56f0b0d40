"""Precision maps: every tensor and every product is in the dtype or format that the map says, and an adapter's folder
says it again."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import CONFIGS
from tiny_models import adapted_model, tiny_model

import jaxtune
from jaxtune.models import components as model_components
from jaxtune.models.components import common_format, components, follow, followed, stored_as
from jaxtune.models.files.quant import dequantize
from jaxtune.models.hf import Pretrained, model_from_config
from jaxtune.models.precision import Component, resolve
from jaxtune.pallas.formats import Stored, format_of

TOKENS = jnp.arange(12, dtype=jnp.int32)[None]
SIZES: dict[str, Any] = dict(hidden_size=32, intermediate_size=64, head_dim=16)
MAP = {"lm_head": "fp32", "norms": "fp32", "layers.0.*": "bf16", "layers.1.*.q_proj": "fp32", "*.down_proj": "int8"}


@pytest.fixture
def base(tmp_path) -> Path:
    jaxtune.save_pretrained(tiny_model("bfloat16", **SIZES), tmp_path / "base")
    return tmp_path / "base"


def stored(model) -> dict[str, tuple[str, str | None]]:
    """{module's name: (format or dtype of its weight, dtype of its product)}."""
    found = {}
    for each, _, module in components(model):
        weight = module.weight.get_value()
        how = format_of(weight).name if isinstance(weight, Stored) else weight.dtype.name
        found[each.name] = (how, module.compute)
    return found


def test_every_tensor_is_stored_as_the_map_says(base):
    pretrained = Pretrained(base, load_in="nf4", precision=MAP)
    model = pretrained.load()
    for name, (how, compute) in stored(model).items():
        wide = name in ("lm_head", "model.layers.1.self_attn.q_proj") or "norm" in name
        kept = "layers.0." in name or name == "model.embed_tokens"
        assert how == (
            "float32" if wide else "bfloat16" if kept else "int8" if name.endswith("down_proj") else "nf4"
        ), name
        assert compute == ("float32" if wide else None), name
    assert pretrained.device_bytes() == sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    whole, _ = jaxtune.from_pretrained(base)
    again = stored_as(whole, MAP, "nf4")
    assert stored(again) == stored(model) and followed(again) == followed(model)
    for ours, theirs in zip(jax.tree.leaves(nnx.state(again)), jax.tree.leaves(nnx.state(model)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def products(model) -> set[tuple[tuple[int, ...], str, str]]:
    """(shape of a weight, dtype in which it is multiplied, dtype of the result) of every product with a weight in the
    lowered program of the logits."""
    graph, state = nnx.split(model)
    text = jax.jit(lambda state: nnx.merge(graph, state)(TOKENS)).lower(state).as_text()
    found = set()
    for _, right, out in re.findall(r"dot_general.*?: \(tensor<(.*?)>, tensor<(.*?)>\) -> tensor<(.*?)>", text):
        *sizes, dtype = right.split("x")
        if len(sizes) == 2:
            found.add((tuple(sorted(map(int, sizes))), dtype, out.split("x")[-1]))
    return found


def test_every_product_is_computed_as_the_map_says():
    """The sizes of all matrices differ, but those of gate and up."""
    model = tiny_model("bfloat16", vocab_size=80, **SIZES)
    head, up, down = (32, 80), (32, 64), (32, 64)
    usual = products(model)
    assert (head, "bf16", "f32") in usual and not any(dtype == "f32" for _, dtype, _ in usual)
    assert {dtype for shape, dtype, _ in products(stored_as(model, {"lm_head": "fp32"})) if shape == head} == {"f32"}
    found = products(stored_as(model, {"gate_proj": "fp32"}))
    assert {dtype for shape, dtype, _ in found if shape == up} == {"f32", "bf16"}  # up_proj and down_proj: bf16
    found = products(stored_as(model, {"mlp.*": "fp32", "lm_head": "fp32"}))
    assert {dtype for shape, dtype, _ in found if shape in (up, down, head)} == {"f32"}
    assert {dtype for shape, dtype, _ in found if shape not in (up, down, head)} == {"bf16"}


@pytest.mark.full
def test_routers_and_experts_are_computed_as_the_map_says():
    config = CONFIGS["qwen3_moe"]
    model = model_from_config(config, jax.random.key(0), "bfloat16")
    router = tuple(sorted((config["hidden_size"], config["num_experts"])))
    assert {dtype for shape, dtype, _ in products(model) if shape == router} == {"bf16"}
    wide = stored_as(model, {"router": "fp32", "experts.*": "fp32"})
    assert {dtype for shape, dtype, _ in products(wide) if shape == router} == {"f32"}
    names = {name for name, (_, compute) in stored(wide).items() if compute == "float32"}
    assert names and all("experts" in name or name.endswith(".gate") for name in names)
    assert not np.array_equal(wide(TOKENS), model(TOKENS))


def test_logits_in_float32_are_those_of_exact_products():
    """Hidden states stay in bf16; the head's product of them is that of float64, to float32's rounding."""
    model = stored_as(tiny_model("float32", **SIZES), {"model.embed_tokens": "bf16"})
    model.dtype = "bfloat16"
    head = np.asarray(model.head_variable[...], np.float64)
    hidden = model.hidden_states(TOKENS)
    exact = np.asarray(hidden, np.float64) @ head.T
    assert hidden.dtype == jnp.bfloat16
    for words, bound in (({"lm_head": "fp32"}, 1e-5), ({"lm_head": "bf16"}, 1.0)):
        follow(model, words)
        error = np.abs(np.asarray(model.logits(hidden), np.float64) - exact).max()
        assert bound / 1e4 < error < bound, words


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("word", [None, "nf4", "int8"])
def test_one_walk_tells_format_and_map(word, plain, monkeypatch):
    """A walk through 32 layers takes thirty milliseconds."""
    model = stored_as(tiny_model("float32", **SIZES), {"lm_head": "bf16"}, word)
    separate, walks, walk = (common_format(model), followed(model, plain)), [], model_components.components
    monkeypatch.setattr(model_components, "components", lambda model: walks.append(model) or walk(model))
    assert model_components.format_and_followed(model, plain) == separate == (word, {"lm_head": "bf16"})
    assert len(walks) == 1


@pytest.mark.full
def test_an_adapter_is_loaded_over_the_same_map(tmp_path, base, caplog):
    model = adapted_model(jaxtune.from_pretrained(base, load_in="nf4", precision=MAP)[0], r=2)
    assert common_format(model) == "nf4"
    jaxtune.save_adapter(model, tmp_path / "adapter")
    again, _ = jaxtune.from_pretrained(tmp_path / "adapter")
    assert stored(again) == stored(model)
    np.testing.assert_array_equal(again(TOKENS), model(TOKENS))
    merged, wanted = (jaxtune.merge_adapter(each) for each in (again, model))
    np.testing.assert_array_equal(merged(TOKENS), wanted(TOKENS))
    with caplog.at_level(logging.WARNING, "jaxtune"):
        jaxtune.load_adapter(jaxtune.from_pretrained(base, load_in="nf4", precision=MAP)[0], tmp_path / "adapter")
        assert not caplog.records
        jaxtune.load_adapter(jaxtune.from_pretrained(base, load_in="nf4")[0], tmp_path / "adapter")
    assert "it was trained over lm_head in fp32, which is here as the other weights" in caplog.text
    # In another format, what belonged to the first one is left out.
    other, _ = jaxtune.from_pretrained(tmp_path / "adapter", load_in="int8")
    assert stored(other)["model.layers.0.mlp.up_proj"][0] == "int8"
    assert stored(other)["lm_head"] == ("float32", "float32")


@pytest.mark.full
def test_a_head_that_is_trained_whole_keeps_its_precision(base):
    model = jaxtune.from_pretrained(base, load_in="nf4", precision={"lm_head": "fp32"})[0]
    merged = jaxtune.merge_adapter(adapted_model(model, r=2, modules_to_save=["embed_tokens", "lm_head"]))
    assert merged.head.weight[...].dtype == model.head.weight[...].dtype == jnp.float32
    assert merged.embedding.weight[...].dtype == model.embedding.weight[...].dtype == jnp.bfloat16


def test_a_checkpoint_has_one_format(tmp_path, base):
    model, _ = jaxtune.from_pretrained(base, load_in="nf4", precision=MAP)
    with pytest.raises(ValueError, match=r"the weights are stored in int8 and nf4, and config.json can say one format"):
        jaxtune.save_pretrained(model, tmp_path / "mixed")
    jaxtune.save_pretrained(dequantize(model), tmp_path / "whole")
    packed, _ = jaxtune.from_pretrained(base, load_in="nf4", precision={"layers.0.*": "bf16"})
    jaxtune.save_pretrained(packed, tmp_path / "packed")
    assert stored(jaxtune.from_pretrained(tmp_path / "packed")[0]) == stored(packed)
    with pytest.raises(ValueError, match=r"precision names .*up_proj.weight.*, which the checkpoint itself stores"):
        jaxtune.from_pretrained(tmp_path / "packed", precision={"up_proj": "fp32"})


def test_a_map_over_a_checkpoint_that_is_stored_quantised(tmp_path, base):
    """It can name what is not quantised, whether the format is asked for or not, and quantises nothing more."""
    packed, _ = jaxtune.from_pretrained(base, load_in="nf4", precision={"layers.0.*": "bf16"})
    jaxtune.save_pretrained(packed, tmp_path / "packed")
    for load_in in (None, "nf4"):
        model, _ = jaxtune.from_pretrained(tmp_path / "packed", load_in=load_in, precision={"lm_head": "fp32"})
        assert stored(model) == stored(packed) | {"lm_head": ("float32", "float32")}
        with pytest.raises(ValueError, match=r"names .*layers.0.*weight, in a format, beside weights that the ch"):
            jaxtune.from_pretrained(tmp_path / "packed", load_in=load_in, precision={"layers.0.*": "nf4"})
    jaxtune.save_adapter(adapted_model(model, r=2), tmp_path / "adapter")
    again, _ = jaxtune.from_pretrained(tmp_path / "adapter")
    assert stored(again) == stored(model)


NAMES = [
    Component("model.embed_tokens"),
    *(Component(f"model.layers.{i}.mlp.{part}_proj", quantizable=True) for i in (0, 1, 10) for part in ("up", "down")),
    *(Component(f"model.layers.{i}.mlp.gate", "router") for i in (0, 1, 10)),
    Component("lm_head"),
]


def test_the_first_pattern_that_matches_decides():
    found = resolve(NAMES, {"layers.1.*": "bf16", "down_proj": "nf4", "router": "fp32"}, "fp8")
    assert found == {
        **{f"model.layers.{i}.mlp.down_proj": "nf4" for i in (0, 10)},
        **{f"model.layers.{i}.mlp.up_proj": "fp8" for i in (0, 10)},
        **{f"model.layers.{i}.mlp.gate": "fp32" for i in (0, 10)},
        **{f"model.layers.1.mlp.{name}": "bf16" for name in ("up_proj", "down_proj", "gate")},
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"layer.0.*": "bf16"},
            r"'layer.0.\*' = 'bf16': matches no module .* mlp.up_proj, .* beside them model.embed_tok",
        ),
        ({"lm_head": "nf4"}, r"'lm_head' = 'nf4': lm_head cannot be stored in a format.*take one of bf16, fp32, fp16"),
        (
            {"down_proj": "nf4", "layers.0.mlp.down_proj": "bf16"},
            r"'layers.0.mlp.down_proj' = 'bf16': patterns before it",
        ),
        ({"": "fp32"}, r"'' = 'fp32': matches no module of this model; a pattern is a name"),
        ({"up_proj": "bf61"}, r"'up_proj': 'bf61': is no precision; a module can have bf16, fp32, fp16, nf4"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        resolve(NAMES, words)


def test_a_model_that_is_stored_otherwise_is_refused():
    with pytest.raises(
        ValueError, match=r"q_proj is to be in nf4, and the model has it in float32: load it with the same"
    ):
        follow(tiny_model(), {"q_proj": "nf4"})
