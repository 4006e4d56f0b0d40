"""Four-bit models: bitsandbytes' checkpoints in and out, quantised on the way, gradients, merging, training."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nf4_cases import CONFIG
from random_weights import random_tensor, write_checkpoint
from tiny import golden_tokens
from tiny_models import adapted_model, named, shaken, tiny_model

from jaxtune.models import hf
from jaxtune.models.adapters.adapter_files import load_adapter, save_adapter
from jaxtune.models.adapters.merge import merge_adapter
from jaxtune.models.config import LayerSpec
from jaxtune.models.files import headers, quant, shards
from jaxtune.models.files.quant import dequantize, quantization_config, quantize, stored_in
from jaxtune.models.generation.generate import generate
from jaxtune.models.hf import from_pretrained, save_pretrained
from jaxtune.models.linear import Frozen
from jaxtune.models.lora import get_peft_model, linears
from jaxtune.pallas.formats import FP8, NF4, FourBit
from jaxtune.train.program.flops import flop_counter
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import dataset, documents, make_config

GOLDEN = Path(__file__).resolve().parent.parent / "goldens" / "nf4"
ONE_LAYER = (LayerSpec(),)  # compiling is what takes the time of a test
TOKENS = golden_tokens() % CONFIG["vocab_size"]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of the checkpoint that transformers and bitsandbytes made."""
    return shutil.copytree(GOLDEN, tmp_path / "bnb")


def weights(model) -> dict:
    return {name: linear.stored_weight for name, linear in linears(model)}


def assert_same_leaves(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


# ---- which weights


@pytest.mark.full
def test_linears_of_the_layers_are_quantised():
    model = tiny_model("bfloat16")
    packed = quantize(model)
    assert all(isinstance(weight, NF4) for weight in weights(packed).values())
    assert stored_in(model) is None and not isinstance(model.layers[0].mlp.up_proj.weight, Frozen)
    assert packed.embedding.weight.get_value() is model.embedding.weight.get_value()
    assert not jax.tree.leaves(nnx.state(packed, nnx.Param))
    assert packed.layers[0].mlp.up_proj.sizes == model.layers[0].mlp.up_proj.sizes
    # A parameter in four bits is one parameter, and one of the products.
    assert quant.parameter_counts(packed) == (0, quant.parameter_counts(model)[1])
    adapted = [get_peft_model(m, r=2) for m in (model, packed)]
    assert quant.parameter_counts(adapted[0]) == quant.parameter_counts(adapted[1])
    lengths = np.array([60, 40])
    assert flop_counter(adapted[0])(lengths) == flop_counter(adapted[1])(lengths)


def test_modules_can_be_skipped():
    packed = quantize(tiny_model(), skip_modules=["o_proj", "model.layers.1.mlp.up_proj"])
    left = {name for name, weight in weights(packed).items() if not isinstance(weight, FourBit)}
    assert left == {"model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj", "model.layers.1.mlp.up_proj"}
    assert set(quantization_config(packed)["llm_int8_skip_modules"]) == left | {"lm_head"}


def test_quantize_refuses():
    with pytest.raises(ValueError, match="load_in 'int4' is not supported; supported: None, 'nf4'"):
        quantize(tiny_model(), "int4")
    with pytest.raises(ValueError, match="skip_modules: 'k_pro' matches no linear, such as model.layers.0"):
        quantize(tiny_model(), skip_modules=["k_pro"])
    with pytest.raises(ValueError, match="skip_modules: 'k_proj' matches no linear, of which the model has none"):
        quantize(tiny_model(layers=()), skip_modules=["k_proj"])
    with pytest.raises(ValueError, match="this model has adapters"):
        quantize(get_peft_model(tiny_model(), r=2))


# ---- what it computes


def test_logits_of_a_bitsandbytes_checkpoint(folder):
    model, _ = from_pretrained(folder, dtype="float32")
    assert all(isinstance(weight, NF4) for weight in weights(model).values())
    want = np.load(folder / "expected.npz")["logits"]
    np.testing.assert_allclose(model(TOKENS), want, atol=2e-4)
    np.testing.assert_allclose(dequantize(model)(TOKENS), want, atol=2e-4)
    # Sixteen bits of compute over the same four of storage.
    half, _ = from_pretrained(folder)
    assert half.dtype == "bfloat16" and half(TOKENS).dtype == jnp.float32
    assert float(jnp.abs(half(TOKENS) - want).max()) < 0.1 * float(np.abs(want).max())


@pytest.mark.parametrize("settings", [{}, dict(use_dora=True), dict(lora_dropout=0.3, modules_to_save=["lm_head"])])
def test_gradients_reach_adapters_and_equal_those_over_dequantised_weights(settings):
    packed = adapted_model(quantize(tiny_model(layers=ONE_LAYER)), **(dict(r=2) | settings))
    plain = dequantize(packed)

    def gradients(model):
        graph, trainable, frozen = nnx.split(model, nnx.Param, ...)

        def loss(trainable):
            model = nnx.merge(graph, trainable, frozen)
            hidden = model.hidden_states(TOKENS % 48, dropout_key=jax.random.key(1))
            return jnp.sin(model.logits(hidden)).sum()

        return jax.jit(jax.value_and_grad(loss))(trainable)

    (loss, got), (want_loss, want) = gradients(packed), gradients(plain)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * float(jnp.abs(other).max()))
        assert np.asarray(one).any()


