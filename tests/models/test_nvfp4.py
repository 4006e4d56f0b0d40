"""Models in NVFP4: checkpoints of compressed-tensors and of nvidia-modelopt in and out byte for byte, experts, a
mesh. Gradients of adapters and exports are shown in test_declared_format.py."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checks import assert_same_bytes, of_a_checkpoint
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from tiny import CONFIGS
from tiny_models import shaken

from jaxtune.models.adapters.adapter_files import load_adapter, save_adapter
from jaxtune.models.files import headers, shards
from jaxtune.models.files.quant import dequantize, quantize, stored_in
from jaxtune.models.hf import from_pretrained, model_from_config, save_pretrained
from jaxtune.models.lora import get_peft_model, matrices
from jaxtune.pallas.formats import dense
from jaxtune.pallas.formats.nvfp4 import NVFP4
from jaxtune.train.config import MeshConfig
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import dataset, documents, make_config

E4M3 = ml_dtypes.float8_e4m3fn
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
LINEARS = CONFIGS["llama"] | {"num_hidden_layers": 1}
EXPERTS = CONFIGS["qwen3_moe"] | {"num_hidden_layers": 1, "moe_intermediate_size": 64}
TOKENS = jnp.arange(24, dtype=jnp.int32).reshape(2, 12)
# kind: (codes, scale of the tensor, scale of activations, shape of these, what config.json says)
NUMBER = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
KINDS = {
    "compressed-tensors": (
        "weight_packed",
        "weight_global_scale",
        "input_global_scale",
        (1,),
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "kv_cache_scheme": None,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": NUMBER}},
        },
    ),
    "modelopt": (
        "weight",
        "weight_scale_2",
        "input_scale",
        (),
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": NUMBER, "input_activations": NUMBER}},
        },
    ),
}


def made(hf, dtype="bfloat16"):
    return model_from_config(hf, jax.random.key(0), dtype)


def load_file(file: Path) -> dict[str, np.ndarray]:
    return {name: shards.read_tensor(entry) for name, entry in headers.read_header(file).items()}


def save_file(file: Path, tensors: dict[str, np.ndarray]) -> None:
    shards.write_file(file, [(n, a.shape, a.dtype) for n, a in tensors.items()], lambda name: tensors[name])


def checkpoint(folder: Path, hf: dict, kind: str, inputs: bool = True) -> dict[str, np.ndarray]:
    """A checkpoint of random codes and scales in a folder; its tensors. inputs: with scales of activations."""
    save_pretrained(made(hf), folder)
    draw, found = np.random.default_rng(0), {}
    codes, of_tensor, of_inputs, shape, says = KINDS[kind]
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            found[name] = tensor
            continue
        module, (rows, columns) = name.removesuffix("weight"), tensor.shape
        scale = draw.uniform(500, 4000)
        found[module + codes] = draw.integers(0, 256, (rows, columns // 2), np.uint8)
        found[module + "weight_scale"] = draw.uniform(1, 448, (rows, columns // 16)).astype(np.float32).astype(E4M3)
        found[module + of_tensor] = np.full(shape, 100 * scale if kind[0] == "c" else 0.01 / scale, np.float32)
        if inputs:
            found[module + of_inputs] = np.full(shape, draw.uniform(1, 9), np.float32)
    save_file(folder / "model.safetensors", found)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": says}))
    return found


def wide(tensors: dict[str, np.ndarray], module: str, kind: str) -> np.ndarray:
    """A linear's float32 weight by the definition of its layout."""
    codes, of_tensor, *_ = KINDS[kind]
    packed, scales = tensors[f"{module}.{codes}"], tensors[f"{module}.weight_scale"].astype(np.float32)
    values = E2M1[np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)]
    whole = tensors[f"{module}.{of_tensor}"].reshape(1, 1)
    return values * np.repeat(scales / whole if kind[0] == "c" else scales * whole, 16, axis=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("hf", "inputs"), [(LINEARS, True), (LINEARS, False), (EXPERTS, True)], ids=["w4a4", "w4a16", "experts"]
)
def test_a_checkpoint_is_read_and_written_bit_for_bit(tmp_path, kind, hf, inputs):
    tensors = checkpoint(tmp_path / "model", hf, kind, inputs)
    model, _ = from_pretrained(tmp_path / "model")
    assert stored_in(model) == "nvfp4" and not jax.tree.leaves(nnx.state(model, nnx.Param))
    for name, matrix in matrices(model):
        found = np.asarray(dense(matrix.stored_weight, "float32"))
        want = of_a_checkpoint(lambda module: wide(tensors, module, kind), name, len(found))
        np.testing.assert_array_equal(found, want, err_msg=name)
        assert np.signbit(found).tobytes() == np.signbit(want).tobytes()
    save_pretrained(model, tmp_path / "again")
    assert_same_bytes(load_file(tmp_path / "again" / "model.safetensors"), tensors)
    said = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == KINDS[kind][-1]["quant_method"] and "lm_head" in said["ignore"]
    assert (said["config_groups"]["group_0"].get("input_activations") is not None) == inputs
    assert from_pretrained(tmp_path / "again")[0].base_digest == model.base_digest


