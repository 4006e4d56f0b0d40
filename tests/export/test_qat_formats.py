"""What QAT rounded to a format of quantised weights is exported in that format number for number."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import of_a_checkpoint
from llama_cpp_models import made
from tiny_models import adapted_model

import jaxtune
from jaxtune import cli
from jaxtune.export import grids
from jaxtune.models.files.headers import read_header
from jaxtune.models.files.quant import convert_qat, dequantize, prepare_qat, quantize
from jaxtune.models.files.shards import read_tensor
from jaxtune.models.lora import linears, matrices
from jaxtune.models.observed_inputs import observed_scales
from jaxtune.pallas.formats import dense

gguf = pytest.importorskip("gguf")

from tests.export.test_gguf import expected_tensors, our_name  # noqa: E402


def model_of(dtype="bfloat16", family="qwen2"):
    return made(family, dtype, hidden_size=128, intermediate_size=256, num_attention_heads=4, num_hidden_layers=1)


@pytest.mark.parametrize(("to", "dtype"), [("fp8", "bfloat16"), ("int8", "bfloat16"), ("nvfp4", "float32")])
def test_the_numbers_that_training_saw_are_stored(tmp_path, to, dtype):
    model = convert_qat(prepare_qat(model_of(dtype), to))
    jaxtune.export_model(model, tmp_path / "out", to)
    loaded, _ = jaxtune.from_pretrained(tmp_path / "out", dtype=dtype)
    for (name, ours), (_, theirs) in zip(linears(model), linears(loaded), strict=True):
        found = np.asarray(dense(theirs.stored_weight, dtype))
        np.testing.assert_array_equal(found, ours.weight[...], err_msg=name)


@pytest.mark.full
def test_a_merged_adapter_is_stored_as_training_saw_it(tmp_path, to="nvfp4"):
    """Encoding the rounded weights anew would change numbers; the corrected scales do not."""
    jaxtune.save_pretrained(model_of(), tmp_path / "base")
    base, _ = jaxtune.from_pretrained(tmp_path / "base", dtype="bfloat16")
    trained = prepare_qat(adapted_model(base, r=2), to)
    jaxtune.export_model(trained, tmp_path / "out", to)
    loaded, _ = jaxtune.from_pretrained(tmp_path / "out", dtype="bfloat16")
    changed = 0
    for (name, ours), (_, theirs) in zip(linears(jaxtune.merge_adapter(trained)), linears(loaded), strict=True):
        wanted = np.asarray(ours.weight[...])
        np.testing.assert_array_equal(np.asarray(dense(theirs.stored_weight)), wanted, err_msg=name)
        changed += (np.asarray(grids.FORMATS[to].encode(ours.weight[...]).decode()) != wanted).sum()
    assert changed


def test_w4a8_holds_the_codes_and_scales_that_training_saw(tmp_path):
    model = convert_qat(prepare_qat(model_of(), "int8-int4", 32))
    jaxtune.export_model(model, tmp_path / "out", "w4a8")
    says = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    (group,) = says["config_groups"].values()
    assert says["format"] == "int-quantized" and says["ignore"] == ["lm_head"]
    assert group["input_activations"]["strategy"] == "token" and group["input_activations"]["dynamic"]
    assert group["weights"]["num_bits"] == 4 and group["weights"]["group_size"] == 32
    entries = read_header(tmp_path / "out/model.safetensors")
    for name, linear in linears(model):
        codes, scales = (read_tensor(entries[f"{name}.{part}"]) for part in ("weight", "weight_scale"))
        assert codes.dtype == np.int8 and abs(codes.astype(int)).max() == 8
        found = codes.astype(np.float32) * np.repeat(scales.astype(np.float32), 32, axis=1)
        np.testing.assert_array_equal(found.astype(scales.dtype), linear.weight[...], err_msg=name)


@pytest.mark.full
@pytest.mark.parametrize(
    ("outtype", "family", "dtype"),
    [("q4_0", "llama", "bfloat16"), ("q8_0", "llama", "bfloat16"), ("q4_0", "gpt_oss", "bfloat16")]
    + [("q4_0", "qwen2", "float32"), ("q8_0", "qwen2", "float32")],
)
def test_gguf_holds_the_numbers_that_training_saw(tmp_path, tokenizer, outtype, family, dtype):
    """Read by gguf itself, bit for bit, with an adapter or (experts) after full fine-tuning; embedding and head, which
    training does not round, have the types that they always have."""
    model = made(family, dtype, num_hidden_layers=1) if family != "gpt_oss" else made(family, dtype)
    whole = family == "gpt_oss"
    prepared = prepare_qat(model if whole else adapted_model(model, r=2), outtype)
    rounded = convert_qat(prepared) if whole else jaxtune.merge_adapter(prepared)
    done = jaxtune.export_model(
        rounded if whole else prepared, tmp_path / "out", "gguf", outtype=outtype, tokenizer=tokenizer
    )
    for (name, trains), (_, linear) in zip(linears(prepared), linears(rounded), strict=True):
        if trains.fake_quant is not None:
            seen = jax.jit(trains.rounded_weight)(jnp.ones((1, 1)))  # by the forward of a step
            np.testing.assert_array_equal(seen, linear.weight[...], err_msg=name)
    wanted, checked = expected_tensors(family, rounded), 0
    for tensor in gguf.GGUFReader(tmp_path / "out" / done.files[0]).tensors:
        if tensor.name.startswith("blk") and tensor.tensor_type.name == outtype.upper():
            found = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(found, wanted[our_name(family, tensor.name)], err_msg=tensor.name)
            checked += 1
    assert checked == 7 * len(model.layers)
    (note,) = [note for note in done.notes if "left them as they were" in note]
    assert "token_embd.weight" in note and ": rounded now, to Q8_0, because" in note and "blk" not in note


@pytest.mark.full
def test_gguf_of_another_grid_or_of_changed_weights_is_refused(tmp_path, tokenizer):
    def export(model, outtype):
        jaxtune.export_model(model, tmp_path / "out", "gguf", outtype=outtype, tokenizer=tokenizer)

    model = convert_qat(prepare_qat(model_of(), "q4_0"))
    for outtype in ("q8_0", "q4_k_m"):
        with pytest.raises(ValueError, match=r"\(q4_0 in groups of 32, bfloat16\): take gguf --outtype q4_0, which"):
            export(model, outtype)
    # The scales of int4 and int8 are not those of float16, or their products are rounded.
    for other, outtype in (("int4", "q4_0"), ("int8", "q8_0")):
        with pytest.raises(ValueError, match=f"'gguf in {outtype}' rounds weights to a grid of its own"):
            export(convert_qat(prepare_qat(model_of(), other, 32)), outtype)
    jaxtune.save_pretrained(convert_qat(prepare_qat(model_of("float32"), "q4_0")), tmp_path / "wide")
    with pytest.raises(ValueError, match=r"'gguf in q4_0' in bfloat16 cannot represent .*: take float32 \(dtype, --dt"):
        export(jaxtune.from_pretrained(tmp_path / "wide", dtype="bfloat16")[0], "q4_0")
    linear = next(linear for _, linear in linears(model))
    block = linear.weight[...][0, :32]
    linear.weight = linear.weight.replace(linear.weight[...].at[0, :2].set(0.3 * abs(block).max()))  # 2.4 steps
    with pytest.raises(
        ValueError, match=r"numbers of model.layers.0.self_attn.q_proj.weight are not on the grid of Q4_0"
    ):
        export(model, "q4_0")
    assert not (tmp_path / "out").exists()


EXPERTS = dict(hidden_size=64, moe_intermediate_size=32, num_hidden_layers=1)


@pytest.mark.parametrize(
    ("family", "how", "format", "to", "dtype"),
    [
        ("qwen2", "full", "mxfp4", "mxfp4", "bfloat16"),
        ("qwen2", "full", "mxfp4", "mxfp4", "float32"),
        ("qwen2", "full", "mxfp4-mxfp4", "mxfp4", "bfloat16"),
        ("qwen2", "lora", "mxfp4-mxfp4", "mxfp4-mxfp4", "bfloat16"),
        ("qwen3_moe", "full", "mxfp4", "mxfp4", "bfloat16"),
        ("qwen3_moe", "full", "mxfp4-mxfp4", "mxfp4-mxfp4", "float32"),
    ],
)
def test_mxfp4_holds_the_numbers_that_training_saw(tmp_path, family, how, format, to, dtype):
    """Of linears and experts, read by the definition of compressed-tensors' layout and by jaxtune, bit for bit."""
    model = made(family, dtype, **EXPERTS) if family == "qwen3_moe" else model_of(dtype)
    prepared = prepare_qat(model if how == "full" else adapted_model(model, r=2), format)
    whole = convert_qat(prepared) if how == "full" else jaxtune.merge_adapter(prepared)
    jaxtune.export_model(prepared if how == "lora" else whole, tmp_path / "out", to)
    entries = read_header(tmp_path / "out/model.safetensors")
    found = {
        name.removesuffix(".weight_packed"): e2m1_blocks(
            *(read_tensor(entries[name.replace("packed", part)]) for part in ("packed", "scale"))
        )
        for name in entries
        if name.endswith(".weight_packed")
    }
    loaded, _ = jaxtune.from_pretrained(tmp_path / "out", dtype=dtype)
    for (name, ours), (_, theirs) in zip(matrices(whole), matrices(loaded), strict=True):
        wanted = np.asarray(ours.weight[...], np.float32)
        np.testing.assert_array_equal(np.asarray(theirs.weight[...], np.float32), wanted, err_msg=name)
        if ours.quantizable:
            stored = of_a_checkpoint(found.__getitem__, name, len(wanted))
            np.testing.assert_array_equal(stored, wanted, err_msg=name)
    says = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    (group,) = says["config_groups"].values()
    assert says["format"] == group["format"] == "mxfp4-pack-quantized" and "lm_head" in says["ignore"]
    number = dict(num_bits=4, type="float", symmetric=True, strategy="group", group_size=32)
    number |= dict(scale_dtype="torch.uint8", zp_dtype="torch.uint8")
    assert group["weights"] == number | {"dynamic": False}
    assert group["input_activations"] == (number | {"dynamic": True} if to == "mxfp4-mxfp4" else None)


