"""Models in FP8: checkpoints of both layouts in and out, quantised on the way, training, merging, experts, meshes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from tiny import CONFIGS, golden_tokens
from tiny_models import adapted_model, named, shaken

from jaxtune.models.adapters.merge import merge_adapter
from jaxtune.models.files import headers, shards
from jaxtune.models.files.quant import compute_in_fp8, dequantize, quantize, stored_in
from jaxtune.models.generation.generate import generate
from jaxtune.models.hf import from_pretrained, model_from_config, save_pretrained
from jaxtune.models.lora import get_peft_model, linears, matrices
from jaxtune.models.stack.stack import layer_backward, layer_forward
from jaxtune.pallas import dispatch
from jaxtune.pallas.formats import FP8, dense
from jaxtune.pallas.formats.fp8 import ROW, TILE
from jaxtune.train.config import CheckpointConfig, MeshConfig
from jaxtune.train.planning.plan import parse_plan
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import dataset, documents, make_config

E4M3 = ml_dtypes.float8_e4m3fn
# Larger than one block, and no multiple of it: 192 x 144 and the like.
CONFIG = CONFIGS["llama"] | {"hidden_size": 144, "intermediate_size": 192, "num_hidden_layers": 1}
OFFICIAL = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def load_file(file: Path) -> dict[str, np.ndarray]:
    """safetensors' own reader has no e4m3 for numpy."""
    return {name: shards.read_tensor(entry) for name, entry in headers.read_header(file).items()}


def made(config: dict, dtype="bfloat16"):
    return model_from_config(config, jax.random.key(0), dtype)


