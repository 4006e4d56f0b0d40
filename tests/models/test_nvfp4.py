"""Models in NVFP4: checkpoints of compressed-tensors and of nvidia-modelopt in and out byte for byte, experts, adapters
and their gradients, exports, a mesh."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from tiny import CONFIGS
from tiny_models import adapted_model, shaken

import jaxtune
from jaxtune.export import api
from jaxtune.models.files import shards
from jaxtune.models.files.quant import dequantize, quantize, stored_in
from jaxtune.models.hf import from_pretrained, model_from_config, save_pretrained
from jaxtune.models.lora import get_peft_model, matrices
from jaxtune.pallas.formats import dense
from jaxtune.pallas.formats.nvfp4 import NVFP4
from jaxtune.train.config import MeshConfig
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import dataset, documents, make_config

pytestmark = pytest.mark.usefixtures("compiled_quickly")
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
    return {name: shards.read_tensor(entry) for name, entry in shards.read_header(file).items()}


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
        if ".experts." in name:
            prefix, matrix_name = name.rsplit(".", 1)
            parts = ("gate_proj", "up_proj") if matrix_name == "gate_up_proj" else ("down_proj",)
            pieces = [[wide(tensors, f"{prefix}.{e}.{part}", kind) for part in parts] for e in range(len(found))]
            want = np.stack([np.concatenate(each) for each in pieces])
        else:
            want = wide(tensors, name, kind)
        np.testing.assert_array_equal(found, want, err_msg=name)
        assert np.signbit(found).tobytes() == np.signbit(want).tobytes()
    save_pretrained(model, tmp_path / "again")
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (written[name].dtype, written[name].shape) == (tensor.dtype, tensor.shape), name
        assert written[name].tobytes() == tensor.tobytes(), name
    said = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == KINDS[kind][-1]["quant_method"] and "lm_head" in said["ignore"]
    assert (said["config_groups"]["group_0"].get("input_activations") is not None) == inputs
    assert from_pretrained(tmp_path / "again")[0].base_digest == model.base_digest


def test_an_adapters_gradients_are_those_over_the_decoded_weights():
    packed = adapted_model(quantize(made(LINEARS, "float32"), "nvfp4"), r=2)
    plain = dequantize(packed)

    def gradients(model):
        graph, trainable, frozen = nnx.split(model, nnx.Param, ...)

        def loss(trainable):
            return jnp.sin(nnx.merge(graph, trainable, frozen)(TOKENS)).sum()

        return jax.jit(jax.value_and_grad(loss))(trainable)

    (loss, got), (want_loss, want) = gradients(packed), gradients(plain)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other) and np.asarray(one).any()


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


def test_16_bit_weights_are_quantised_on_the_way_and_exported(tmp_path):
    """The export is read back as the model that load_in makes; a model of a checkpoint is exported as it is."""
    save_pretrained(made(LINEARS), tmp_path / "plain")
    model, _ = from_pretrained(tmp_path / "plain", load_in="nvfp4")
    plain, _ = from_pretrained(tmp_path / "plain")
    done = api.export_model(plain, tmp_path / "out", "nvfp4")
    again, _ = from_pretrained(done.folder)
    for (_, one), (_, other) in zip(matrices(model), matrices(again), strict=True):
        jax.tree.map(np.testing.assert_array_equal, one.stored_weight, other.stored_weight)
    for (_, one), (_, other) in zip(matrices(model), matrices(plain), strict=True):
        packed, whole = (dense(m.stored_weight, "float32").astype("float32") for m in (one, other))
        assert 0 < float(jnp.linalg.norm(packed - whole) / jnp.linalg.norm(whole)) < 0.12
    api.export_model(again, tmp_path / "twice", "nvfp4")
    assert (tmp_path / "twice/model.safetensors").read_bytes() == (done.folder / "model.safetensors").read_bytes()
    merged = jaxtune.merge_adapter(adapted_model(again, r=2))
    assert stored_in(merged) is None


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