TOKENS = np.arange(36, dtype=np.int32).reshape(3, 12)


@pytest.mark.full
@pytest.mark.parametrize(("how", "dtype"), [("full", "float32"), ("full", "bfloat16"), ("lora", "bfloat16")])
@pytest.mark.parametrize("to", ["nvfp4-nvfp4", "nvfp4"])
def test_nvfp4_with_activations_holds_what_training_saw(tmp_path, how, dtype, to):
    """The weights' numbers, read by the layout's definition and by jaxtune, and the observed scales; without
    activations the same weights alone. From a merged folder and from the adapter's, by the command."""
    jaxtune.save_pretrained(model_of(dtype), tmp_path / "base")
    base, _ = jaxtune.from_pretrained(tmp_path / "base", dtype=dtype)
    scales = observed_scales(base, "nvfp4-nvfp4", TOKENS)
    model = base if how == "full" else adapted_model(base, r=2)
    prepared = prepare_qat(model, "nvfp4-nvfp4", input_scales=scales)
    whole = convert_qat(prepared) if how == "full" else jaxtune.merge_adapter(prepared)
    jaxtune.save_pretrained(whole, tmp_path / "merged")
    if how == "lora":
        jaxtune.save_adapter(prepared, tmp_path / "adapter")
    for folder in ("merged", "adapter") if how == "lora" else ("merged",):
        out = tmp_path / f"{folder}_{to}"
        assert cli.main(["export", str(tmp_path / folder), str(out), "--to", to, "--dtype", dtype]) == 0
        entries = read_header(out / "model.safetensors")
        loaded, _ = jaxtune.from_pretrained(out, dtype=dtype)
        for (name, ours), (_, theirs) in zip(linears(whole), linears(loaded), strict=True):
            packed, own, of_matrix = (
                read_tensor(entries[f"{name}.weight_{part}"]) for part in ("packed", "scale", "global_scale")
            )
            found = e2m1_numbers(packed) * np.repeat(own.astype(np.float32) / of_matrix, 16, axis=1)
            wanted = np.asarray(ours.weight[...])
            np.testing.assert_array_equal(found.astype(wanted.dtype), wanted, err_msg=name)
            np.testing.assert_array_equal(np.asarray(dense(theirs.stored_weight, dtype)), wanted, err_msg=name)
            stored = entries.get(f"{name}.input_global_scale")
            if to == "nvfp4":
                assert stored is None and theirs.stored_weight.input_scale is None
            else:
                assert read_tensor(stored).tolist() == [scales[name]] and read_tensor(stored).dtype == np.float32
                assert theirs.stored_weight.input_scale.item() == scales[name]
        says = json.loads((out / "config.json").read_text())
        (group,) = says["quantization_config"]["config_groups"].values()
        local = group["weights"] | {"dynamic": "local"}
        assert group["input_activations"] == (local if to == "nvfp4-nvfp4" else None) and "qat" not in says