@pytest.mark.full
def test_generation_equals_that_of_dequantised_weights():
    packed = adapted_model(quantize(tiny_model()), r=2)
    assert generate(packed, [[1, 2, 3], [4]], 8) == generate(dequantize(packed), [[1, 2, 3], [4]], 8)


@pytest.mark.full
def test_training_over_four_bits(tmp_path):
    model = get_peft_model(quantize(tiny_model(layers=ONE_LAYER)), r=4)
    data = dataset(documents(32))
    trained, losses = {}, {}
    for name, base in (("packed", model), ("plain", dequantize(model))):
        trainer = Trainer(base, None, make_config(tmp_path / name, steps=24), data)
        trained[name] = trainer.train()
        losses[name] = [line["loss"] for line in trainer.history]
    assert losses["packed"][-1] < 0.9 * losses["packed"][0]
    np.testing.assert_allclose(losses["packed"], losses["plain"], rtol=1e-3)
    # The base is the very one that was given.
    assert_same_leaves(weights(trained["packed"]), weights(model))


def test_a_base_in_four_bits_does_not_train_without_adapters(tmp_path):
    with pytest.raises(ValueError, match="the model has no trainable tensor: add adapters"):
        Trainer(quantize(tiny_model()), None, make_config(tmp_path), dataset(documents(8)))


# ---- merging


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("settings", [{}, dict(use_dora=True), dict(target_modules=["q_proj"])])
def test_merging_dequantises(dtype, settings):
    model = adapted_model(quantize(tiny_model(dtype)), **(dict(r=2) | settings))
    merged = merge_adapter(model)  # which checks itself
    assert stored_in(merged) is None and {w.dtype for w in weights(merged).values()} == {jnp.dtype(dtype)}
    assert all(isinstance(variable, nnx.Param) for _, variable in nnx.to_flat_state(nnx.state(merged)))
    by_hand = merge_adapter(dequantize(model))
    for name, weight in weights(merged).items():
        np.testing.assert_array_equal(weight, weights(by_hand)[name])
    assert stored_in(model) is not None


def test_adapters_are_saved_and_loaded_over_four_bits(tmp_path, folder):
    base, _ = from_pretrained(folder, dtype="float32")
    model = adapted_model(base, r=2)
    save_adapter(model, tmp_path / "adapter")
    again = load_adapter(base, tmp_path / "adapter")
    np.testing.assert_array_equal(again(TOKENS), model(TOKENS))


# ---- checkpoints


