"""Weights that QAT put on a grid are exported as training saw them, or not at all."""

from __future__ import annotations

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from llama_cpp_models import made
from tiny_models import adapted_model

import jaxtune
from jaxtune import cli
from jaxtune.export import w4a16
from jaxtune.models.files.headers import read_header
from jaxtune.models.files.quant import convert_qat, prepare_qat, quantize
from jaxtune.models.files.shards import read_tensor
from jaxtune.models.lora import linears
from jaxtune.models.qat.fake_quant import FakeQuant

GROUPS = (32, 64, 128)


def model_of(dtype="bfloat16"):
    return made("qwen2", dtype, hidden_size=128, intermediate_size=256, num_attention_heads=4, num_hidden_layers=1)


def trained(folder, how: str, group: int, dtype="bfloat16"):
    """(the folder that a run of QAT leaves, the model with the rounded weights)"""
    if how == "full":
        whole = convert_qat(prepare_qat(model_of(dtype), group_size=group))
    else:
        jaxtune.save_pretrained(model_of(dtype), folder / "base")
        base, _ = jaxtune.from_pretrained(folder / "base", dtype=dtype)
        model = prepare_qat(adapted_model(base, r=2), group_size=group)
        jaxtune.save_adapter(model, folder / "adapter")
        whole = jaxtune.merge_adapter(model)
    jaxtune.save_pretrained(whole, folder / "merged")
    return folder / ("adapter" if how == "adapter" else "merged"), whole


def packed(folder) -> dict[str, np.ndarray]:
    """{name: what a reader multiplies with} of each linear in four bits."""
    entries = read_header(folder / "model.safetensors")
    names = [name.removesuffix(".weight_packed") for name in entries if name.endswith(".weight_packed")]
    found = {}
    for name in names:
        codes, scales, shape = (read_tensor(entries[f"{name}.weight_{part}"]) for part in ("packed", "scale", "shape"))
        found[name] = w4a16.unpack(codes, scales, shape).astype(scales.dtype).astype(np.float32)
    return found


@pytest.mark.full
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("how", ["full", "lora", "adapter"])
def test_w4a16_holds_the_numbers_that_training_saw(tmp_path, how, group):
    folder, whole = trained(tmp_path, how, group)
    assert cli.main(["export", str(folder), str(tmp_path / "out"), "--to", "w4a16"]) == 0
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == group
    found = packed(tmp_path / "out")
    assert len(found) == 7
    for name, linear in linears(whole):
        np.testing.assert_array_equal(found[name], np.asarray(linear.weight[...], np.float32), err_msg=name)


def test_a_folder_of_an_older_version_names_its_grid_without_a_dtype(tmp_path):
    folder, whole = trained(tmp_path, "full", 32)
    config = json.loads((folder / "config.json").read_text())
    del config["qat"]["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    again, _ = jaxtune.from_pretrained(folder)
    assert again.qat == whole.qat == FakeQuant("int4", 32, "bfloat16")


@pytest.mark.parametrize("how", ["full", "adapter"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--to", "bnb-4bit"],
            "'bnb-4bit' rounds weights to a grid of its own, and quantisation-aware training rounded",
        ),
        (["--to", "fp8"], r"\(int4 in groups of 32, bfloat16\): take w4a16, which stores that grid"),
        (["--to", "gguf", "--outtype", "q4_0"], "'gguf in q4_0' rounds weights"),
        (["--to", "gguf", "--outtype", "q8_0"], "'gguf in q8_0' rounds weights"),
        (["--to", "gguf", "--outtype", "q4_k_m"], "'gguf in q4_k_m' rounds weights"),
        (["--to", "gguf", "--outtype", "f16"], "in float16 cannot represent weights .*: take bfloat16"),
        (["--to", "gguf", "--dtype", "float16"], "in float16 cannot represent weights .*: take bfloat16"),
        (["--to", "w4a16", "--dtype", "float16"], "cannot represent weights .*: take bfloat16"),
        (["--to", "w4a16", "--dtype", "float32"], "cannot represent weights .*: take bfloat16"),
    ],
)
def test_what_cannot_hold_the_grid_is_refused(tmp_path, capsys, how, arguments, message):
    folder, _ = trained(tmp_path, how, 32)
    assert cli.main(["export", str(folder), str(tmp_path / "out"), *arguments]) == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_another_dtype_is_refused_by_merged_too(tmp_path, capsys):
    folder, _ = trained(tmp_path, "adapter", 32)
    assert cli.main(["export", str(folder), str(tmp_path / "out"), "--dtype", "float16"]) == 2
    assert "to = 'merged' in float16 cannot represent weights" in capsys.readouterr().err
    model, _ = jaxtune.from_pretrained(tmp_path / "merged", dtype="float16")
    with pytest.raises(ValueError, match="the model is in float16, which cannot represent weights"):
        jaxtune.save_pretrained(model, tmp_path / "other")
    wide, _ = jaxtune.from_pretrained(tmp_path / "merged", dtype="float32")  # which holds all
    jaxtune.save_pretrained(wide, tmp_path / "wide")
    assert jaxtune.from_pretrained(tmp_path / "wide")[0].qat == FakeQuant("int4", 32, "bfloat16")


def test_weights_that_left_their_grid_are_not_exported_on_it(tmp_path):
    folder, _ = trained(tmp_path, "full", 32)
    model, _ = jaxtune.from_pretrained(folder)
    _, linear = next(linears(model))
    linear.weight.set_value(linear.weight[...].at[0, :32].mul(jnp.linspace(0.5, 1.5, 32).astype("bfloat16")))
    with pytest.raises(ValueError, match=r"w4a16: 1 groups of model.layers.0.self_attn.q_proj are not on the grid"):
        jaxtune.export_model(model, tmp_path / "out", "w4a16")
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_what_trains_on_from_a_grid_leaves_it(tmp_path):
    """An adapter over rounded weights, or four bits of another kind, have no grid; nor says their config.json so."""
    folder, _ = trained(tmp_path, "full", 32)
    model, _ = jaxtune.from_pretrained(folder)
    for other in (jaxtune.merge_adapter(adapted_model(model, r=2)), quantize(model)):
        assert other.qat is None
    assert jaxtune.from_pretrained(folder, load_in="nf4")[0].qat is None
    jaxtune.export_model(adapted_model(model, r=2), tmp_path / "out", "w4a16")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == w4a16.GROUP


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("int4", "config.json: qat = 'int4': must be an object"),
        ({"format": "int3", "group_size": 32}, "config.json: qat: qat format 'int3' is not supported"),
        ({"format": "int4", "group_size": 16}, "config.json: qat: qat group_size 16: int4 has groups of 32, 64 or 128"),
        ({"format": "int4", "group_size": 32, "dtype": "int8"}, "config.json: qat: dtype = 'int8'"),
    ],
)
def test_a_grid_that_is_not_known_is_refused(tmp_path, said, message):
    jaxtune.save_pretrained(model_of(), tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"qat": said}))
    with pytest.raises(ValueError, match=message):
        jaxtune.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize("to", ["adapter", "gguf-adapter"])
def test_an_adapter_alone_says_that_its_weights_were_rounded(tmp_path, to):
    model = adapted_model(made("llama", num_hidden_layers=1), r=2)
    rounded = prepare_qat(model, group_size=32)
    assert not any("rounded merged weights" in note for note in jaxtune.export_model(model, tmp_path / "a", to).notes)
    notes = jaxtune.export_model(rounded, tmp_path / "b", to).notes
    assert sum("rounded merged weights to int4 in groups of 32" in note for note in notes) == 1
