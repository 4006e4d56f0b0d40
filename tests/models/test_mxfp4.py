"""Checkpoints in compressed-tensors' `mxfp4-pack-quantized`, of linears and of experts: read as the layout defines
them, and refused where they are not whole. Exports are shown in tests/export/test_qat_formats.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import of_a_checkpoint
from tiny import CONFIGS

from jaxtune.models.files import headers, shards
from jaxtune.models.files.quant import stored_in
from jaxtune.models.hf import from_pretrained, model_from_config, save_pretrained
from jaxtune.models.lora import matrices
from jaxtune.pallas.formats import MXFP4

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
LINEARS = CONFIGS["llama"] | {"num_hidden_layers": 1}
EXPERTS = CONFIGS["qwen3_moe"] | {"num_hidden_layers": 1, "moe_intermediate_size": 64}
NUMBER = {"num_bits": 4, "type": "float", "group_size": 32, "symmetric": True, "strategy": "group"}
SAYS = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "kv_cache_scheme": None,
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": NUMBER, "input_activations": NUMBER}},
    "ignore": ["lm_head"],
}


def checkpoint(folder: Path, hf: dict, says: dict = SAYS, change=lambda tensors: None) -> dict[str, np.ndarray]:
    """A checkpoint of random codes and scales in a folder; its tensors. change: what is then done with the tensors."""
    save_pretrained(model_from_config(hf, jax.random.key(0), "bfloat16"), folder)
    draw, found = np.random.default_rng(0), {}
    for name, entry in headers.read_header(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            found[name] = shards.read_tensor(entry)
            continue
        rows, columns = entry.shape
        found[f"{name}_packed"] = draw.integers(0, 256, (rows, columns // 2), np.uint8)
        found[f"{name}_scale"] = draw.integers(110, 130, (rows, columns // 32), np.uint8)
    change(found)
    parts = [(name, tensor.shape, tensor.dtype) for name, tensor in found.items()]
    shards.write_file(folder / "model.safetensors", parts, found.__getitem__)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": says}))
    return found


@pytest.mark.full
@pytest.mark.parametrize("hf", [LINEARS, EXPERTS], ids=["linears", "experts"])
def test_a_checkpoint_is_decoded_as_its_layout_defines(tmp_path, hf):
    tensors = checkpoint(tmp_path / "model", hf)

    def wide(module: str) -> np.ndarray:
        packed, scales = tensors[f"{module}.weight_packed"], tensors[f"{module}.weight_scale"]
        values = E2M1[np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)]
        return values * np.repeat(np.float32(2) ** (scales.astype(np.float32) - 127), 32, axis=1)

    for dtype in ("bfloat16", "float32"):  # both represent every number
        model, _ = from_pretrained(tmp_path / "model", dtype)
        assert stored_in(model) is None and model.qat is None
        checked = 0
        for name, matrix in matrices(model):
            if matrix.quantizable:
                found = np.asarray(matrix.weight[...], np.float32)
                np.testing.assert_array_equal(found, of_a_checkpoint(wide, name, len(found)), err_msg=name)
                checked += 1
        assert checked == (6 if hf is EXPERTS else 7)
    assert stored_in(from_pretrained(tmp_path / "model", load_in="nf4")[0]) == "nf4"
    first = next(name for name in tensors if name.endswith("_scale"))
    other = checkpoint(tmp_path / "other", hf, change=lambda tensors: tensors[first].__setitem__((0, 0), 99))
    assert other[first][0, 0] == 99
    assert from_pretrained(tmp_path / "other", "float32")[0].base_digest != model.base_digest


NAME = "model.layers.0.mlp.up_proj.weight"


def nan_scale(tensors):
    """A block whose scale is NaN, with codes of zero, which would be decoded to finite numbers."""
    tensors[f"{NAME}_packed"][3, 16:32], tensors[f"{NAME}_scale"][3, 1] = 0, 255


@pytest.mark.parametrize(
    ("says", "change", "message"),
    [
        (SAYS, lambda tensors: tensors.pop(f"{NAME}_scale"), "up_proj.weight: .weight_scale is missing; codes U8"),
        (
            SAYS,
            lambda tensors: tensors.update({f"{NAME}_scale": tensors[f"{NAME}_scale"][1:]}),
            r"up_proj.weight: .weight_scale is U8\[",
        ),
        (SAYS, nan_scale, r"up_proj.weight_scale\[3, 1\] is 255, which is NaN in MXFP4, as 1 of its"),
        (SAYS, lambda tensors: tensors.pop(f"{NAME}_packed"), "up_proj.weight_scale is there, but no weight in"),
        (
            SAYS | {"config_groups": {"group_0": {"weights": NUMBER | {"group_size": 16}}}},
            lambda tensors: None,
            "group_0.weights.group_size = 16: of mxfp4-pack-quantized only 32 is supported",
        ),
        (SAYS | {"kv_cache_scheme": {"num_bits": 8}}, lambda tensors: None, "kv_cache_scheme = .*: only null"),
    ],
)
def test_what_is_not_whole_or_not_supported_is_refused(tmp_path, says, change, message):
    checkpoint(tmp_path / "model", LINEARS, says, change)
    with pytest.raises(ValueError, match=re.compile(message)):
        from_pretrained(tmp_path / "model")


def test_activations_are_within_seven_scales():
    """Every magnitude of float32, zeros and the largest among them: the scale is a power of two, and what is clipped is
    between 6 and 7 times it."""
    exponents = np.arange(-140, 128)
    x = (np.random.default_rng(1).uniform(1, 2, (len(exponents), 64)) * 2.0 ** exponents[:, None]).astype(np.float32)
    x = np.concatenate([x, np.zeros((1, 64), np.float32), np.full((1, 64), np.finfo(np.float32).max)])
    stored = MXFP4.encode_activations(jnp.asarray(x))
    assert stored.problem() is None and stored.shape == x.shape
    wide = np.asarray(stored.decode("float32"), np.float64).reshape(-1, 32)
    scale = 2.0 ** (np.asarray(stored.scales, np.float64).reshape(-1, 1) - 127)
    size = abs(x.astype(np.float64)).reshape(-1, 32)
    # Above 1.75 * 2^127 the next power would make numbers infinite.
    assert ((size < 7 * scale) | (scale == 2.0**125)).all() and (size.max(1, keepdims=True) >= 3.5 * scale)[
        scale > 2.0**-126
    ].all()
    error = abs(wide - np.copysign(size, x.reshape(-1, 32)))
    normal = (scale > 2.0**-124).ravel()  # smaller products are zero on some devices
    assert (error <= np.where(size > 6 * scale, size - 6 * scale, np.maximum(scale / 4, size / 4)))[normal].all()