def in_fp8(folder: Path, config: dict, dtype=np.float32) -> dict[str, np.ndarray]:
    """Rewrites a 16-bit folder's linears as a checkpoint of this quantization_config; returns its tensors."""
    draw, tensors = np.random.default_rng(0), load_file(folder / "model.safetensors")
    tiles = config["quant_method"] == "fp8"
    for name in [n for n in tensors if n.endswith("proj.weight")]:
        out, in_ = tensors[name].shape
        shape = (-(-out // 128), -(-in_ // 128)) if tiles else (out, 1)
        tensors[name] = (draw.normal(size=(out, in_)) * 100).clip(-448, 448).astype(E4M3)
        key = "weight_scale_inv" if tiles else "weight_scale"
        tensors[name.removesuffix("weight") + key] = draw.uniform(1e-4, 3e-4, shape).astype(dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    found = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(found | {"quantization_config": config}))
    return tensors


def wide(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """A linear's float32 weight by the definition of its layout, number by number."""
    codes = tensors[f"{name}.weight"].astype(np.float32)
    if f"{name}.weight_scale" in tensors:
        return codes * tensors[f"{name}.weight_scale"].astype(np.float32)
    scales = tensors[f"{name}.weight_scale_inv"].astype(np.float32)
    rows, columns = np.indices(codes.shape) // 128
    return codes * scales[rows, columns]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "model"
    save_pretrained(made(CONFIG), folder)
    return folder


@pytest.fixture
def folder(plain, tmp_path) -> Path:
    copy = tmp_path / "model"
    copy.mkdir()
    for file in plain.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


@pytest.mark.parametrize(
    ("config", "dtype"), [(OFFICIAL, np.float32), (OFFICIAL, ml_dtypes.bfloat16), (CHANNELS, ml_dtypes.bfloat16)]
)
def test_a_checkpoint_is_read_and_written_bit_for_bit(folder, tmp_path, config, dtype):
    tensors = in_fp8(folder, config, dtype)
    model, _ = from_pretrained(folder)
    assert stored_in(model) == "fp8" and not jax.tree.leaves(nnx.state(model, nnx.Param))
    for name, matrix in matrices(model):
        expected = wide(tensors, name).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(np.asarray(matrix.stored_weight.decode()), expected)

    save_pretrained(model, tmp_path / "again")
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (written[name].dtype, written[name].shape) == (tensor.dtype, tensor.shape), name
        np.testing.assert_array_equal(written[name].view(np.uint8), tensor.view(np.uint8), name)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"] == config
    assert from_pretrained(tmp_path / "again")[0].base_fingerprint == model.base_fingerprint


def test_a_mistake_in_a_checkpoint_is_named(folder):
    tensors = in_fp8(folder, OFFICIAL)
    name = "model.layers.0.mlp.up_proj"

    def refused(words: str, **changed):
        kept = {k: v for k, v in (tensors | changed).items() if v is not None}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=words):
            from_pretrained(folder)

    key = f"{name}.weight_scale_inv"
    refused(r"up_proj.weight is stored as F8_E4M3 and has 0 scales", **{key: None})
    refused(r"no weight in F8_E4M3 beside it", **{f"{name}.weight": np.zeros((192, 144), np.float32)})
    refused(r"which is no scale of .*up_proj.weight \[192, 144\]", **{key: np.ones((2, 3), np.float32)})
    refused(r"values that are not finite.*up_proj", **{key: np.full((2, 2), np.inf, np.float32)})
    broken = tensors[f"{name}.weight"].copy()
    broken[0, 0] = np.nan
    refused(r"values that are not finite.*up_proj", **{f"{name}.weight": broken})


@pytest.mark.parametrize("config", [OFFICIAL, CHANNELS], ids=["tiles", "rows"])
@pytest.mark.parametrize(
    ("scale", "dtype", "said"),
    [
        (0.0, "bfloat16", "(0)"),
        (1e-42, "bfloat16", "(1.001e-42)"),
        (3e38, "bfloat16", "(3e+38)"),
        (-1e-4, "bfloat16", "(-0.0001)"),
        (200.0, "float16", "(200)"),
    ],
)
def test_a_scale_that_cannot_be_right_is_named(folder, config, scale, dtype, said):
    """Devices differ in what they make of numbers below 2^-126; a scale near the largest number makes infinities."""
    tensors = in_fp8(folder, config)
    key = next(name for name in tensors if "up_proj.weight_scale" in name)
    tensors[key].reshape(-1)[-1] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    words = (
        f"{key}: 1 of {tensors[key].size} scales cannot be right {said}: in {dtype} a scale must be from 1.175e-38 to "
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        from_pretrained(folder, dtype)


@pytest.mark.parametrize("config", [OFFICIAL, CHANNELS], ids=["tiles", "rows"])
def test_a_scale_of_zero_is_right_where_all_numbers_are_zero(folder, tmp_path, config):
    tensors = in_fp8(folder, config)
    key = next(name for name in tensors if "up_proj.weight_scale" in name)
    tensors[key].reshape(-1)[0] = 0
    tensors["model.layers.0.mlp.up_proj.weight"][: 1 if config is CHANNELS else 128, :128] = E4M3(-0.0)
    if config is CHANNELS:
        tensors["model.layers.0.mlp.up_proj.weight"][0] = E4M3(0)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model, tokens = from_pretrained(folder)[0], golden_tokens() % CONFIG["vocab_size"]
    assert np.isfinite(model(tokens)).all()
    save_pretrained(model, tmp_path / "again")
    assert from_pretrained(tmp_path / "again")[0].base_fingerprint == model.base_fingerprint


@pytest.mark.full
@pytest.mark.parametrize("said", ["nf4", "fp8"])
def test_a_config_that_says_of_plain_weights_that_they_are_quantised(plain, folder, said):
    """Transformers quantises such weights while it loads them; here it is asked for."""
    four_bits = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = four_bits if said == "nf4" else OFFICIAL
    (folder / "config.json").write_text(json.dumps(config))
    words = f"quantization_config says that the weights are stored in {said}, but none is: set load_in = '{said}' to"
    for load_in in {None, "nf4", "fp8"} - {said}:
        with pytest.raises(ValueError, match=words):
            from_pretrained(folder, load_in=load_in)
    model = from_pretrained(folder, load_in=said)[0]
    assert stored_in(model) == said
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert stored_in(from_pretrained(folder)[0]) is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (OFFICIAL | {"activation_scheme": "static"}, r"activation_scheme = 'static': of 'fp8' only 'dynamic'"),
        (OFFICIAL | {"weight_block_size": [64, 64]}, r"weight_block_size = \[64, 64\]: must be \[128, 128\]"),
        (CHANNELS | {"format": "pack-quantized"}, r"'compressed-tensors', format = 'pack-quantized'; of"),
        (CHANNELS | {"config_groups": {"a": {"weights": {"type": "int", "num_bits": 8}}}}, r"a.weights.type = 'int'"),
        (CHANNELS | {"kv_cache_scheme": {"num_bits": 8}}, r"kv_cache_scheme"),
    ],
)
def test_what_is_not_read_is_refused_in_words(folder, config, words):
    in_fp8(folder, OFFICIAL)
    found = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match=words):
        from_pretrained(folder)