@pytest.mark.full
def test_a_scale_of_which_float32_rounds_a_product_to_a_middle_is_found():
    """In one of these matrices the scale of training is outside of what its numbers allow in exact arithmetic."""
    shape = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4)
    model = convert_qat(prepare_qat(made("qwen2", "bfloat16", **shape), "nvfp4"))
    for name, linear in linears(model):
        weight = linear.weight[...]
        np.testing.assert_array_equal(grids.exactly(name, "nvfp4", weight).decode("bfloat16"), weight, err_msg=name)


@pytest.mark.full
def test_nvfp4_with_activations_needs_their_ranges(tmp_path):
    for model in (model_of(), convert_qat(prepare_qat(model_of(), "nvfp4"))):
        with pytest.raises(ValueError, match="nvfp4-nvfp4"):
            jaxtune.export_model(model, tmp_path / "out", "nvfp4-nvfp4")
    with pytest.raises(
        ValueError, match="the model has no ranges of activations, which quantisation-aware training ob"
    ):
        jaxtune.export_model(model_of(), tmp_path / "out", "nvfp4-nvfp4")
    scales = observed_scales(model_of(), "nvfp4-nvfp4", TOKENS)
    whole = convert_qat(prepare_qat(model_of(), "nvfp4-nvfp4", input_scales=scales))
    with pytest.raises(
        ValueError, match="take nvfp4-nvfp4, which stores that grid, or nvfp4, which stores that grid, or"
    ):
        jaxtune.export_model(whole, tmp_path / "out", "mxfp4")
    assert not (tmp_path / "out").exists()


