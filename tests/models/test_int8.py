"""Models in int8 by rows: checkpoints of bitsandbytes' LLM.int8() in and out byte for byte. What every format does is
shown in test_declared_format.py."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same_bytes, of_a_checkpoint
from flax import nnx
from tiny import CONFIGS

from jaxtune.export import api
from jaxtune.models.files import headers, shards
from jaxtune.models.files.quant import quantize, stored_in
from jaxtune.models.hf import from_pretrained, model_from_config, save_pretrained
from jaxtune.models.lora import matrices
from jaxtune.pallas.formats import dense

LINEARS = CONFIGS["llama"] | {"num_hidden_layers": 1}
EXPERTS = CONFIGS["qwen3_moe"] | {"num_hidden_layers": 1, "moe_intermediate_size": 64}
TOKENS = jnp.arange(24, dtype=jnp.int32).reshape(2, 12)
UP = "model.layers.0.mlp.up_proj"
# As transformers 5.23 writes it.
SAYS = {
    "quant_method": "bitsandbytes",
    "_load_in_8bit": True,
    "_load_in_4bit": False,
    "llm_int8_threshold": 6.0,
    "llm_int8_skip_modules": None,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "bnb_4bit_quant_type": "fp4",
    "bnb_4bit_use_double_quant": False,
    "bnb_4bit_compute_dtype": "float32",
    "bnb_4bit_quant_storage": "uint8",
    "load_in_4bit": False,
    "load_in_8bit": True,
}


def made(hf, dtype="bfloat16"):
    return model_from_config(hf, jax.random.key(0), dtype)


def load_file(file: Path) -> dict[str, np.ndarray]:
    return {name: shards.read_tensor(entry) for name, entry in headers.read_header(file).items()}


def save_file(file: Path, tensors: dict[str, np.ndarray]) -> None:
    shards.write_file(file, [(n, a.shape, a.dtype) for n, a in tensors.items()], lambda name: tensors[name])


def checkpoint(folder: Path, hf: dict, with_order: bool = True) -> dict[str, np.ndarray]:
    """A checkpoint of random codes and magnitudes in a folder; its tensors. with_order: and of weight_format."""
    save_pretrained(made(hf), folder)
    draw, found = np.random.default_rng(0), {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            found[name] = tensor
            continue
        found[name] = draw.integers(-127, 128, tensor.shape, np.int8)
        found[name.removesuffix("weight") + "SCB"] = draw.uniform(0, 0.2, len(tensor)).astype(np.float32)
        if with_order:
            found[f"{name}_format"] = np.zeros((), np.uint8)
    save_file(folder / "model.safetensors", found)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": SAYS}))
    return found


def wide(tensors: dict[str, np.ndarray], module: str) -> np.ndarray:
    """A linear's float32 weight by the definition of the format."""
    return tensors[f"{module}.weight"] * tensors[f"{module}.SCB"][:, None] * np.float32(1 / 127)


@pytest.mark.parametrize(
    ("hf", "with_order"), [(LINEARS, True), (LINEARS, False), (EXPERTS, True)], ids=["linears", "old", "experts"]
)
@pytest.mark.filterwarnings("ignore:experts in int8:UserWarning")
def test_a_checkpoint_is_read_and_written_bit_for_bit(tmp_path, hf, with_order):
    tensors = checkpoint(tmp_path / "model", hf, with_order)
    model, _ = from_pretrained(tmp_path / "model")
    assert stored_in(model) == "int8" and not jax.tree.leaves(nnx.state(model, nnx.Param))
    for name, matrix in matrices(model):
        found = np.asarray(dense(matrix.stored_weight, "float32"))
        want = of_a_checkpoint(lambda module: wide(tensors, module), name, len(found))
        np.testing.assert_array_equal(found, want, err_msg=name)
    save_pretrained(model, tmp_path / "again")
    if not with_order:
        tensors |= {f"{name}_format": np.zeros((), np.uint8) for name in tensors if name.endswith("_proj.weight")}
    assert_same_bytes(load_file(tmp_path / "again" / "model.safetensors"), tensors)
    said = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert said.items() <= (SAYS | {"llm_int8_skip_modules": said["llm_int8_skip_modules"]}).items()
    assert "lm_head" in said["llm_int8_skip_modules"]
    assert (from_pretrained(tmp_path / "again")[0].base_digest == model.base_digest) == with_order


@pytest.mark.full
def test_experts_are_not_exported_because_transformers_would_not_load_them(tmp_path):
    with pytest.raises(ValueError, match="int8: transformers 5 has no experts in int8"):
        api.export_model(made(EXPERTS), tmp_path / "out", "int8")
    with pytest.warns(UserWarning, match="experts in int8 are written as the linears of transformers 4"):
        save_pretrained(quantize(made(EXPERTS), "int8"), tmp_path / "saved")


def test_a_mistake_in_a_checkpoint_is_named(tmp_path):
    tensors = checkpoint(tmp_path / "model", LINEARS)

    def refused(words: str, **changed):
        save_file(tmp_path / "model/model.safetensors", {k: v for k, v in (tensors | changed).items() if v is not None})
        with pytest.raises(ValueError, match=words):
            from_pretrained(tmp_path / "model")

    absmax = tensors[f"{UP}.SCB"]
    refused(rf"{UP}.SCB is missing; {UP}.weight needs F32\[96\]", **{f"{UP}.SCB": None})
    refused(rf"{UP}.SCB is F32\[95\]; {UP}.weight needs F32\[96\]", **{f"{UP}.SCB": absmax[1:]})
    refused(rf"{UP}.SCB is F16\[96\]", **{f"{UP}.SCB": absmax.astype(np.float16)})
    refused(r"weight: SCB has -1; magnitudes are not negative", **{f"{UP}.SCB": np.full_like(absmax, -1)})
    refused(r"values that are not finite.*up_proj", **{f"{UP}.SCB": np.full_like(absmax, np.nan)})
    refused(rf"{UP}.weight_format is not 0 in one byte", **{f"{UP}.weight_format": np.full((), 2, np.uint8)})
    refused(
        rf"{UP}.weight is I8\[96, 64, 1\]; it must be a matrix", **{f"{UP}.weight": tensors[f"{UP}.weight"][..., None]}
    )
    refused(rf"{UP}.SCB is there, but no weight in .*I8.* beside it", **{f"{UP}.weight": None})


def test_a_config_that_speaks_of_weights_in_16_bits_says_what_to_do(tmp_path):
    """With llm_int8_has_fp16_weight files have 16 bits, and bitsandbytes quantises them at each product."""
    save_pretrained(made(LINEARS), tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    config["quantization_config"] = SAYS | {"llm_int8_has_fp16_weight": True}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="stored in int8, but none is: set load_in = 'int8'"):
        from_pretrained(tmp_path / "model")
    assert stored_in(from_pretrained(tmp_path / "model", load_in="int8")[0]) == "int8"