@pytest.mark.full
def test_saved_and_loaded_the_same(tmp_path, folder):
    """Tensor for tensor what bitsandbytes wrote, and loaded again it is the same model."""
    model, _ = from_pretrained(folder, dtype="float32")
    save_pretrained(model, tmp_path / "saved", max_shard_bytes=20_000)
    theirs = headers.read_header(folder / "model.safetensors")
    files = sorted((tmp_path / "saved").glob("*.safetensors"))
    assert len(files) > 2
    ours = {name: entry for file in files for name, entry in headers.read_header(file).items()}
    assert {n: (e.dtype, e.shape) for n, e in ours.items() if "quant_state" not in n} == {
        n: (e.dtype, e.shape) for n, e in theirs.items() if "quant_state" not in n
    }
    for name, entry in theirs.items():
        one, other = shards.read_bytes(entry), shards.read_bytes(ours[name])
        if "quant_state" in name:
            assert json.loads(one.tobytes()) == json.loads(other.tobytes())
        else:
            np.testing.assert_array_equal(one, other)
    wrote, read = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "saved", folder))
    assert (
        wrote["quantization_config"].items()
        >= {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "llm_int8_skip_modules": ["lm_head"],
        }.items()
    )
    assert wrote | {"quantization_config": 0} == read | {"quantization_config": 0}
    again, _ = from_pretrained(tmp_path / "saved", dtype="float32", load_in="nf4")
    assert_same_leaves(nnx.state(again), nnx.state(model))
    assert again.base_fingerprint == model.base_fingerprint
    # Merged, it is a 16-bit checkpoint, and says nothing of four bits.
    save_pretrained(merge_adapter(adapted_model(model, r=2)), tmp_path / "merged")
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    assert stored_in(from_pretrained(tmp_path / "merged")[0]) is None


@pytest.fixture
def plain(tmp_path) -> Path:
    """A checkpoint of the same model in float32."""
    shapes = {name: variable.shape for name, variable in named(from_pretrained(GOLDEN)[0]).items()}
    write_checkpoint(tmp_path / "plain", CONFIG, shapes)
    return tmp_path / "plain"


def test_quantised_on_the_way_as_bitsandbytes_does(plain):
    """The golden checkpoint was made from these very weights."""
    model, _ = from_pretrained(plain, dtype="float32", load_in="nf4")
    theirs, _ = from_pretrained(GOLDEN, dtype="float32")
    for name, weight in weights(model).items():
        np.testing.assert_array_equal(weight.codes, weights(theirs)[name].codes)
        np.testing.assert_allclose(weight.block_absmax(), weights(theirs)[name].block_absmax(), rtol=1e-5)
    assert not jax.tree.leaves(nnx.state(model, nnx.Param))
    whole, _ = from_pretrained(plain, dtype="float32")
    assert model.base_fingerprint == whole.base_fingerprint  # its adapters fit the 16-bit base
    assert_same_leaves(nnx.state(quantize(whole)), nnx.state(model))
    half, _ = from_pretrained(plain, load_in="nf4")  # from what the weights are in 16 bits
    assert_same_leaves(nnx.state(quantize(from_pretrained(plain)[0])), nnx.state(half))


def test_one_tensor_is_encoded_at_a_time(plain, monkeypatch):
    """Beyond what stays, the device holds one tensor on its way."""
    busy, most = 0, 0
    encode = NF4.encode

    def watched(array):
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        try:
            return jax.block_until_ready(encode(array))
        finally:
            busy -= 1

    monkeypatch.setattr(NF4, "encode", staticmethod(watched))
    from_pretrained(plain, load_in="nf4")
    assert most == 1


def rewrite(folder: Path, change) -> None:
    """Applies `change` to the {name: array} of a folder's weights."""
    entries = headers.read_header(folder / "model.safetensors")
    arrays = {name: shards.read_tensor(entry) for name, entry in entries.items()}
    change(arrays)
    tensors = [(name, array.shape, array.dtype) for name, array in arrays.items()]
    shards.write_file(folder / "model.safetensors", tensors, arrays.__getitem__)


def change_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


UP = "model.layers.1.mlp.up_proj.weight"
STATE = f"{UP}.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize("storage", [np.float32, jnp.bfloat16])
def test_codes_stored_as_another_dtype(folder, storage):
    want, _ = from_pretrained(folder)

    def view(arrays):
        arrays[UP] = arrays[UP].reshape(-1).view(storage).reshape(-1, 1)

    rewrite(folder, view)
    assert_same_leaves(nnx.state(from_pretrained(folder)[0]), nnx.state(want))


