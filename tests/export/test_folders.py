"""Folders for other programs: loaded again they are the model; damaged or without room they are not there."""

from __future__ import annotations

import dataclasses
import json
import shutil
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llama_cpp_models import made
from safetensors.numpy import load_file
from tiny_models import adapted_model, named

from jaxtune.export import adapters, api, folders, w4a16
from jaxtune.export.hub import push
from jaxtune.models import hf
from jaxtune.models.adapters.merge import merge_adapter
from jaxtune.models.config import Passthrough, Source
from jaxtune.models.files.headers import read_header
from jaxtune.models.files.quant import convert_qat, dequantize, prepare_qat, quantize
from jaxtune.models.files.weights import Weights
from jaxtune.models.hf import from_pretrained
from jaxtune.models.lora import linears
from jaxtune.pallas.formats import FP8, MXFP4, FourBit


def assert_same(found, wanted):
    """Every tensor of two models, bit for bit."""
    found, wanted = named(found), named(wanted)
    assert set(found) == set(wanted)
    for key, variable in wanted.items():
        np.testing.assert_array_equal(found[key].get_value(), variable.get_value(), err_msg=key)


@pytest.mark.full
def test_merged_in_shards(tmp_path, tokenizer):
    model = adapted_model(made("qwen2", "bfloat16"), r=2)
    done = api.export_model(model, tmp_path / "out", "merged", tokenizer=tokenizer, max_shard_bytes=60_000)
    assert {"config.json", "model.safetensors.index.json", "tokenizer.json"} <= set(done.files)
    assert len([name for name in done.files if name.endswith(".safetensors")]) > 2
    loaded, _ = from_pretrained(done.folder)
    assert_same(loaded, merge_adapter(model))


