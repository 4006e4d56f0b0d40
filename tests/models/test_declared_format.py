"""A format of weights says what it is in one file, and the rest follows: it is loaded, saved, multiplied by, planned,
divided over a mesh and trained over. This is shown of a toy in tests/models/toy_format.py, which nothing else knows,
and of formats whose own files of tests do not show it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_format
from flax import nnx
from tiny import CONFIGS
from tiny_models import adapted_model, shaken
from toy_format import FORMAT

import jaxtune
from jaxtune.export import api
from jaxtune.models.files.headers import read_header
from jaxtune.models.files.quant import dequantize, quantize, stored_in
from jaxtune.models.files.weights import Weights
from jaxtune.models.hf import Pretrained, from_pretrained, model_from_config, save_pretrained, save_weights
from jaxtune.models.lora import get_peft_model, matrices
from jaxtune.pallas import formats
from jaxtune.pallas.formats.layout import Layout
from jaxtune.pallas.formats.stored import Stored
from jaxtune.train.config import AdapterConfig, MeshConfig
from jaxtune.train.planning.cost import step_cost
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.trainer import Trainer
from scripts import docs_hooks
from tests.train.tiny_runs import dataset, documents, make_config

HF = CONFIGS["llama"] | {"num_hidden_layers": 1}
EXPERTS = CONFIGS["qwen3_moe"] | {"num_hidden_layers": 1, "moe_intermediate_size": 64}
TOKENS = jnp.arange(12, dtype=jnp.int32)[None]
WORDS = ("q8", "int8")


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(formats.FORMATS, "q8", FORMAT)


def made(hf, dtype="float32"):
    return model_from_config(hf, jax.random.key(0), dtype)


def assert_same(one, other, word):
    for (name, a), (_, b) in zip(matrices(one), matrices(other), strict=True):
        assert isinstance(a.stored_weight, formats.FORMATS[word].kinds), name
        jax.tree.map(np.testing.assert_array_equal, a.stored_weight, b.stored_weight)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("hf", [HF, EXPERTS], ids=["linears", "experts"])
@pytest.mark.filterwarnings("ignore:experts in:UserWarning")  # transformers does not load all that jaxtune does
def test_a_checkpoint_goes_in_and_out(tmp_path, hf, word):
    model = quantize(made(hf), word)
    save_pretrained(model, tmp_path / "packed")
    (layout,) = formats.FORMATS[word].layouts
    assert layout.recognises(json.loads((tmp_path / "packed/config.json").read_text())["quantization_config"])
    pretrained = Pretrained(tmp_path / "packed", "float32")
    assert pretrained.stored_in == word
    again = pretrained.load()
    assert_same(model, again, word)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(again)))
    marks = [each for each in read_header(tmp_path / "packed/model.safetensors").values() if not each.shape]
    assert pretrained.device_bytes() == kept + sum(each.size_bytes for each in marks)  # read, and not part of a weight
    # Quantised on the way, or by an export: the same bytes.
    save_pretrained(made(hf), tmp_path / "plain")
    assert_same(model, from_pretrained(tmp_path / "plain", "float32", load_in=word)[0], word)
    save_weights(Weights(made(hf)).quantized(word), tmp_path / "export")
    assert (tmp_path / "export/model.safetensors").read_bytes() == (tmp_path / "packed/model.safetensors").read_bytes()


def test_what_is_wrong_is_said(tmp_path):
    save_pretrained(quantize(made(HF), "q8"), tmp_path / "model")
    with pytest.raises(ValueError, match="load_in = 'nf4', but its weights are stored in q8"):
        from_pretrained(tmp_path / "model", load_in="nf4")
    config = json.loads((tmp_path / "model/config.json").read_text())
    config["quantization_config"]["quant_method"] = "q9"
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"quant_method = 'q9'; of quantised .* can be loaded: .*; Q8"):
        from_pretrained(tmp_path / "model")


@pytest.mark.full
@pytest.mark.parametrize("word", WORDS)
def test_an_adapter_trains_over_it_as_over_the_decoded_weights(tmp_path, word):
    losses = []
    for name, mesh in (("packed", MeshConfig()), ("decoded", MeshConfig()), ("mesh", MeshConfig(data=2, fsdp=2))):
        model = get_peft_model(quantize(made(EXPERTS), word), r=4)
        model = dequantize(model) if name == "decoded" else model
        config = make_config(tmp_path / name, steps=4, mesh=mesh)
        trainer = Trainer(shaken(model, 1), None, config, dataset(documents(24)))
        trainer.train()
        losses.append([line["loss"] for line in trainer.history])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    np.testing.assert_allclose(losses[0], losses[2], rtol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("word", [*WORDS, "nvfp4"])
def test_an_adapters_gradients_are_those_over_the_decoded_weights(word):
    packed = adapted_model(quantize(made(HF), word), r=2)
    plain, tokens = dequantize(packed), jnp.arange(24, dtype=jnp.int32).reshape(2, 12)

    def gradients(model):
        graph, trainable, frozen = nnx.split(model, nnx.Param, ...)

        def loss(trainable):
            return jnp.sin(nnx.merge(graph, trainable, frozen)(tokens)).sum()

        return jax.jit(jax.value_and_grad(loss))(trainable)

    (loss, got), (want_loss, want) = gradients(packed), gradients(plain)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other) and np.asarray(one).any()


@pytest.mark.full
@pytest.mark.parametrize(("word", "largest_error"), [("int8", 0.01), ("nvfp4", 0.12)])
def test_16_bit_weights_are_quantised_on_the_way_and_exported(tmp_path, word, largest_error):
    """The export is read back as the model that load_in makes, and exported as it is; an adapter over it is merged
    before it."""
    save_pretrained(made(HF, "bfloat16"), tmp_path / "plain")
    model, _ = from_pretrained(tmp_path / "plain", load_in=word)
    plain, _ = from_pretrained(tmp_path / "plain")
    done = api.export_model(plain, tmp_path / "out", word)
    again, _ = from_pretrained(done.folder)
    assert_same(model, again, word)
    for (_, one), (_, other) in zip(matrices(model), matrices(plain), strict=True):
        packed, whole = (formats.dense(m.stored_weight, "float32").astype("float32") for m in (one, other))
        assert 0 < float(jnp.linalg.norm(packed - whole) / jnp.linalg.norm(whole)) < largest_error
    api.export_model(again, tmp_path / "twice", word)
    assert (tmp_path / "twice/model.safetensors").read_bytes() == (done.folder / "model.safetensors").read_bytes()
    adapted = adapted_model(again, r=2)
    merged = jaxtune.merge_adapter(adapted)
    assert stored_in(merged) is None
    both = [api.export_model(m, tmp_path / f"of {m is merged}", word).folder for m in (adapted, merged)]
    assert len({(folder / "model.safetensors").read_bytes() for folder in both}) == 1


@pytest.mark.parametrize("word", WORDS)
def test_the_planner_counts_it(word):
    config = dataclasses.replace(make_config("unused", steps=1), adapter=AdapterConfig(r=4))
    packed, plain = (get_peft_model(m, r=4) for m in (quantize(made(HF), word), made(HF)))
    parts, others = (step_cost(model, StepSpec.of(config)) for model in (packed, plain))
    saved = others.fixed["frozen weights"] - parts.fixed["frozen weights"]
    stored = [m.stored_weight for _, m in matrices(packed)]
    assert saved == sum(4 * weight.size - weight.nbytes for weight in stored)


@pytest.mark.full
@pytest.mark.parametrize("word", WORDS)
def test_an_adapter_over_it_is_merged(tmp_path, word):
    model = adapted_model(quantize(made(HF), word), r=2)
    np.testing.assert_allclose(model(TOKENS), jaxtune.merge_adapter(model)(TOKENS), atol=1e-3)
    jaxtune.save_adapter(model, tmp_path / "adapter")
    assert stored_in(model) == word
    plain, again = made(HF), jaxtune.load_adapter(quantize(made(HF), word), tmp_path / "adapter")
    np.testing.assert_array_equal(model(TOKENS), again(TOKENS))
    assert stored_in(plain) is None and toy_format.BLOCK == 32


def test_the_documentation_shows_the_whole_format():
    """docs/extending.md: its code is run there, and here it is loaded, saved and trained over."""
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
    assert "class Q8(Stored)" not in page and "class Q8(Stored)" in docs_hooks.on_page_markdown(page)


@pytest.mark.parametrize(("title", "base"), [("**The class**", Stored), ("**A layout**", Layout)])
def test_the_documentation_names_the_members(title, base):
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
    rows = page.partition(title)[2].partition("\n\n| member |")[2].partition("\n\n")[0].splitlines()[2:]
    names = [name for row in rows for name in re.findall(r"`(\w+)", row.split("|")[1])]
    assert len(names) >= 10
    assert [name for name in names if not hasattr(base, name) and name not in base.__annotations__] == []
