"""Four bits against bitsandbytes itself, and checkpoints both ways through transformers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("bitsandbytes")

import nf4_reference
import reference
from nf4_cases import CONFIG, cases
from safetensors.numpy import load_file
from tiny import CONFIGS
from tiny_models import adapted_model

from jaxtune.models.adapters.merge import merge_adapter
from jaxtune.models.files.quant import dequantize, quantize
from jaxtune.models.hf import from_pretrained, save_pretrained
from jaxtune.models.lora import experts, linears
from jaxtune.pallas.formats import FP4, NF4, FourBit


def theirs(array, double, quant_type="nf4") -> tuple[dict, FourBit]:
    """(what bitsandbytes made, the same bytes as ours)"""
    made = nf4_reference.quantize(array, double, quant_type)
    leaves = [None if made[key] is None else jnp.asarray(made[key]) for key in ("codes", "absmax", "nested_absmax")]
    nested = (jnp.asarray(nf4_reference.dynamic_map()), jnp.asarray(made["offset"])) if double else (None, None)
    return made, {"nf4": NF4, "fp4": FP4}[quant_type](*leaves, *nested, array.shape, "float32")


@pytest.mark.parametrize("scale", [1.0, 1e-30, 3e4])
@pytest.mark.parametrize("shape", [(64, 128), (192, 192), (5, 64), (3, 7), (1, 1), (129, 1)])
def test_bytes(shape, scale):
    for seed in range(5):
        draw = np.random.default_rng(seed)
        array = (draw.standard_normal(shape) * scale * draw.integers(0, 2, (shape[0], 1))).astype(np.float32)
        made, same = theirs(array, double=False)
        ours = NF4.encode(array, double_quant=False)
        np.testing.assert_array_equal(ours.codes, made["codes"])
        assert np.asarray(ours.absmax).tobytes() == made["absmax"].tobytes()
        if made["decoded"] is not None:
            np.testing.assert_array_equal(same.decode(), made["decoded"])


def test_halfway_values_take_the_code_that_bitsandbytes_gives_them():
    """Every bound of the table and its float32 neighbours, in blocks whose absmax is one."""
    bounds = (NF4.table[:-1] + NF4.table[1:]) / np.float32(2)
    near = np.concatenate([bounds, np.nextafter(bounds, np.float32(-2)), np.nextafter(bounds, np.float32(2))])
    array = np.concatenate([np.ones(1, np.float32), near, np.zeros(64 - 1 - near.size, np.float32)])[None]
    np.testing.assert_array_equal(NF4.encode(array).codes, theirs(array, False)[0]["codes"])


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [False, True])
def test_decoding(double, quant_type):
    for name, array in cases().items():
        if name.startswith("rows"):
            made, same = theirs(array, double, quant_type)
            np.testing.assert_array_equal(same.decode(), made["decoded"], err_msg=name)


def test_nested_codes_are_the_nearest():
    array = np.random.default_rng(3).standard_normal((1024, 512)).astype(np.float32)  # 8,192 absmax
    made, same = theirs(array, double=True)
    ours = NF4.encode(array)
    different = np.asarray(ours.absmax) != made["absmax"]
    # bitsandbytes' CPU kernel looks codes up in steps of 2^-16, so next to a bound it can miss: 0.16 % of them.
    assert 0 < different.mean() < 0.003
    plain = nf4_reference.quantize(array, False)["absmax"]
    ours_off, theirs_off = (np.abs(np.asarray(packed.block_absmax()) - plain) for packed in (ours, same))
    assert (ours_off[different] <= theirs_off[different] + 1e-7).all()
    assert (theirs_off - ours_off).max() < 2**-15 * float(made["nested_absmax"].max())


@pytest.fixture
def base(tmp_path):
    return reference.make_checkpoint(tmp_path / "base", CONFIG)


SETTINGS = [
    dict(bnb_4bit_use_double_quant=True),
    dict(bnb_4bit_use_double_quant=False),
    dict(bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True),
    dict(bnb_4bit_quant_storage="bfloat16"),
    dict(bnb_4bit_quant_storage="float32", bnb_4bit_use_double_quant=True),
    dict(llm_int8_skip_modules=["lm_head", "o_proj", "model.layers.1.mlp"]),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=[",".join(map(str, s.values())) for s in SETTINGS])
def test_checkpoints_of_bitsandbytes_load_and_go_back(base, tmp_path, settings):
    folder = nf4_reference.make_checkpoint(base, tmp_path / "theirs", **settings)
    want, packed = nf4_reference.dequantised(folder)
    model, _ = from_pretrained(folder, dtype="float32")
    mine = {f"{name}.weight": linear.stored_weight for name, linear in linears(model)}
    assert {name for name, weight in mine.items() if isinstance(weight, FourBit)} == packed
    for name, weight in mine.items():
        value = weight.decode(jnp.float32) if isinstance(weight, FourBit) else weight
        np.testing.assert_array_equal(value, want[name], err_msg=name)
    save_pretrained(model, tmp_path / "ours")
    again, packed_again = nf4_reference.dequantised(tmp_path / "ours")
    assert packed_again == packed
    assert again.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_what_we_quantise_loads_in_transformers(tmp_path, name, dtype):
    """Identical dequantised weights, and logits over them."""
    hf = CONFIGS[name] | {"intermediate_size": 128}
    base = reference.make_checkpoint(tmp_path / "base", hf)
    model, _ = from_pretrained(base, dtype=dtype, load_in="nf4")
    save_pretrained(model, tmp_path / "ours")
    arrays, packed = nf4_reference.dequantised(tmp_path / "ours")
    assert packed == {f"{module}.weight" for module, _ in linears(model)}
    for module, linear in linears(model):
        np.testing.assert_array_equal(linear.stored_weight.decode(jnp.float32), arrays[f"{module}.weight"])
    if dtype == "float32":
        tokens = np.random.default_rng(0).integers(3, hf["vocab_size"], (2, 24), np.int32)
        want = nf4_reference.dequantised_logits(tmp_path / "ours", hf, tokens)
        np.testing.assert_allclose(model(tokens), want, atol=2e-4)


def test_experts_are_stored_as_bitsandbytes_linears(tmp_path):
    """bitsandbytes decodes every piece to our numbers; transformers 5, which has no experts in four bits, refuses."""
    hf = CONFIGS["qwen3_moe"] | {"num_hidden_layers": 1, "moe_intermediate_size": 256}
    model, _ = from_pretrained(reference.make_checkpoint(tmp_path / "base", hf), dtype="float32", load_in="nf4")
    with pytest.warns(UserWarning, match="transformers 5 does not"):
        save_pretrained(model, tmp_path / "ours")
    stored = load_file(tmp_path / "ours" / "model.safetensors")
    want = {name: np.asarray(matrix.stored_weight.decode()) for name, matrix in experts(model)}
    prefix = "model.layers.0.mlp.experts"
    for expert in range(hf["num_experts"]):
        for matrix, fused, rows in (
            ("gate_proj", "gate_up_proj", slice(256)),
            ("up_proj", "gate_up_proj", slice(256, None)),
            ("down_proj", "down_proj", slice(None)),
        ):
            got = nf4_reference.decoded_tensor(stored, f"{prefix}.{expert}.{matrix}.weight")
            np.testing.assert_array_equal(got, want[f"{prefix}.{fused}"][expert, rows])
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        nf4_reference.dequantised(tmp_path / "ours")
    save_pretrained(dequantize(model), tmp_path / "opened")
    tokens = np.random.default_rng(0).integers(3, hf["vocab_size"], (2, 24), np.int32)
    got = reference.logits(reference.load(tmp_path / "opened"), tokens)
    np.testing.assert_allclose(got, jax.device_get(model(tokens)), atol=2e-4)


def test_a_merged_model_equals_the_adapter_over_dequantised_weights(base, tmp_path):
    model = adapted_model(quantize(from_pretrained(base, dtype="float32")[0]), r=4)
    tokens = np.random.default_rng(0).integers(3, CONFIG["vocab_size"], (2, 24), np.int32)
    save_pretrained(merge_adapter(model), tmp_path / "merged")
    got = reference.logits(reference.load(tmp_path / "merged"), tokens)
    np.testing.assert_allclose(got, jax.device_get(model(tokens)), atol=2e-4)
