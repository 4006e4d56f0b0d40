"""PEFT's adapter files, out and in again; what peft itself makes of them is in tests/parity/test_peft.py."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from llama_cpp_models import made
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiny import CONFIGS
from tiny_models import adapted_model, golden_model, tiny_model

from jaxtune import from_pretrained, get_peft_model, load_adapter, save_adapter, save_pretrained
from jaxtune.models.adapters.adapter_config import base_of
from jaxtune.models.adapters.adapter_files import adapter_tensors
from jaxtune.models.hf import model_from_config
from jaxtune.models.lora import copy_structure, linears

TOKENS = jnp.arange(24).reshape(2, 12)
PREFIX = "base_model.model."

SETTINGS = {
    "lora": dict(),
    "rslora": dict(r=4, lora_alpha=6, use_rslora=True, lora_dropout=0.25),
    "dora": dict(r=4, use_dora=True),
    "patterns": dict(
        r=4, rank_pattern={"q_proj": 2, "layers.1.mlp.up_proj": 3}, alpha_pattern={"layers.0.*": 5, "down_proj": 2.5}
    ),
    "list": dict(r=2, target_modules=["q_proj", "layers.1.mlp.up_proj", "model.layers.0.mlp.down_proj"]),
    "regex": dict(r=2, target_modules=r"model\.layers\.1\..*_proj"),
    "saved": dict(r=2, modules_to_save=["embed_tokens", "lm_head"]),
    "saved_head": dict(r=2, modules_to_save=["lm_head"]),
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", SETTINGS)
def test_saved_adapter_loads_back_the_same(tmp_path, name, tied):
    base = tiny_model(tie_embeddings=tied)
    model = adapted_model(base, **SETTINGS[name])
    save_adapter(model, tmp_path / "adapter")
    loaded = load_adapter(base, tmp_path / "adapter")
    assert nnx.graphdef(loaded) == nnx.graphdef(model)  # ranks, alphas, dropout, rsLoRA, DoRA, what trains
    np.testing.assert_array_equal(loaded(TOKENS), model(TOKENS))
    assert float(jnp.abs(model(TOKENS) - base(TOKENS)).max()) > 1e-2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter"]
    assert sorted(os.listdir(tmp_path / "adapter")) == ["adapter_config.json", "adapter_model.safetensors"]


EXPERTS = dict(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])


@pytest.mark.parametrize("load_in", [None, "nf4", "fp8"])
@pytest.mark.parametrize("name", [*SETTINGS, "experts"])
def test_an_adapter_read_beside_its_base_is_the_one_read_after_it(tmp_path, caplog, name, load_in):
    hf = CONFIGS["qwen3_moe" if name == "experts" else "llama"]
    save_pretrained(model_from_config(hf, jax.random.key(0), "bfloat16"), tmp_path / "base")
    base, _ = from_pretrained(tmp_path / "base", load_in=load_in)
    settings = EXPERTS if name == "experts" else SETTINGS[name]
    save_adapter(adapted_model(base, **settings), tmp_path / "adapter")
    shapes = []
    after, _ = from_pretrained(tmp_path / "adapter")
    caplog.clear()
    beside, _ = from_pretrained(tmp_path / "adapter", beside=lambda model, *_: shapes.append(nnx.state(model)))
    assert nnx.graphdef(beside) == nnx.graphdef(after) and beside.source == after.source and caplog.text == ""
    assert (beside.base_digest, beside.base_fingerprint) == (base.base_digest, base.base_fingerprint)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(beside), nnx.state(after))
    found, want = (jax.tree.leaves(state) for state in (shapes[0], nnx.state(after)))
    assert [leaf.shape for leaf in found] == [leaf.shape for leaf in want]
    edit_tensors(tmp_path / "adapter", **{next(iter(adapter_tensors(after))): np.full((3, 1), np.nan, np.float32)})
    with pytest.raises(ValueError, match="not finite"):
        from_pretrained(tmp_path / "adapter", beside=lambda *_: None)


def test_file_layout(tmp_path):
    save_adapter(adapted_model(tiny_model(), **SETTINGS["dora"], modules_to_save=["lm_head"]), tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    name = PREFIX + "model.layers.0.mlp.down_proj"
    assert {key: tensors[f"{name}.{key}"].shape for key in ("lora_A.weight", "lora_B.weight")} == {
        "lora_A.weight": (4, 24),
        "lora_B.weight": (16, 4),
    }
    assert tensors[f"{name}.lora_magnitude_vector"].shape == (16,)
    assert tensors[f"{PREFIX}lm_head.weight"].shape == (48, 16)
    assert len(tensors) == 2 * 7 * 3 + 1
    assert all(tensor.dtype == np.float32 for tensor in tensors.values())


def saved_config(tmp_path, **settings) -> dict:
    save_adapter(adapted_model(tiny_model(tie_embeddings=True), **settings), tmp_path / "a")
    return json.loads((tmp_path / "a" / "adapter_config.json").read_text())


def test_the_same_adapter_makes_the_same_bytes(tmp_path):
    """Files of a run that was killed and went on are compared byte by byte with those of one that was not."""
    model = adapted_model(tiny_model(), r=3)
    model.base_fingerprint = "of the base"
    for number in range(8):  # the safetensors library puts metadata in another order each time
        save_adapter(model, tmp_path / str(number))
    assert len({(tmp_path / str(number) / "adapter_model.safetensors").read_bytes() for number in range(8)}) == 1


def test_config_names_exactly_the_targets_and_patterns(tmp_path):
    config = saved_config(
        tmp_path,
        r=4,
        lora_alpha=8,
        target_modules=r".*(q_proj|layers\.1\.mlp\.up_proj|down_proj)",
        rank_pattern={"down_proj": 2},
        alpha_pattern={"layers.1.self_attn.q_proj": 3},
        modules_to_save=["lm_head"],
    )
    assert config["target_modules"] == ["down_proj", "model.layers.1.mlp.up_proj", "q_proj"]
    assert (config["r"], config["rank_pattern"]) == (4, {"down_proj": 2})
    assert (config["lora_alpha"], config["alpha_pattern"]) == (8, {"model.layers.1.self_attn.q_proj": 3})
    # One tensor here, and one in PEFT.
    assert config["modules_to_save"] == ["embed_tokens", "lm_head"] and config["ensure_weight_tying"] is True


def test_linears_that_peft_takes_for_experts_are_named_as_parameters(tmp_path):
    base = golden_model("qwen3_next")
    settings = dict(target_parameters=["mlp.experts.down_proj"], rank_pattern={"down_proj": 3})
    model = adapted_model(base, r=2, target_modules=["q_proj", "up_proj", "down_proj"], **settings)
    save_adapter(model, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj"]
    assert config["target_parameters"] == ["down_proj.weight", "mlp.experts.down_proj", "up_proj.weight"]
    assert config["rank_pattern"] == {"down_proj": 3, "down_proj.weight": 3}
    assert nnx.graphdef(load_adapter(base, tmp_path / "a")) == nnx.graphdef(model)


def test_base_model_keeps_its_arrays_and_shares_them(tmp_path):
    base = tiny_model()
    save_adapter(adapted_model(base, **SETTINGS["saved_head"]), tmp_path / "a")
    before = [
        (path, variable, variable.get_value()) for path, variable in nnx.iter_graph(base) if _is_variable(variable)
    ]
    loaded = load_adapter(base, tmp_path / "a")
    assert all(variable.get_value() is value for _, variable, value in before)
    assert not adapter_tensors(copy_structure(base)).keys() & {f"{PREFIX}model.layers.0.mlp.up_proj.lora_A.weight"}
    assert loaded.embedding.weight.get_value() is base.embedding.weight.get_value()


def _is_variable(value) -> bool:
    return isinstance(value, nnx.Variable)


def test_fingerprint_is_kept_and_another_base_refused(tmp_path):
    base, other, unknown = tiny_model(), tiny_model(seed=5), tiny_model(seed=5)
    base.base_fingerprint, other.base_fingerprint = "abc", "xyz"
    save_adapter(adapted_model(base, r=2), tmp_path / "a")
    with safe_open(tmp_path / "a" / "adapter_model.safetensors", "numpy") as file:
        assert file.metadata()["jaxtune_base_fingerprint"] == "abc"
    assert load_adapter(base, tmp_path / "a").base_fingerprint == "abc"
    load_adapter(unknown, tmp_path / "a")  # a base built in Python has none: nothing to compare
    with pytest.raises(ValueError, match="trained on another base .fingerprint abc, this model's is xyz"):
        load_adapter(other, tmp_path / "a")


def test_adapter_in_bfloat16_becomes_float32(tmp_path):
    base = tiny_model()
    save_adapter(adapted_model(base, r=2), tmp_path / "a")
    path = tmp_path / "a" / "adapter_model.safetensors"
    save_file({key: np.asarray(jnp.asarray(value, jnp.bfloat16)) for key, value in load_file(path).items()}, path)
    assert {v.get_value().dtype for v in adapter_tensors(load_adapter(base, tmp_path / "a")).values()} == {
        jnp.float32.dtype
    }


def edit_tensors(folder: Path, **changes):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    for key, value in changes.items():
        key = PREFIX + "model.layers.0.mlp.up_proj." + key.replace("__", ".")
        tensors.pop(key, None)
        if value is not None:
            tensors[key] = np.asarray(value, np.float32)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(lora_A__weight=None), r"1 missing: .*layers\.0\.mlp\.up_proj\.lora_A"),
        (dict(lora_C__weight=np.zeros(3)), r"1 unexpected: .*layers\.0\.mlp\.up_proj\.lora_C"),
        (dict(lora_A__weight=np.zeros((3, 16))), r"1 misshaped: .*lora_A\.weight \(3, 16\) instead of \(2, 16\)"),
        (dict(lora_A__weight=np.full((2, 16), np.nan)), r"1 not finite: .*up_proj\.lora_A"),
    ],
    ids=["missing", "unexpected", "misshaped", "not finite"],
)
def test_tensors_that_do_not_fit_are_listed_and_refused(tmp_path, changes, message):
    base = tiny_model()
    save_adapter(adapted_model(base, r=2), tmp_path / "a")
    edit_tensors(tmp_path / "a", **changes)
    with pytest.raises(ValueError, match=message):
        load_adapter(base, tmp_path / "a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(lora_bias=True), "lora_bias = True is a PEFT feature that is not supported"),
        (dict(target_parameters=["mlp.experts"]), "target_parameters = "),
        (dict(trainable_token_indices=[1]), "trainable_token_indices = "),
        (dict(layer_replication=[[0, 1]]), "layer_replication = "),
        (dict(fan_in_fan_out=True), "fan_in_fan_out = "),
        (dict(some_future_setting=3), "some_future_setting = 3"),
        (dict(bias="all"), "bias = 'all' is not supported"),
        (dict(init_lora_weights="pissa_niter_4"), "changes the base's weights"),
        (dict(init_lora_weights="OLoRA"), "changes the base's weights"),  # PEFT takes it in any case
        (dict(peft_type="IA3"), "peft_type is 'IA3'"),
        (dict(r=None), "r is missing"),
        (dict(target_modules=["c_attn"]), "match no linear of this model"),
        (dict(layers_to_transform=[0], layers_pattern="h"), "layers_pattern = 'h'"),
        (dict(layers_to_transform=[0]), "14 unexpected"),
        (dict(exclude_modules=["q_proj"]), "4 unexpected"),
        (dict(target_modules=["q_proj"]), "24 unexpected"),
        (dict(r=3), "28 misshaped"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_are_not_supported_are_named(tmp_path, changes, message):
    base = tiny_model()
    save_adapter(adapted_model(base, r=2), tmp_path / "a")
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=re.escape(message)):
        load_adapter(base, tmp_path / "a")


def test_a_base_of_another_revision_is_not_taken_for_the_main_one(tmp_path):
    save_adapter(adapted_model(tiny_model(), r=2), tmp_path / "a")
    path = tmp_path / "a" / "adapter_config.json"
    config = json.loads(path.read_text()) | dict(base_model_name_or_path="org/model", revision="v2")
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="revision = 'v2': of org/model only the main revision is fetched"):
        base_of(tmp_path / "a")
    for settings in (dict(base_model_name_or_path=str(tmp_path)), dict(revision="main"), dict(revision=None)):
        path.write_text(json.dumps(config | settings))
        assert base_of(tmp_path / "a") == settings.get("base_model_name_or_path", "org/model")


def test_layers_to_transform_and_exclude_modules_are_followed(tmp_path):
    base = tiny_model()
    model = adapted_model(base, r=2, target_modules=r"model\.layers\.1\.(mlp\..*|self_attn\.[kvo]_proj)")
    save_adapter(model, tmp_path / "a")
    path = tmp_path / "a" / "adapter_config.json"
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "absent_proj"]
    changes = dict(target_modules=targets, layers_to_transform=[1], layers_pattern="layers", exclude_modules=["q_proj"])
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    np.testing.assert_array_equal(load_adapter(base, tmp_path / "a")(TOKENS), model(TOKENS))


def test_a_linear_beside_the_layers_is_of_no_layer(tmp_path):
    """Gemma 4's per_layer_model_projection, which PEFT leaves out where layers_to_transform is given."""
    base = made("gemma4_shared")
    save_adapter(adapted_model(base, r=2, target_modules=r"model\.layers\.1\.self_attn\.q_proj"), tmp_path / "a")
    path = tmp_path / "a" / "adapter_config.json"
    changes = dict(target_modules=["q_proj", "per_layer_model_projection"], layers_to_transform=[1])
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    adapted = [name for name, linear in linears(load_adapter(base, tmp_path / "a")) if linear.lora is not None]
    assert adapted == ["model.layers.1.self_attn.q_proj"]


