"""transformers reads exported folders, those of compressed-tensors with its own reader, to the logits of the model."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from compressed_tensors.compressors import (
    MXFP4PackedCompressor,
    NVFP4PackedCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import fake_quantize, forward_quantize
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp, generate_gparam
from llama_cpp_models import made
from tiny_models import adapted_model

import jaxtune
from jaxtune import cli
from jaxtune.models.files.quant import convert_qat, prepare_qat
from jaxtune.models.lora import linears
from jaxtune.models.observed_inputs import observed_scales
from jaxtune.models.qat import rounded_inputs
from jaxtune.models.qat.fake_quant import ROUNDINGS
from jaxtune.pallas.formats.nvfp4 import NVFP4


def same_in_transformers(folder, ours, model):
    """transformers reads `folder` and computes what `ours` does, which is not what `model`, not yet rounded, does."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = np.arange(24).reshape(2, 12)
    with torch.no_grad():
        logits = theirs(torch.from_numpy(tokens)).logits.numpy()
    want = np.asarray(ours(jnp.asarray(tokens)))
    np.testing.assert_allclose(logits, want, atol=1e-5 * np.abs(want).max())
    assert np.abs(want - np.asarray(model(jnp.asarray(tokens)))).max() > 1e-3


@pytest.mark.parametrize("group", [128, 32])
def test_w4a16(tmp_path, group):
    """Groups of 128 of any model; of one trained with other groups, its own."""
    model = made("qwen2", hidden_size=128, intermediate_size=256, num_attention_heads=4)
    rounded = convert_qat(prepare_qat(model, "int4", group))
    jaxtune.export_model(model if group == 128 else rounded, tmp_path / "out", to="w4a16")
    same_in_transformers(tmp_path / "out", rounded, model)


@pytest.mark.parametrize(("to", "name"), [("fp8", "qwen2"), ("mxfp4", "gpt_oss")])
def test_eight_bits_and_mxfp4(tmp_path, to, name):
    model = made(name, hidden_size=128, intermediate_size=128, num_attention_heads=4)
    jaxtune.export_model(model, tmp_path / "out", to=to)
    if to == "fp8":  # the scheme rounds activations too, where they are multiplied: the file has weights alone
        config = json.loads((tmp_path / "out/config.json").read_text())
        config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
        (tmp_path / "out/config.json").write_text(json.dumps(config))
    ours, _ = jaxtune.from_pretrained(tmp_path / "out", dtype="float32")
    same_in_transformers(tmp_path / "out", ours, model)


@pytest.mark.full
def test_w4a8_is_read_by_compressed_tensors(tmp_path):
    """The numbers that training saw, with activations that it rounds as training did."""
    model = made("qwen2", hidden_size=128, intermediate_size=256, num_attention_heads=4)
    trained = prepare_qat(model, "int8-int4", 32)
    jaxtune.export_model(convert_qat(trained), tmp_path / "out", to="w4a8")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = np.arange(60).reshape(20, 3)
    with torch.no_grad():
        logits = theirs(torch.from_numpy(tokens)).logits.numpy()
    want = np.asarray(trained(jnp.asarray(tokens)))
    plain = np.asarray(convert_qat(trained)(jnp.asarray(tokens)))
    assert (abs(plain - want).max(-1) > 1e-2).all()  # what rounding the activations changes
    # An activation near the middle of two codes may be rounded to the other one, because the two libraries add up in
    # different orders. That changes the logits of this position and of later ones in its row, and of no other.
    assert (abs(logits - want).max(-1) < 1e-5).mean() > 0.7


@pytest.mark.parametrize("name", ["int8-int4", "fp8", "mxfp4-mxfp4"])
def test_qat_rounds_activations_as_compressed_tensors_does(name):
    kind = "int" if name == "int8-int4" else "float"
    args = QuantizationArgs(num_bits=8, type=kind, strategy="token", dynamic=True, symmetric=True)
    if name == "mxfp4-mxfp4":
        args = PRESET_SCHEMES["MXFP4"]["input_activations"]
    x = np.random.default_rng(0).standard_normal((2, 9, 64)).astype(np.float32) * 3
    scale, zero = compute_dynamic_scales_and_zp(torch.from_numpy(x), args, None)
    theirs = fake_quantize(torch.from_numpy(x), scale, zero, args).numpy()
    np.testing.assert_array_equal(ROUNDINGS[name].activations(jnp.asarray(x)), theirs)