def test_bnb_holds_the_bytes_of_quantize(tmp_path):
    model = made("llama", "bfloat16")
    done = api.export_model(model, tmp_path / "out", "bnb-4bit")
    loaded, _ = from_pretrained(done.folder)
    for (name, found), (_, wanted) in zip(linears(loaded), linears(quantize(model)), strict=True):
        assert isinstance(found.stored_weight, FourBit)
        np.testing.assert_array_equal(found.stored_weight.codes, wanted.stored_weight.codes, err_msg=name)
    config = json.loads((done.folder / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "bitsandbytes" and config["bnb_4bit_use_double_quant"]


@pytest.mark.full
def test_what_a_quantised_model_has_in_16_bits_stays_so_and_is_noted(tmp_path):
    hf.save_pretrained(made("llama", "bfloat16"), tmp_path / "base")
    model, _ = from_pretrained(tmp_path / "base", load_in="nf4", precision={"q_proj": "bf16"})
    kept = [name for name, linear in linears(model) if name.endswith("q_proj")]
    done = api.export_model(model, tmp_path / "out", "bnb-4bit")
    loaded, _ = from_pretrained(done.folder)
    assert [name for name, linear in linears(loaded) if not isinstance(linear.stored_weight, FourBit)] == kept
    assert done.notes == (
        f"{len(kept)} matrices are kept in bfloat16: the model has them so beside its weights in nf4 "
        f"(the first is {kept[0]})",
    )
    assert api.export_model(model, tmp_path / "fp8", "fp8").notes == ()


@pytest.mark.full
def test_fp8_holds_the_bytes_of_quantize_whatever_the_model_was_in(tmp_path):
    model = made("qwen2", "bfloat16")
    wanted = quantize(dequantize(quantize(model)), "fp8")
    done = api.export_model(quantize(model), tmp_path / "out", "fp8")
    loaded, _ = from_pretrained(done.folder)
    for (name, found), (_, expected) in zip(linears(loaded), linears(wanted), strict=True):
        for ours, theirs in zip(*(jax.tree.leaves(m.stored_weight) for m in (found, expected)), strict=True):
            np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8), err_msg=name)
    config = json.loads((done.folder / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"


@pytest.mark.full
def test_w4a16_holds_codes_and_scales(tmp_path):
    """Within half a step of its group each; what was trained on such a grid, in groups of its own, to the last bit."""
    model = made("qwen2", "bfloat16", hidden_size=128, intermediate_size=256, num_attention_heads=4)
    done = api.export_model(model, tmp_path / "out", "w4a16")
    quantization = json.loads((done.folder / "config.json").read_text())["quantization_config"]
    assert quantization["format"] == "pack-quantized" and quantization["ignore"] == ["lm_head"]
    assert quantization["config_groups"]["group_0"]["weights"]["group_size"] == 128

    def read(folder, name):
        stored = load_file(folder / "model.safetensors")
        return w4a16.unpack(*(stored[f"{name}.weight_{part}"] for part in ("packed", "scale", "shape")))

    for name, linear in linears(model):
        weight = np.asarray(linear.weight[...], np.float32)
        found, steps = read(done.folder, name), np.abs(weight.reshape(len(weight), -1, 128)).max(-1) / 7
        assert found.shape == weight.shape
        assert (np.abs(found - weight).reshape(len(weight), -1, 128) <= 0.54 * steps[..., None]).all(), name
        assert np.abs(found - weight).std() < 0.15 * weight.std(), name
    trained = convert_qat(prepare_qat(model, "int4", 32))
    done = api.export_model(trained, tmp_path / "trained", "w4a16")
    for name, linear in linears(trained):
        found = jnp.asarray(read(done.folder, name)).astype("bfloat16")
        np.testing.assert_array_equal(found, linear.weight[...], err_msg=name)


def test_w4a16_of_experts_and_of_rows_that_fit_no_group(tmp_path):
    model = made("qwen3_moe", "bfloat16", hidden_size=128, moe_intermediate_size=64)
    done = api.export_model(model, tmp_path / "out", "w4a16")
    stored = load_file(done.folder / "model.safetensors")
    ignored = json.loads((done.folder / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.0.mlp.experts.1.gate_proj.weight_packed" in stored
    assert "model.layers.0.mlp.experts.1.down_proj.weight" in stored  # 64 columns
    assert {"lm_head", "model.layers.0.mlp.gate", "model.layers.0.mlp.experts.1.down_proj"} <= set(ignored)
    assert "are kept in 16 bits" in done.notes[0]
    with pytest.raises(ValueError, match="w4a16: the experts of 'gpt_oss' are stored as one tensor"):
        api.export_model(made("gpt_oss", "bfloat16"), tmp_path / "other", "w4a16")
    with pytest.raises(ValueError, match="w4a16: no linear has whole groups of 128"):
        api.export_model(made("qwen2"), tmp_path / "other", "w4a16")


@pytest.mark.full
@pytest.mark.parametrize("to", ["fp8", "w4a16"])
def test_what_vllm_multiplies_in_16_bits_stays_so(tmp_path, to):
    """Gates of shared experts and the rates of delta nets; routers, too, and the file says so."""
    model = made("qwen3_5_moe", "bfloat16", hidden_size=128)
    model = quantize(model, "fp8") if to == "fp8" else model
    done = api.export_model(model, tmp_path / "out", to)
    stored = read_header(done.folder / "model.safetensors")
    ignored = json.loads((done.folder / "config.json").read_text())["quantization_config"]["ignore"]
    kept = ["0.mlp.gate", "0.mlp.shared_expert_gate", "1.linear_attn.in_proj_a", "1.linear_attn.in_proj_b"]
    for name in (f"model.layers.{name}" for name in kept):
        assert stored[f"{name}.weight"].dtype == "BF16" and name in ignored
        assert not any(key.startswith(f"{name}.weight_") for key in stored)
    assert "model.layers.1.linear_attn.in_proj_qkv" not in ignored
    if to == "fp8":
        loaded = dict(linears(from_pretrained(done.folder)[0]))
        assert isinstance(loaded["model.layers.1.linear_attn.in_proj_qkv"].stored_weight, FP8)
        assert not isinstance(loaded["model.layers.1.linear_attn.in_proj_a"].stored_weight, FP8)


@pytest.mark.full
def test_mxfp4_is_read_as_gpt_oss_is_published(tmp_path):
    model = made("gpt_oss", "bfloat16", hidden_size=64, intermediate_size=64)
    done = api.export_model(model, tmp_path / "out", "mxfp4")
    stored = load_file(done.folder / "model.safetensors")
    blocks = stored["model.layers.0.mlp.experts.gate_up_proj_blocks"]
    assert blocks.shape == (6, 128, 2, 16) and blocks.dtype == np.uint8
    assert json.loads((done.folder / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
    loaded, _ = from_pretrained(done.folder)
    weight = np.asarray(model.layers[0].mlp.experts.gate_up_proj.weight[...], np.float32)
    found = np.asarray(loaded.layers[0].mlp.experts.gate_up_proj.weight[...], np.float32)
    assert 0.02 < np.abs(found - weight).std() / weight.std() < 0.15
    # What is in MXFP4 already stays as it is, to the last bit.
    again = api.export_model(loaded, tmp_path / "again", "mxfp4")
    kept, _ = from_pretrained(again.folder)
    np.testing.assert_array_equal(kept.layers[0].mlp.experts.gate_up_proj.weight[...], found)
    assert_same(kept, loaded)


def test_mxfp4_rounds_to_the_nearest_number_of_the_better_scale():
    draw = np.random.default_rng(0)
    wide = (draw.standard_normal((5, 64)) * 10.0 ** draw.integers(-6, 4, (5, 1))).astype(np.float32)
    wide[0, :32] = 0.0
    found = np.asarray(MXFP4.encode(jnp.asarray(wide)).decode("float32"))
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for block, got in zip(wide.reshape(-1, 32), found.reshape(-1, 32), strict=True):
        if not block.any():
            assert not got.any()
            continue
        largest = np.floor(np.log2(np.abs(block).max()))
        grids = [np.concatenate([-numbers, numbers]) * 2.0**exponent for exponent in (largest - 2, largest - 1)]
        nearest = [grid[np.abs(block[:, None] - grid).argmin(1)] for grid in grids]
        errors = [float(((block - values) ** 2).sum()) for values in nearest]
        assert np.isclose(((block - got) ** 2).sum(), min(errors), rtol=1e-5)
    with pytest.raises(ValueError, match="is not a multiple of 32"):
        MXFP4.encode(jnp.zeros((2, 48)))


@pytest.mark.parametrize("to", ["merged", "bnb-4bit", "fp8", "w4a16", "mxfp4", "adapter"])
def test_a_flipped_bit_is_noticed_and_nothing_is_left(to, tmp_path, monkeypatch):
    module, name = (adapters, "write_adapter") if to == "adapter" else (hf, "write_checkpoint")
    real = getattr(module, name)

    def write_and_flip(folder, *rest):
        written = real(folder, *rest)
        file = next(folder.glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
        return written

    monkeypatch.setattr(module, name, write_and_flip)
    name, wide = ("gpt_oss", dict(hidden_size=64, intermediate_size=64)) if to == "mxfp4" else ("qwen2", {})
    wide = dict(hidden_size=128, intermediate_size=256) if to == "w4a16" else wide
    with pytest.raises(ArithmeticError, match="read back"):
        api.export_model(adapted_model(made(name, **wide), r=2), tmp_path / "out", to)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["merged", "w4a16"])
def test_a_config_of_another_model_is_noticed(to, tmp_path, monkeypatch):
    real = hf.hf_config_of
    monkeypatch.setattr(hf, "hf_config_of", lambda *rest: real(*rest) | {"rms_norm_eps": 0.5})
    with pytest.raises(ArithmeticError, match=r"config.json, read back, describes another model"):
        api.export_model(made("qwen2", hidden_size=128, intermediate_size=256), tmp_path / "out", to)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["merged", "gguf-adapter", "adapter"])
def test_no_room(to, tmp_path, monkeypatch):
    if to.startswith("gguf"):
        pytest.importorskip("gguf")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(ValueError, match="no room to write to .*: it needs .* has 0.00 MB free"):
        api.export_model(adapted_model(made("qwen2"), r=2), tmp_path / "out", to)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            dict(to="onnx"),
            "to = .onnx. is unknown; it can be merged, bnb-4bit, fp8, nvfp4, int8, w4a16, w4a8, nvfp4-nvfp4, mxfp4, m",
        ),
        (dict(to="merged", outtype="q8_0"), "outtype = 'q8_0' is an option of gguf; merged has none"),
        (
            dict(to="gguf", outtype="q3"),
            "outtype = 'q3' is unknown; it can be f32, f16, bf16, q8_0, q6_k, q4_k_m, q4_0",
        ),
    ],
)
def test_what_cannot_be_is_refused(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        api.export_model(made("qwen2"), tmp_path / "out", **arguments)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("to", sorted(api.FORMATS.keys() - {"adapter", "gguf-adapter"}))
@pytest.mark.parametrize("broken", ["mlp.down_proj.weight", "input_layernorm.weight"])
def test_weights_that_are_not_finite_are_refused(to, broken, tmp_path, tokenizer):
    """In every format, most of which have a code for any number; a model is saved as it is."""
    if to == "gguf":
        pytest.importorskip("gguf")
    model = made("qwen2", "bfloat16", hidden_size=128, intermediate_size=256)
    if to == "nvfp4-nvfp4":
        model = convert_qat(prepare_qat(model, to, input_scales={name: 0.25 for name, _ in linears(model)}))
    weight = named(model)[f"model.layers.1.{broken}"]
    value = weight.get_value()
    weight.set_value(value.at[(-1,) * value.ndim].set(jnp.nan if to < "i" else jnp.inf))
    with pytest.raises(ArithmeticError, match=rf"export: model\.layers\.1\.{broken} has values that are not finite in"):
        api.export_model(model, tmp_path / "out", to, tokenizer=tokenizer)
    assert not any(tmp_path.iterdir())
    hf.save_pretrained(model, tmp_path / "saved")


def test_a_weight_that_is_only_finite_before_its_cast_is_refused(tmp_path, tokenizer):
    """Folders have it in the model's dtype; a GGUF file of float32 may have it as it is."""
    model = made("qwen2", "float16")
    weight = named(model)["model.norm.weight"]
    weight.set_value(weight.get_value().astype("float32").at[0].set(65519.0))
    assert api.export_model(model, tmp_path / "out", "merged").files
    weight.set_value(weight.get_value().at[0].set(65521.0))  # rounded to infinity
    with pytest.raises(ArithmeticError, match=r"model\.norm\.weight .* in float16.*load it in bfloat16 or float32"):
        api.export_model(model, tmp_path / "broken", "merged")
    pytest.importorskip("gguf")
    assert api.export_model(model, tmp_path / "gguf", "gguf", tokenizer=tokenizer, outtype="f32").files


def test_a_quantised_weight_that_is_not_finite_is_refused(tmp_path):
    model = quantize(made("qwen2", "bfloat16"), "fp8")
    name, linear = next(iter(linears(model)))
    stored = linear.stored_weight
    assert isinstance(stored, FP8)
    linear.weight.set_value(dataclasses.replace(stored, scales=stored.scales.at[0, 0].set(jnp.nan)))
    for to in ("fp8", "merged", "mxfp4"):
        with pytest.raises(ArithmeticError, match=rf"export: {name}\.weight has values that are not finite"):
            api.export_model(model, tmp_path / "out", to)
    assert not any(tmp_path.iterdir())


# ---- adapters


def test_adapters_of_experts_are_merged_as_peft_does_and_said_to_be_such(tmp_path):
    settings = dict(r=2, target_modules=["q_proj"], target_parameters=["gate_up_proj", "down_proj"])
    model = adapted_model(made("mixtral"), **settings)
    done = api.export_model(model, tmp_path / "out", "adapter")
    assert len(done.notes) == 1 and "refuse these files or answer wrongly" in done.notes[0]
    # The older layout, of experts' columns one after the other, has the same shapes and is wrong.
    found = load_file(done.folder / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight"
    other = found | {key: found[key].reshape(len(found[key]), 2, -1).swapaxes(1, 2).reshape(found[key].shape)}
    with pytest.raises(ArithmeticError, match="gate_up_proj, merged as PEFT does it, is not what the model computes"):
        adapters.verify(model, other, other)


def test_which_servers_load_an_adapter():
    assert "vLLM, SGLang and TGI load" in adapters.servers(adapted_model(made("qwen2"), r=2))[0]
    carried = Source("base", "{}", passthrough=Passthrough((), "{}"))
    for settings in ({}, {"target_parameters": ["experts.down_proj"]}):
        model = adapted_model(made("qwen3_5_moe"), r=2, **settings)
        model.source = carried
        assert "vLLM does not say so: serve the merged model" in adapters.servers(model)[0]
    model = adapted_model(made("gemma4"), r=2)
    model.source = dataclasses.replace(carried, nested=True)  # a tower's weights, in the class that transformers builds
    (note,) = adapters.servers(model)
    assert "named as in the base's model with a vision tower" in note
    assert "DoRA" in adapters.servers(adapted_model(made("qwen2"), r=2, use_dora=True))[0]
    assert (
        "read only target_modules leave these linears out"
        in adapters.servers(adapted_model(made("qwen3_next"), r=2))[0]
    )


def test_notes_on_experts_leave_no_other_note_out():
    """What PEFT names in target_parameters, experts or linears, is one reason of several."""
    model = adapted_model(made("mixtral"), r=2, target_parameters=["down_proj"], modules_to_save=["lm_head"])
    experts, whole = adapters.servers(model)
    assert "refuse these files or answer wrongly" in experts and "modules_to_save" in whole
    model = adapted_model(made("qwen3_next"), r=2, modules_to_save=["lm_head"])
    model.source = Source("base", "{}", passthrough=Passthrough((), "{}"))
    tower, linears, whole = adapters.servers(model)
    assert "vision tower" in tower and "leave these linears out" in linears and "modules_to_save" in whole


# ---- the hub


class _Hub:
    """What push asks of huggingface_hub.HfApi."""

    def __init__(self, error: Exception | None = None, has_card: bool = False):
        self.error, self.has_card, self.calls = error, has_card, []

    def whoami(self):
        if self.error is not None:
            raise self.error
        return {"name": "me"}

    def create_repo(self, repository, **options):
        self.calls.append(("create", repository, options))
        return "address/of/it"

    def upload_folder(self, **options):
        self.calls.append(("upload", options["repo_id"], options["folder_path"]))
        self.left_out = options["ignore_patterns"]

    def file_exists(self, repository, name):
        return self.has_card and name == "README.md"


def test_push(tmp_path):
    hub = _Hub()
    assert push(tmp_path, "me/model", private=True, api=hub) == "address/of/it"
    assert hub.calls == [("create", "me/model", dict(private=True, exist_ok=True)), ("upload", "me/model", tmp_path)]


def test_a_card_is_pushed_unless_it_would_replace_a_users(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/model"}')
    for text, has_card, left_out in (("", False, None), ("", True, ["README.md"]), ("# Mine", True, None)):
        if text:
            (tmp_path / "README.md").write_text(text)
        hub = _Hub(has_card=has_card)
        push(tmp_path, "me/model", api=hub)
        card = (tmp_path / "README.md").read_text()
        assert hub.left_out == left_out and (card == text or 'base_model: "org/model"' in card)


def test_push_says_what_is_missing(tmp_path):
    from huggingface_hub.errors import LocalTokenNotFoundError

    for error, message in (
        (LocalTokenNotFoundError("no token"), "not logged in to the hub; log in .hf auth login., or set HF_TOKEN"),
        (ConnectionError("refused"), "the hub cannot be reached"),
    ):
        with pytest.raises(ValueError, match=f"push: me/model: .*{message}"):
            push(tmp_path, "me/model", api=_Hub(error))
    with pytest.raises(OSError, match="no such disk"):  # of the folder, not of the hub
        push(tmp_path, "me/model", api=_Hub(OSError("no such disk")))


def test_push_to_a_hub_that_does_not_answer(tmp_path, monkeypatch):
    from huggingface_hub import HfApi, constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ValueError, match="push: me/model: the hub cannot be reached, or the upload broke off .Connect"):
        push(tmp_path, "me/model", api=HfApi(f"http://127.0.0.1:{port}", token="hf_of_nobody"))


def test_verify_names_what_is_missing(tmp_path):
    model = made("qwen2")
    planned = hf.checkpoint_tensors(Weights(model))
    written = hf.write_checkpoint(tmp_path, planned, hf.hf_config_of(model), 10**9)
    folders.verify(tmp_path, written, model.config)
    norm = written["model.norm.weight"]
    others = [dataclasses.replace(norm, shape=(1,)), dataclasses.replace(norm, dtype=np.dtype(np.uint8))]
    for wrong in (*others, dataclasses.replace(norm, sums=written["model.embed_tokens.weight"].sums)):
        with pytest.raises(ArithmeticError, match="differs from the model: model.norm.weight"):
            folders.verify(tmp_path, written | {"model.norm.weight": wrong}, model.config)
    with pytest.raises(ArithmeticError, match="differs from the model: another"):
        folders.verify(tmp_path, written | {"another": norm}, model.config)