def test_adapter_that_unties_a_tied_head_is_refused(tmp_path):
    save_adapter(adapted_model(tiny_model(), **SETTINGS["saved"]), tmp_path / "a")
    with pytest.raises(ValueError, match="the model ties them"):
        load_adapter(tiny_model(tie_embeddings=True), tmp_path / "a")


def test_files_that_are_not_there_or_damaged(tmp_path):
    base = tiny_model()
    with pytest.raises(ValueError, match="is not a folder"):
        load_adapter(base, tmp_path / "nowhere")
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match=r"has no adapter_config\.json"):
        load_adapter(base, tmp_path / "a")
    save_adapter(adapted_model(base, r=2), tmp_path / "b")
    weights = tmp_path / "b" / "adapter_model.safetensors"
    content = weights.read_bytes()
    for cut in (len(content) - 8, 100, 4, 0):
        weights.write_bytes(content[:cut])
        with pytest.raises(ValueError, match="truncated: expected|not a whole safetensors file"):
            load_adapter(base, tmp_path / "b")
    weights.unlink()
    with pytest.raises(ValueError, match=r"has no adapter_model\.safetensors"):
        load_adapter(base, tmp_path / "b")
    (tmp_path / "b" / "adapter_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match="is a pickle"):
        load_adapter(base, tmp_path / "b")


def test_saving_is_refused_or_complete(tmp_path, monkeypatch):
    base = tiny_model()
    model = adapted_model(base, r=2)
    with pytest.raises(ValueError, match="has no adapter"):
        save_adapter(base, tmp_path / "a")
    save_adapter(model, tmp_path / "a")
    with pytest.raises(ValueError, match="is a folder that is not empty"):
        save_adapter(model, tmp_path / "a")
    (tmp_path / "empty").mkdir()
    save_adapter(model, tmp_path / "empty")
    assert load_adapter(base, tmp_path / "empty").layers[0].mlp.up_proj.lora.rank == 2

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxtune.models.files.shards.write_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_adapter(model, tmp_path / "b")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "empty"]


def test_what_an_adapter_file_cannot_hold_is_refused(tmp_path):
    model = get_peft_model(tiny_model(), r=2)
    model.norm.weight = nnx.Param(model.norm.weight.get_value())
    with pytest.raises(ValueError, match=r"norm\.weight are trained too"):
        save_adapter(model, tmp_path / "a")
    model = adapted_model(tiny_model(), r=2)
    lora = model.layers[1].mlp.up_proj.lora
    lora.b.set_value(lora.b.get_value().at[0, 0].set(jnp.inf))
    with pytest.raises(ValueError, match=r"not finite.*layers\.1\.mlp\.up_proj\.lora_B"):
        save_adapter(model, tmp_path / "a")
    assert not list(tmp_path.iterdir())
