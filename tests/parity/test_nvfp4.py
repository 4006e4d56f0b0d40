"""NVFP4 against compressed-tensors' own compressor and reader: bytes in, bytes out, and what they stand for."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import NVFP4 as BOTH
from compressed_tensors.quantization.quant_scheme import NVFP4A16 as WEIGHTS
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from tiny import CONFIGS

import jaxtune
from jaxtune.export import api
from jaxtune.models.hf import model_from_config
from jaxtune.models.lora import matrices
from jaxtune.pallas.formats import FORMATS

SCHEME = QuantizationScheme(targets=["Linear"], **WEIGHTS)


def theirs(weight: torch.Tensor, scales: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """What llm-compressor writes of a weight [out, in], without calibration of its activations, under scales in
    float32. scales: of blocks; by default those of its observer."""
    scale = generate_gparam(weight.float().min(), weight.float().max())
    blocks = weight.float().reshape(len(weight), -1, 16)
    if scales is None:
        scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), SCHEME.weights, scale)
    state = {"weight": weight, "weight_scale": scales, "weight_global_scale": scale}
    return NVFP4PackedCompressor.compress(state, SCHEME)


def array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return tensor.numpy()


def decoded(state: dict[str, torch.Tensor]) -> np.ndarray:
    return NVFP4PackedCompressor.decompress(state, SCHEME)["weight"].float().numpy()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", ["normal", "small", "wide", "zeros", "halves"])
def test_codes_are_theirs_and_scales_no_worse(dtype, kind):
    """Under our scales of blocks the bytes are theirs; of each block the error is at most that under their scales."""
    draw = np.random.default_rng(0)
    values = draw.standard_normal((48, 160)).astype(np.float32)
    if kind == "wide":
        values *= np.exp2(draw.integers(-12, 12, values.shape)).astype(np.float32)
    if kind == "small":
        values *= np.float32(1e-3)
    if kind == "zeros":
        values[:, :64] = 0.0
    if kind == "halves":  # on and between the numbers of e2m1
        values = draw.integers(-24, 25, values.shape).astype(np.float32) / 4
        values[0, 0] = 6 * 448
    tensor = torch.tensor(values).to(getattr(torch, dtype))
    ours = FORMATS["nvfp4"].encode(jnp.asarray(values, dtype))
    want = theirs(tensor, torch.tensor(np.asarray(ours.scales).astype(np.float32), dtype=tensor.dtype))
    np.testing.assert_array_equal(np.asarray(ours.tensor_scale).reshape(1), array(want["weight_global_scale"]))
    np.testing.assert_array_equal(np.asarray(ours.scales), array(want["weight_scale"]))
    np.testing.assert_array_equal(np.asarray(ours.codes), array(want["weight_packed"]))
    np.testing.assert_array_equal(np.asarray(ours.decode("bfloat16")).astype(np.float32), decoded(want))
    exact, other = tensor.float().numpy().reshape(48, -1, 16), theirs(tensor)
    fields = dict(codes=array(other["weight_packed"]), scales=array(other["weight_scale"]))
    numbers = (each.decode("float32") for each in (ours, dataclasses.replace(ours, **fields)))
    own, other = (np.square(np.asarray(each).reshape(exact.shape) - exact).sum(-1) for each in numbers)
    assert (own <= 1.001 * other + 1e-5 * np.square(exact).max(-1)).all()
    assert kind != "normal" or own.sum() < 0.8 * other.sum()


def test_what_is_exported_is_read_by_their_reader(tmp_path):
    """Every linear of an export decodes to the same numbers there and here; their classes accept the config."""
    hf = CONFIGS["llama"] | {"num_hidden_layers": 1}
    model = model_from_config(hf, jax.random.key(0), "bfloat16")
    api.export_model(model, tmp_path / "out", "nvfp4")
    said = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(said)
    (group,) = config.config_groups.values()
    assert group.weights.model_dump() == SCHEME.weights.model_dump() and group.input_activations is None
    assert config.format == CompressionFormat.nvfp4_pack_quantized.value
    tensors = load_file(tmp_path / "out/model.safetensors")
    again, _ = jaxtune.from_pretrained(tmp_path / "out")
    for name, matrix in matrices(again):
        keys = ("weight_packed", "weight_scale", "weight_global_scale")
        want = decoded({key: tensors[f"{name}.{key}"] for key in keys})
        np.testing.assert_array_equal(np.asarray(matrix.stored_weight.decode("bfloat16")).astype(np.float32), want)


def test_their_files_go_in_and_out(tmp_path):
    """With scales of activations, as llm-compressor's NVFP4 has them: every byte and every word of the config."""
    hf = CONFIGS["llama"] | {"num_hidden_layers": 1}
    jaxtune.save_pretrained(model_from_config(hf, jax.random.key(0), "bfloat16"), tmp_path / "plain")
    tensors, packed = load_file(tmp_path / "plain/model.safetensors"), {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            found = theirs(tensor) | {"input_global_scale": torch.tensor([37.25])}
            packed |= {name.removesuffix("weight") + key: value.contiguous() for key, value in found.items()}
        else:
            packed[name] = tensor
    save_file(packed, tmp_path / "plain/model.safetensors", {"format": "pt"})
    scheme = QuantizationScheme(targets=["Linear"], **BOTH)
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        quantization_status="compressed",
        format="nvfp4-pack-quantized",
    ).to_dict()
    file = tmp_path / "plain/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    model, _ = jaxtune.from_pretrained(tmp_path / "plain")
    jaxtune.save_pretrained(model, tmp_path / "again")
    written = load_file(tmp_path / "again/model.safetensors")
    assert written.keys() == packed.keys()
    for name, tensor in packed.items():
        assert (written[name].dtype, written[name].shape) == (tensor.dtype, tensor.shape), name
        np.testing.assert_array_equal(array(written[name].view(torch.uint8)), array(tensor.view(torch.uint8)), name)
    said = json.loads((tmp_path / "again/config.json").read_text())["quantization_config"]
    again = QuantizationConfig.model_validate(said).config_groups["group_0"]
    assert again.weights.model_dump() == scheme.weights.model_dump()
    ours, wanted = again.input_activations.model_dump(), scheme.input_activations.model_dump()
    assert {k: v for k, v in ours.items() if k != "observer"} == {k: v for k, v in wanted.items() if k != "observer"}