@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 6), st.sampled_from([0.0, 1.0, 6.0, 30.0]))
def test_scales_have_the_least_error_and_numbers_on_the_grid_stay(seed, rows, blocks, spread):
    """Beside every scale that is tried, and encoded again, as export of what QAT rounded needs."""
    draw = np.random.default_rng(seed)
    shape = rows, 16 * blocks
    wide = (draw.standard_t(3, shape) * np.exp2(draw.normal(size=shape) * spread)).astype("f4")
    weight = NVFP4.encode(wide)
    again = NVFP4.encode(weight.decode("float32"))
    np.testing.assert_allclose(again.decode("float32"), weight.decode("float32"), rtol=4e-7)  # of the tensor's scale
    scales, whole = np.asarray(weight.scales).astype(np.float64), np.float64(weight.tensor_scale)
    numbers = np.abs(np.float64(wide)).reshape(rows, blocks, 16)
    grid = np.unique(np.abs(E2M1)).astype(np.float64)

    def error(scale: np.ndarray) -> np.ndarray:
        scaled = numbers * (whole / scale)[..., None]
        return np.square(np.abs(scaled[..., None] - grid).min(-1)).sum(-1) * scale**2

    largest = np.minimum(numbers.max(-1) / 6 * whole, 448).astype(np.float32).astype(E4M3)
    steps = largest.view(np.uint8).astype(int)[None] + np.arange(7)[:, None, None]
    tried = np.clip(steps, 1, 126).astype(np.uint8).view(E4M3).astype(np.float64)
    regular = (largest.view(np.uint8) >= 8) & (largest.view(np.uint8) < 126)  # not the largest, and no subnormal
    least = np.min([error(each) for each in tried], axis=0)
    assert (error(scales) <= least * (1 + 1e-3) + 1e-4 * scales**2)[regular].all()