def test_modules_that_a_checkpoint_keeps_whole_stay_whole(folder):
    whole = random_tensor(UP, (128, 64))

    def keep(arrays):
        for name in [name for name in arrays if name.startswith(UP)]:
            del arrays[name]
        arrays[UP] = whole

    rewrite(folder, keep)
    model, _ = from_pretrained(folder, dtype="float32", load_in="nf4")
    np.testing.assert_array_equal(weights(model)[UP.removesuffix(".weight")], whole)
    assert quantization_config(model)["llm_int8_skip_modules"] == ["lm_head", UP.removesuffix(".weight")]


FP8_SAYS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MXFP4_SAYS = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}


@pytest.mark.parametrize(("said", "config"), [("fp8", FP8_SAYS), ("mxfp4", MXFP4_SAYS)])
def test_a_config_that_says_another_format_than_the_weights_have(folder, said, config):
    """Plans go by config.json, and loading by the tensors: both must say the same."""
    hf = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(hf | {"quantization_config": config}))
    words = (
        f"{folder}: config.json: quantization_config says that the weights are stored in {said}, but they are stored "
        "in nf4: fetch config.json again, or take quantization_config out of it"
    )
    for load_in in (None, "nf4"):
        with pytest.raises(ValueError, match=re.escape(words)):
            from_pretrained(folder, load_in=load_in)
    del hf["quantization_config"]
    (folder / "config.json").write_text(json.dumps(hf))
    assert stored_in(from_pretrained(folder)[0]) == "nf4"


def test_a_config_may_say_one_of_the_formats_that_the_weights_have(folder):
    def mix(arrays):
        for name in [name for name in arrays if name.startswith(UP)]:
            del arrays[name]
        arrays[UP] = np.ones((128, 64), jnp.float8_e4m3fn)
        arrays[UP.replace("weight", "weight_scale_inv")] = np.ones((1, 1), np.float32)

    rewrite(folder, mix)
    hf = json.loads((folder / "config.json").read_text())
    for config in (hf["quantization_config"], FP8_SAYS):
        (folder / "config.json").write_text(json.dumps(hf | {"quantization_config": config}))
        model, _ = from_pretrained(folder)
        assert {type(weight) for weight in weights(model).values()} == {NF4, FP8}


def test_fp4_checkpoints_load(folder):
    table = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / 12
    nf4, _ = from_pretrained(folder, dtype="float32")

    def rename(arrays):
        for name in [name for name in arrays if name.endswith("__nf4")]:
            state = json.loads(arrays.pop(name).tobytes()) | {"quant_type": "fp4"}
            arrays[name.replace("__nf4", "__fp4")] = np.frombuffer(json.dumps(state).encode(), np.uint8)
        for name in [name for name in arrays if name.endswith(".quant_map")]:
            arrays[name] = table

    rewrite(folder, rename)
    change_config(folder, bnb_4bit_quant_type="fp4")
    model, _ = from_pretrained(folder, dtype="float32")
    one, other = (weights(m)[UP.removesuffix(".weight")] for m in (model, nf4))
    np.testing.assert_array_equal(one.codes, other.codes)
    codes = np.stack([one.codes >> 4, one.codes & 15], axis=1).reshape(-1, 64)
    np.testing.assert_allclose(
        one.decode().reshape(-1, 64), table[codes] * np.asarray(other.block_absmax())[:, None], rtol=1e-6
    )
    assert quantization_config(model)["bnb_4bit_quant_type"] == "fp4"


def damage(name, value):
    def change(arrays):
        if value is None:
            del arrays[name]
        else:
            arrays[name] = value(arrays[name]) if callable(value) else value

    return change