def decompressed(folder, reader=PackedQuantizationCompressor) -> dict[str, np.ndarray]:
    """{name: weight} of what compressed-tensors' own reader makes of each linear that a folder has in four bits."""
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(said).config_groups["group_0"]
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    parts = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition(".")
        if part.startswith("weight_"):
            parts.setdefault(name, {})[part] = tensor
    weights = {name: reader.decompress(state, scheme)["weight"] for name, state in parts.items()}
    if reader is PackedQuantizationCompressor:  # MXFP4 has no tensor that says which dtype the weight had
        assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    return {name: weight.float().numpy() for name, weight in weights.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("most", [None, 0.5])
def test_qat_rounds_to_nvfp4_under_the_scale_of_compressed_tensors(dtype, most):
    """Both the scale that follows from an observed magnitude and the numbers under it, also beyond its range; theirs
    computed in float32, as ours are in every dtype."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 9, 64)).astype(np.float32) * 3)
    x = x.to(getattr(torch, dtype)).float()
    seen = x if most is None else x * most
    of_all = generate_gparam(seen.amin(), seen.amax())
    largest = jnp.float32(float(seen.abs().max()))
    ours = NVFP4.global_scale(largest)
    assert float(ours) == float(of_all)
    args = PRESET_SCHEMES["NVFP4"]["input_activations"]
    scale, zero = compute_dynamic_scales_and_zp(x, args, None, of_all)
    theirs = fake_quantize(x, scale, zero, args, global_scale=of_all)
    found = ROUNDINGS["nvfp4-nvfp4"].activations(jnp.asarray(x.numpy(), dtype), ours)
    np.testing.assert_array_equal(found, theirs.numpy().astype(dtype))


@pytest.mark.full
def test_nvfp4_with_activations_is_read_by_compressed_tensors(tmp_path):
    """The numbers that training saw, the scheme by its own name, and activations rounded as training did, under the
    scales of the file."""
    model = made("qwen2", "bfloat16", hidden_size=128, intermediate_size=256, num_attention_heads=4)
    scales = observed_scales(model, "nvfp4-nvfp4", np.arange(60, dtype=np.int32).reshape(5, 12))
    whole = convert_qat(prepare_qat(model, "nvfp4-nvfp4", input_scales=scales))
    jaxtune.export_model(whole, tmp_path / "out", to="nvfp4-nvfp4")
    same_scheme(tmp_path / "out", "NVFP4")
    found = decompressed(tmp_path / "out", NVFP4PackedCompressor)
    assert len(found) == len(list(linears(whole)))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    draw = np.random.default_rng(0)
    for name, linear in linears(whole):
        weight = np.asarray(linear.weight[...], np.float32)
        np.testing.assert_array_equal(found[name], weight, err_msg=name)
        x = 3 * draw.standard_normal((7, weight.shape[1])).astype(np.float32)  # some beyond the range that was observed
        module = theirs.get_submodule(name)
        assert module.input_global_scale.item() == scales[name]
        rounded = forward_quantize(module, torch.from_numpy(x), "input", module.quantization_scheme.input_activations)
        ours = rounded_inputs.nvfp4_activations(jnp.asarray(x), jnp.float32(scales[name]))
        np.testing.assert_array_equal(ours, rounded.numpy(), err_msg=name)


def same_scheme(folder, scheme):
    """The scheme that a folder's config.json says is one of compressed-tensors' own."""
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    group = QuantizationConfig.model_validate(said).config_groups["group_0"]
    keys = ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic", "scale_dtype", "zp_dtype")
    for part in ("weights", "input_activations"):
        wanted, own = PRESET_SCHEMES[scheme].get(part), getattr(group, part)
        assert [getattr(own, key, None) for key in keys] == [getattr(wanted, key, None) for key in keys]


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("how", ["full", "lora"])
def test_qat_exports_the_numbers_that_training_saw(tmp_path, how, group):
    """Bit for bit, from the merged model and from the adapter, read by compressed-tensors."""
    model = made("qwen2", "bfloat16", hidden_size=128, intermediate_size=256, num_attention_heads=4)
    if how == "full":
        whole = convert_qat(prepare_qat(model, "int4", group))
        folders = ["merged"]
    else:
        jaxtune.save_pretrained(model, tmp_path / "base")
        base, _ = jaxtune.from_pretrained(tmp_path / "base")
        adapted = prepare_qat(adapted_model(base, r=4), "int4", group)
        jaxtune.save_adapter(adapted, tmp_path / "adapter")
        whole = jaxtune.merge_adapter(adapted)
        folders = ["merged", "adapter"]
    jaxtune.save_pretrained(whole, tmp_path / "merged")
    seen = {name: np.asarray(linear.weight[...], np.float32) for name, linear in linears(whole)}
    for folder in folders:
        out = tmp_path / f"{folder}_w4a16"
        assert cli.main(["export", str(tmp_path / folder), str(out), "--to", "w4a16"]) == 0
        found = decompressed(out)
        assert found.keys() == seen.keys()
        for name, weight in seen.items():
            np.testing.assert_array_equal(found[name], weight, err_msg=name)


@pytest.mark.parametrize(("format", "scheme"), [("mxfp4", "MXFP4A16"), ("mxfp4-mxfp4", "MXFP4")])
def test_mxfp4_is_read_by_compressed_tensors(tmp_path, format, scheme):
    """The numbers that training saw, bit for bit, and the scheme by its own name."""
    model = made("qwen2", "bfloat16", hidden_size=128, intermediate_size=256, num_attention_heads=4)
    whole = convert_qat(prepare_qat(model, format))
    jaxtune.export_model(whole, tmp_path / "out", to=format)
    found = decompressed(tmp_path / "out", MXFP4PackedCompressor)
    assert len(found) == len(list(linears(whole)))
    for name, linear in linears(whole):
        np.testing.assert_array_equal(found[name], np.asarray(linear.weight[...], np.float32), err_msg=name)
    same_scheme(tmp_path / "out", scheme)