@pytest.mark.parametrize("plain", [False, True], ids=["quantised", "plain"])
def test_scales_of_a_cache_are_left_out_and_do_not_change_the_base(tmp_path, plain):
    """modelopt writes them beside the linears of keys and values, also where these stay in 16 bits."""
    tensors, attention = checkpoint(tmp_path / "model", LINEARS, "modelopt"), "model.layers.0.self_attn"
    if plain:
        for name in ("k_proj", "v_proj"):
            rows, pairs = tensors[f"{attention}.{name}.weight"].shape
            for key in ("weight_scale", "weight_scale_2", "input_scale"):
                del tensors[f"{attention}.{name}.{key}"]
            tensors[f"{attention}.{name}.weight"] = np.ones((rows, 2 * pairs), ml_dtypes.bfloat16)
    save_file(tmp_path / "model/model.safetensors", tensors)
    without, _ = from_pretrained(tmp_path / "model")
    scales = {f"{attention}.{kind}_proj.{kind}_scale": np.full((), 0.25, np.float32) for kind in "kv"}
    save_file(tmp_path / "model/model.safetensors", tensors | scales)
    model, _ = from_pretrained(tmp_path / "model")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(without))
    save_adapter(get_peft_model(model, r=2, target_modules=["q_proj"]), tmp_path / "adapter")
    save_pretrained(model, tmp_path / "again")
    assert_same_bytes(load_file(tmp_path / "again/model.safetensors"), tensors)
    load_adapter(from_pretrained(tmp_path / "again")[0], tmp_path / "adapter")


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_trains_over_experts_and_over_a_mesh(tmp_path, kind):
    checkpoint(tmp_path / "model", EXPERTS, kind)
    base, losses = from_pretrained(tmp_path / "model", "float32")[0], []
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    for name, mesh in (("packed", MeshConfig()), ("decoded", MeshConfig()), ("mesh", MeshConfig(data=2, fsdp=2))):
        model = shaken(get_peft_model(dequantize(base) if name == "decoded" else base, r=4, target_parameters=names), 1)
        trainer = Trainer(model, None, make_config(tmp_path / name, steps=3, mesh=mesh), dataset(documents(40)))
        trainer.train()
        losses.append([line["loss"] for line in trainer.history])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    np.testing.assert_allclose(losses[0], losses[2], rtol=1e-4)


@pytest.mark.full
def test_a_mistake_in_a_checkpoint_is_named(tmp_path):
    tensors = checkpoint(tmp_path / "model", LINEARS, "compressed-tensors")
    name = "model.layers.0.mlp.up_proj"

    def refused(words: str, **changed):
        save_file(tmp_path / "model/model.safetensors", {k: v for k, v in (tensors | changed).items() if v is not None})
        with pytest.raises(ValueError, match=words):
            from_pretrained(tmp_path / "model")

    refused(
        r"up_proj.weight: .weight_scale is F8_E4M3\[96, 3\]; .* need F8_E4M3\[96, 4\]",
        **{f"{name}.weight_scale": np.ones((96, 3), E4M3)},
    )
    refused(r"up_proj.weight_scale is there, but no weight in .*U8.* beside it", **{f"{name}.weight_packed": None})
    refused(
        r"weight_global_scale is 0; it must be positive", **{f"{name}.weight_global_scale": np.zeros(1, np.float32)}
    )
    refused(r"values that are not finite.*up_proj", **{f"{name}.weight_scale": np.full((96, 4), np.nan, E4M3)})
    odd = CONFIGS["llama"] | {"num_hidden_layers": 1, "intermediate_size": 72}
    with pytest.raises(ValueError, match=r"the last axis must be a multiple of 16"):
        quantize(made(odd), "nvfp4")


def test_a_config_that_asks_for_another_kind_is_refused(tmp_path):
    checkpoint(tmp_path / "model", LINEARS, "compressed-tensors")
    file = tmp_path / "model/config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 32
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"weights.group_size = 32: of nvfp4-pack-quantized only 16"):
        from_pretrained(tmp_path / "model")


def test_what_modelopt_wrote_is_what_its_own_reader_makes_of_it():
    """tests/parity/regenerate_nvfp4.py wrote the file with nvidia-modelopt."""
    golden = np.load(Path(__file__).parents[1] / "goldens" / "nvfp4_modelopt.npz")
    scales = jnp.asarray(golden["scales"].view(E4M3))
    weight = NVFP4(jnp.asarray(golden["codes"]), scales, jnp.asarray(golden["scale_2"]).reshape(1, 1), divides=False)
    assert weight.problem() is None
    for dtype in ("float32", "bfloat16"):
        found = np.asarray(weight.decode(dtype)).astype(np.float32)
        np.testing.assert_array_equal(found, golden[dtype])  # in which zeros have no sign