def test_another_format_is_not_taken_in_silence(folder):
    in_fp8(folder, OFFICIAL)
    with pytest.raises(ValueError, match="load_in = 'nf4', but its weights are stored in fp8: leave load_in out"):
        from_pretrained(folder, load_in="nf4")
    assert stored_in(from_pretrained(folder, load_in="fp8")[0]) == "fp8"


def test_scales_of_several_kinds_load_and_are_not_saved(folder, tmp_path):
    """One quantization_config could not be true for all of them; servers read every weight by it."""
    tensors = in_fp8(folder, OFFICIAL)
    name = "model.layers.0.mlp.up_proj.weight"
    del tensors[f"{name}_scale_inv"]
    for scales, said in ((np.full((192, 1), 1e-3), "each row"), (np.full(1, 1e-3), "the matrix")):
        changed = tensors | {f"{name}_scale": scales.astype(np.float32)}
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        model, _ = from_pretrained(folder)
        assert np.isfinite(model(golden_tokens() % CONFIG["vocab_size"])).all()
        with pytest.raises(ValueError, match="FP8 weights have scales for .*: use dequantize") as error:
            save_pretrained(model, tmp_path / "again")
        assert "each 128 x 128 numbers" in str(error.value) and said in str(error.value)
        assert not (tmp_path / "again").exists()
    save_pretrained(dequantize(model), tmp_path / "again")
    assert stored_in(from_pretrained(tmp_path / "again")[0]) is None


def test_16_bit_weights_are_quantised_on_the_way(plain):
    model, _ = from_pretrained(plain, load_in="fp8")
    original, _ = from_pretrained(plain)
    for (_, matrix), (_, other) in zip(matrices(model), matrices(original), strict=True):
        expected = FP8.encode(other.stored_weight, ROW)
        jax.tree.map(np.testing.assert_array_equal, matrix.stored_weight, expected)
    tokens = golden_tokens() % CONFIG["vocab_size"]
    np.testing.assert_allclose(model(tokens), dequantize(model)(tokens), atol=2e-2)
    assert len(generate(model, [[1, 5, 7]], max_new_tokens=2)) == 1


# ---- training


@pytest.mark.full
def test_a_run_on_fp8_weights_trains_its_adapter_and_merges(tmp_path):
    """The step's loss and gradients are those of the decoded weights."""
    base = quantize(made(CONFIG, "float32"), "fp8")
    config = make_config(tmp_path / "run", steps=3)
    losses = []
    for model in (base, dequantize(base)):
        trainer = Trainer(adapted_model(model), None, config, dataset(documents(12)))
        trained = trainer.train()
        losses.append([line["loss"] for line in trainer.history])
        config = make_config(tmp_path / "other", steps=3)
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert trainer.planner.cost.layers.all_residuals  # it was planned, too
    merged = merge_adapter(trained)
    tokens = golden_tokens() % CONFIG["vocab_size"]
    np.testing.assert_allclose(merged(tokens), trained(tokens), atol=1e-4)


@pytest.mark.full
def test_a_run_that_multiplies_in_fp8_learns_as_one_that_does_not(tmp_path):
    base = quantize(made(CONFIG, "float32"), "fp8")
    losses = {}
    for name, model in (("plain", base), ("fp8", compute_in_fp8(base))):
        model = shaken(get_peft_model(model, r=4), 1)
        save = CheckpointConfig(every_steps=2, every_minutes=None)
        arguments = model, None, make_config(tmp_path / name, steps=4, checkpoint=save), dataset(documents(16))
        trainer = Trainer(*arguments)
        trainer.train()
        losses[name] = np.array([line["loss"] for line in trainer.history])
        assert trainer.config.model.compute == (None if name == "plain" else "fp8")  # config.yaml says it
    assert (losses["plain"] != losses["fp8"]).all()
    np.testing.assert_allclose(losses["fp8"], losses["plain"], rtol=0.02)
    assert losses["fp8"][-1] < losses["fp8"][0]
    shutil.rmtree(tmp_path / "fp8/checkpoints/step_00000004")
    resumed = Trainer(*arguments)
    resumed.train()
    assert [line["loss"] for line in resumed.history] == list(losses["fp8"][2:])