def e2m1_numbers(packed: np.ndarray) -> np.ndarray:
    """The numbers float32[out, in] of codes uint8[out, in / 2] of e2m1, the first of two in the low bits."""
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    return np.concatenate([numbers, -numbers])[np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)]


def e2m1_blocks(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """A weight float32[out, in] of mxfp4-pack-quantized: codes uint8[out, in / 2], the first of two in the low bits,
    and exponents uint8[out, in / 32] with a bias of 127."""
    assert packed.dtype == scales.dtype == np.uint8
    return e2m1_numbers(packed) * np.repeat(np.float32(2) ** (scales.astype(np.float32) - 127), 32, axis=1)


@pytest.mark.full
def test_what_mxfp4_cannot_hold_stays_in_16_bits_or_is_refused(tmp_path):
    """Rows that are not whole blocks of 32, which training does not round either; activations of gpt-oss."""
    model = made("qwen2", "bfloat16", hidden_size=64, intermediate_size=80, num_hidden_layers=1)
    whole = convert_qat(prepare_qat(model, "mxfp4"))
    done = jaxtune.export_model(whole, tmp_path / "out", "mxfp4")
    assert done.notes == ("1 matrices are kept in bfloat16: their rows are not whole blocks of 32",)
    loaded, _ = jaxtune.from_pretrained(done.folder)
    for (name, ours), (_, theirs) in zip(linears(whole), linears(loaded), strict=True):
        np.testing.assert_array_equal(theirs.weight[...], ours.weight[...], err_msg=name)
    says = json.loads((done.folder / "config.json").read_text())["quantization_config"]
    assert says["ignore"] == ["lm_head", "model.layers.0.mlp.down_proj"]
    odd = made("qwen2", hidden_size=48, intermediate_size=80, num_attention_heads=4, num_hidden_layers=1)
    with pytest.raises(ValueError, match="mxfp4: no linear has rows of whole blocks of 32; take fp8"):
        jaxtune.export_model(odd, tmp_path / "odd", "mxfp4")
    with pytest.raises(ValueError, match="gpt-oss as it is published says nothing of activations; take mxfp4"):
        jaxtune.export_model(made("gpt_oss"), tmp_path / "odd", "mxfp4-mxfp4")


def gpt_oss():
    return made("gpt_oss", "bfloat16", hidden_size=64, intermediate_size=64)


@pytest.mark.full
@pytest.mark.parametrize("how", ["full", "lora"])
def test_gpt_oss_holds_the_numbers_that_training_saw(tmp_path, how):
    """As it is published: its experts in MXFP4, and all other weights as they are."""
    prepared = prepare_qat(gpt_oss() if how == "full" else adapted_model(gpt_oss(), r=2), "mxfp4")
    whole = convert_qat(prepared) if how == "full" else jaxtune.merge_adapter(prepared)
    done = jaxtune.export_model(whole if how == "full" else prepared, tmp_path / "out", "mxfp4")
    says = json.loads((done.folder / "config.json").read_text())
    assert says["quantization_config"]["quant_method"] == "mxfp4" and "qat" not in says
    assert whole.qat is not None
    for (name, ours), (_, theirs) in zip(
        matrices(whole), matrices(jaxtune.from_pretrained(done.folder)[0]), strict=True
    ):
        np.testing.assert_array_equal(theirs.weight[...], ours.weight[...], err_msg=name)
    experts = whole.layers[0].mlp.experts.down_proj
    experts.weight = experts.weight.replace(experts.weight[...].at[0, 0].multiply(1.03))
    with pytest.raises(ValueError, match="experts.down_proj are not on the grid of mxfp4 to which the model says"):
        jaxtune.export_model(whole, tmp_path / "changed", "mxfp4")


@pytest.mark.full
def test_gpt_oss_in_another_format_is_decoded_first(tmp_path):
    packed = quantize(gpt_oss(), "nf4")
    done = jaxtune.export_model(packed, tmp_path / "out", "mxfp4")
    wanted = jaxtune.export_model(dequantize(packed), tmp_path / "wanted", "mxfp4")
    for name in ("model.safetensors", "config.json"):
        assert (done.folder / name).read_bytes() == (wanted.folder / name).read_bytes()


def test_weights_of_another_grid_are_refused(tmp_path):
    model = convert_qat(prepare_qat(model_of(), "fp8"))
    for to in ("nvfp4", "w4a16", "int8"):
        with pytest.raises(ValueError, match=r"to another \(fp8, bfloat16\): take fp8, which stores that"):
            jaxtune.export_model(model, tmp_path / "out", to)
    linear = next(linear for _, linear in linears(model))
    linear.weight = linear.weight.replace(linear.weight[...].at[0, 0].multiply(1.03))
    with pytest.raises(ValueError, match=r"numbers of model.layers.0.self_attn.q_proj are not on the grid of fp8"):
        jaxtune.export_model(model, tmp_path / "out", "fp8")
