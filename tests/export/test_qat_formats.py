"""What QAT rounded to a format of quantised weights is exported in that format number for number."""

from __future__ import annotations

import json

import numpy as np
import pytest
from llama_cpp_models import made
from tiny_models import adapted_model

import jaxtune
from jaxtune.export import grids
from jaxtune.models.files.headers import read_header
from jaxtune.models.files.quant import convert_qat, prepare_qat
from jaxtune.models.files.shards import read_tensor
from jaxtune.models.lora import linears
from jaxtune.pallas.formats import dense

pytestmark = pytest.mark.usefixtures("compiled_quickly")


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


def test_weights_of_another_grid_are_refused(tmp_path):
    model = convert_qat(prepare_qat(model_of(), "fp8"))
    for to in ("nvfp4", "w4a16", "int8"):
        with pytest.raises(ValueError, match=r"to another \(fp8, bfloat16\): take fp8, which stores that"):
            jaxtune.export_model(model, tmp_path / "out", to)
    linear = next(linear for _, linear in linears(model))
    linear.weight = linear.weight.replace(linear.weight[...].at[0, 0].multiply(1.03))
    with pytest.raises(ValueError, match=r"numbers of model.layers.0.self_attn.q_proj are not on the grid of fp8"):
        jaxtune.export_model(model, tmp_path / "out", "fp8")