@pytest.mark.full
def test_dora_rslora_and_fp16_stand_beside_products_in_fp8(tmp_path):
    base = quantize(made(CONFIG, "float16"), "fp8")
    losses = []
    for name, model in (("plain", base), ("fp8", compute_in_fp8(base))):
        model = shaken(get_peft_model(model, r=4, use_dora=True, use_rslora=True), 1)
        config = make_config(tmp_path / name, precision="fp16", steps=2)
        trainer = Trainer(model, None, config, dataset(documents(8)))
        trainer.train()
        losses.append(np.array([(line["loss"], line["loss_scale"]) for line in trainer.history]))
    assert (losses[0][:, 0] != losses[1][:, 0]).all()
    np.testing.assert_allclose(*losses, rtol=0.02)  # the scale falls at an overflow, which both have or neither


@pytest.mark.full
def test_gate_and_up_are_kept_in_fp8_where_a_plan_says_so():
    """The forward is that of a run that keeps them whole; the backward is what it is of the rounded numbers."""
    model = shaken(get_peft_model(compute_in_fp8(quantize(made(CONFIG), "fp8")), r=4), 1)
    layer, spec = model.layers[0], model.config.layers[0]
    graph, *weights = nnx.split(layer, nnx.Param, ...)
    x = jax.random.normal(jax.random.key(2), (2, 24, CONFIG["hidden_size"]), jnp.bfloat16)
    arguments = (*weights, x, model.layout(x.shape[:2]), None)
    (plan,) = parse_plan("gate=fp8, up=fp8", 1, layer.residuals())[0].layers
    assert str(plan) == "fp8" and plan.named("fp8", layer.residuals()) == ("gate", "up")

    names = tuple(residual.name for residual in layer.residuals())
    out, whole, *_ = layer_forward(graph, spec, names, *arguments)
    same, saved, *_ = layer_forward(graph, spec, names, *arguments, in_fp8=("gate", "up"))
    np.testing.assert_array_equal(out, same)
    assert all(isinstance(saved[name], FP8) == (name in ("gate", "up")) for name in names)
    assert saved["gate"].nbytes == x.shape[0] * x.shape[1] * (CONFIG["intermediate_size"] + 4)

    def gradients(saved):
        trainable, dx, *_ = layer_backward(graph, spec, *weights, saved, jnp.cos(out), arguments[3], None)
        return jnp.concatenate([leaf.astype(jnp.float32).ravel() for leaf in jax.tree.leaves((trainable, dx))])

    of_whole, of_saved, of_decoded = map(gradients, (whole, saved, {n: dense(v) for n, v in saved.items()}))
    np.testing.assert_array_equal(of_saved, of_decoded)
    assert 0.998 < of_whole @ of_saved / jnp.linalg.norm(of_whole) / jnp.linalg.norm(of_saved) < 1


def test_a_plan_in_fp8_needs_products_in_fp8():
    residuals = made(CONFIG).layers[0].residuals()
    for text in ("fp8", "gate=fp8"):
        with pytest.raises(ValueError, match=f"memory.plan = '{text}': .*kept in FP8.* where model.compute is fp8"):
            parse_plan(text, 1, residuals)


def test_products_in_fp8_need_weights_in_fp8():
    with pytest.raises(ValueError, match="no linear of the model is in FP8; set model.load_in = fp8"):
        compute_in_fp8(made(CONFIG))


# ---- experts


def test_experts_in_fp8_go_through_files(tmp_path):
    config = CONFIGS["qwen3_moe"] | {"moe_intermediate_size": 128, "num_hidden_layers": 1}
    save_pretrained(made(config), tmp_path / "model")
    tensors = in_fp8(tmp_path / "model", OFFICIAL)
    model, _ = from_pretrained(tmp_path / "model")
    experts = dict(matrices(model))["model.layers.0.mlp.experts.gate_up_proj"].stored_weight
    assert isinstance(experts, FP8) and experts.block == TILE
    for expert in range(experts.shape[0]):
        pair = [wide(tensors, f"model.layers.0.mlp.experts.{expert}.{m}_proj") for m in ("gate", "up")]
        np.testing.assert_array_equal(experts.decode(jnp.float32)[expert], np.concatenate(pair))
    save_pretrained(model, tmp_path / "again")
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(written[name].view(np.uint8), tensor.view(np.uint8), name)