def state_with(**changes):
    def change(array):
        return np.frombuffer(json.dumps(json.loads(array.tobytes()) | changes).encode(), np.uint8)

    return damage(STATE, change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (damage(UP, None), rf"{UP}.\w+ is there, but {UP} is missing"),
        (damage(STATE, None), f"{UP}: has 0 quant_state tensors, not one"),
        (damage(STATE, np.frombuffer(b"{", np.uint8)), f"{UP}: its quant_state is damaged"),
        (damage(f"{UP}.nested_quant_map", None), f"{UP}.nested_quant_map is missing"),
        (damage(f"{UP}.absmax", lambda a: a[1:]), f"{UP}.absmax has 127 bytes of U8; a four-bit tensor"),
        (damage(f"{UP}.quant_map", lambda a: -a), f"{UP}.quant_map is not the table of nf4"),
        (damage(UP, lambda a: a[:-1]), f"{UP} has 4095 bytes of U8; a four-bit tensor .128, 64. needs 4096"),
        (state_with(blocksize=128), "block sizes .128, 256. are not supported; supported: .64, 256."),
        (state_with(dtype="float64"), "quantised from float64, which is not supported"),
        (state_with(shape=[64, 128]), r"of another shape: model.layers.1.mlp.up_proj.weight \[64, 128\]"),
    ],
)
def test_damaged_four_bit_tensors_are_refused(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"quant_method": "gptq"},
            "quant_method = 'gptq'; of quantised .* can be loaded: bitsandbytes' in four bits; FP8",
        ),
        ({"load_in_4bit": False, "load_in_8bit": False}, "quant_method = 'bitsandbytes'; of quantised"),
    ],
)
def test_other_methods_are_refused_by_name(folder, changes, message):
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder)


@pytest.mark.parametrize("quantised", [["model.embed_tokens.weight"], ["model.embed_tokens.weight", "lm_head.weight"]])
def test_an_embedding_in_four_bits_is_refused(folder, quantised):
    """Also where it is the head too, and the file has that once more."""

    def rename(arrays):
        state = json.loads(arrays[STATE].tobytes()) | {"shape": [64, 64]}
        for target in quantised:
            for name in [name for name in arrays if name.startswith(UP)]:
                arrays[target + name.removeprefix(UP)] = arrays[name].copy()
            arrays[STATE.replace(UP, target)] = np.frombuffer(json.dumps(state).encode(), np.uint8)
            arrays[target] = arrays[UP][:2048]
            arrays[f"{target}.absmax"] = arrays[f"{UP}.absmax"][:64]

    rewrite(folder, rename)
    with pytest.raises(ValueError, match="model.embed_tokens.weight is quantised; only linears of layers can be"):
        from_pretrained(folder)


def test_values_that_are_not_finite_are_refused(plain):
    rewrite(plain, damage(UP, lambda a: np.where(a == a.max(), np.inf, a)))
    with pytest.raises(ValueError, match=f"values that are not finite in .*{UP}"):
        from_pretrained(plain, load_in="nf4")


def test_a_config_with_quantisation_is_not_trained_from_scratch(folder):
    with pytest.raises(ValueError, match="a model with random weights is not quantised; remove quantization_config"):
        hf.model_from_config(folder, jax.random.key(0))


def test_shaken_adapters_change_the_logits_over_four_bits(folder):
    """That adapters act at all over the golden base."""
    base, _ = from_pretrained(folder, dtype="float32")
    fresh = get_peft_model(base, r=2)
    np.testing.assert_allclose(fresh(TOKENS), base(TOKENS), atol=1e-5)
    assert not np.allclose(shaken(fresh)(TOKENS), base(TOKENS), atol=1e-2)


def test_a_real_model_in_four_bits(test_data):
    """Worse than its 32-bit self, but not by much: it has only 0.26M parameters to lose."""
    folder = test_data / "models" / "stories260K"

    def loss(**settings):
        model, tokenizer = from_pretrained(folder, dtype="float32", **settings)
        ids = jnp.array([tokenizer("Once upon a time there was a little girl who went out to play.")["input_ids"]])
        log_probs = jax.nn.log_softmax(model(ids)[:, :-1])
        return float(-jnp.take_along_axis(log_probs, ids[:, 1:, None], -1).mean())

    whole, packed = loss(), loss(load_in="nf4")
    assert whole + 0.01 < packed < whole + 0.4