@pytest.mark.full
def test_what_is_not_loaded_in_fp8_is_saved_in_16_bits(tmp_path):
    """Qwen's FP8 checkpoints have the layers that predict further tokens in FP8 too."""
    save_pretrained(made(CONFIGS["qwen3_next"]), tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    rng = np.random.default_rng(0)
    codes, scales = rng.normal(size=(130, 64)).astype(E4M3), np.float32([[0.5], [3.0]])
    beside = {"mtp.up_proj.weight": codes, "mtp.up_proj.weight_scale_inv": scales, "mtp.norm.weight": np.float32([1.5])}
    save_file(tensors | beside, tmp_path / "model" / "model.safetensors")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": OFFICIAL}))
    model, _ = from_pretrained(tmp_path / "model", dtype="float32")
    expected = (codes.astype(np.float32) * np.repeat(scales, [128, 2], axis=0)).astype(ml_dtypes.bfloat16)
    for name, saved in {"plain": model, "fp8": quantize(model, "fp8")}.items():
        save_pretrained(saved, tmp_path / name)
        written = load_file(tmp_path / name / "model.safetensors")
        np.testing.assert_array_equal(written["mtp.up_proj.weight"], expected)
        assert written["mtp.norm.weight"] == 1.5 and "mtp.up_proj.weight_scale_inv" not in written
        quantization = json.loads((tmp_path / name / "config.json").read_text()).get("quantization_config")
        assert quantization is None if name == "plain" else "mtp.up_proj" in quantization["ignore"]
        assert from_pretrained(tmp_path / name, dtype="float32")[0].source.passthrough.tensors


@pytest.mark.full
def test_experts_in_fp8_multiply_as_they_are_stored():
    """Forward and backward, with adapters on experts: near what decoded weights give, and not the same."""
    model = quantize(made(CONFIGS["qwen3_moe"] | {"num_hidden_layers": 1}, "float32"), "fp8")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    results = []
    for base in (model, compute_in_fp8(model)):
        assert all(matrix.fp8 == (base is not model) for _, matrix in matrices(base))
        for _, linear in linears(base):  # else the router sees other numbers, and may choose other experts
            linear.fp8 = False
        adapted = shaken(get_peft_model(base, r=4, target_parameters=names), 1)
        graph, *weights = nnx.split(adapted.layers[0], nnx.Param, ...)
        x = jax.random.normal(jax.random.key(2), (2, 24, adapted.config.hidden_size))
        shared = (adapted.layout(x.shape[:2]), None)
        residuals = tuple(residual.name for residual in adapted.layers[0].residuals())
        out, saved, *_ = layer_forward(graph, adapted.config.layers[0], residuals, *weights, x, *shared)
        trained, dx, *_ = layer_backward(graph, adapted.config.layers[0], *weights, saved, jnp.cos(x), *shared)
        results.append(
            [np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(part)]) for part in (out, dx, trained)]
        )
    assert dispatch.record["fp8_matmul of experts"][0] == "reference"
    for plain, got in zip(*results, strict=True):
        assert 0 < np.linalg.norm(got - plain) / np.linalg.norm(plain) < 0.15


@pytest.mark.full
def test_products_in_fp8_are_divided_over_a_mesh(tmp_path):
    """Rows are rounded by themselves, so that a mesh changes no more than the order of sums over rows."""
    base = compute_in_fp8(quantize(made(CONFIGS["qwen3_moe"] | {"num_hidden_layers": 1}, "float32"), "fp8"))
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    losses = []
    for name, mesh in (("one", MeshConfig()), ("four", MeshConfig(data=2, fsdp=2))):
        model = shaken(get_peft_model(base, r=4, target_parameters=names), 1)
        trainer = Trainer(model, None, make_config(tmp_path / name, steps=2, mesh=mesh), dataset(documents(40)))
        trainer.train()
        losses.append([line["loss"] for line in trainer.history])
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_experts_whose_blocks_would_meet_are_refused(tmp_path):
    config = CONFIGS["qwen3_moe"] | {"moe_intermediate_size": 48, "num_hidden_layers": 1}
    save_pretrained(made(config), tmp_path / "model")
    in_fp8(tmp_path / "model", OFFICIAL)
    with pytest.raises(ValueError, match="has 48 rows in FP8 blocks that would run into those of the matrix beside it"):
        from_pretrained(tmp_path / "model")


def test_the_names_of_adapters_are_those_of_the_16_bit_model():
    plain, packed = (adapted_model(m) for m in (made(CONFIG), quantize(made(CONFIG), "fp8")))
    assert named(plain).keys() == named(packed).keys()
