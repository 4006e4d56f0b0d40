"""Fake quantisation: the grid, the gradients that pass through it, and checkpoints that compute the same."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import mean_loss
from flax import nnx
from tiny_models import adapted_model, tiny_model

from jaxtune.models.adapters.merge import merge_adapter
from jaxtune.models.config import LayerSpec
from jaxtune.models.files.quant import (
    convert_qat,
    dequantize,
    not_quantized,
    prepare_qat,
    qat_config,
    qat_spec,
    quantize,
)
from jaxtune.models.hf import from_pretrained, save_pretrained
from jaxtune.models.lora import linears
from jaxtune.models.qat.fake_quant import FakeQuant, int4

# Every input is a multiple of 32. One layer: compiling is what takes the time of a test.
SIZES = dict(hidden_size=64, intermediate_size=96, head_dim=32, attention_scale=32**-0.5, layers=(LayerSpec(),))
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 48, (2, 12)))


def model_of(dtype="float32"):
    return tiny_model(dtype, **SIZES)


def reference(weight: np.ndarray, size: int) -> np.ndarray:
    """int4 of float32 weights, one group at a time."""
    out = np.zeros_like(weight)
    for row in range(weight.shape[0]):
        for at in range(0, weight.shape[1], size):
            group = weight[row, at : at + size]
            scale = max(group.max() * np.float32(1 / 7), -group.min() / np.float32(8))
            if scale > 0:
                out[row, at : at + size] = np.clip(np.rint(group / scale), -8, 7) * scale
    return out


@pytest.mark.parametrize("size", [32, 64, 128])
def test_int4_is_its_definition(size):
    weight = np.random.default_rng(1).standard_normal((5, 256)).astype(np.float32)
    weight[0, :size], weight[1, :size], weight[2, :size] = 0.0, abs(weight[1, :size]), -abs(weight[2, :size])
    weight[3, :size] *= 1e-30
    rounded = np.asarray(int4(jnp.asarray(weight), size, "float32"))
    np.testing.assert_array_equal(rounded, reference(weight, size))
    groups, kept = weight.reshape(-1, size), rounded.reshape(-1, size)
    scale = np.maximum(groups.max(1) / 7, -groups.min(1) / 8)
    assert (abs(groups - kept).max(1) <= scale * 0.5001).all()  # nothing is clipped
    assert np.unique(np.rint(kept / np.where(scale == 0, 1, scale)[:, None])).tolist() == list(range(-8, 8))


def test_int4_in_bfloat16_is_code_times_scale_in_bfloat16():
    """What a W4A16 kernel multiplies: both factors in 16 bits, the product rounded once."""
    weight = jax.random.normal(jax.random.key(0), (4, 128), jnp.float32)
    rounded = int4(weight, 32, "bfloat16")
    assert rounded.dtype == jnp.bfloat16
    groups = weight.reshape(4, -1, 32)
    scale = jnp.maximum(groups.max(-1) / 7, -groups.min(-1) / 8).astype(jnp.bfloat16)[..., None]
    codes = jnp.rint(groups / scale.astype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal((codes * scale).reshape(4, 128), rounded)


@pytest.mark.full
def test_gradients_pass_straight_through():
    """The gradient of a prepared model is that of the model that holds the rounded weights."""
    prepared = prepare_qat(model_of(), group_size=32)
    loss, gradient = nnx.value_and_grad(mean_loss)(prepared, TOKENS)
    wanted_loss, wanted = nnx.value_and_grad(mean_loss)(convert_qat(prepared), TOKENS)
    assert loss == wanted_loss != mean_loss(model_of(), TOKENS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8), gradient, wanted)


@pytest.mark.full
def test_adapter_gradients_are_those_of_the_merged_weight():
    model = prepare_qat(adapted_model(quantize(model_of()), r=3, lora_alpha=6), group_size=32)
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    gradient = nnx.merge(graph, jax.grad(lambda t: mean_loss(nnx.merge(graph, t, frozen), TOKENS))(trainable), frozen)
    dense = nnx.grad(mean_loss)(merge_adapter(model), TOKENS)
    checked = 0
    for (name, ours), (_, adapted), (_, whole) in zip(
        linears(gradient), linears(model), linears(nnx.merge(nnx.graphdef(merge_adapter(model)), dense)), strict=True
    ):
        a, b, scale = adapted.lora.a[...], adapted.lora.b[...], adapted.lora.scale
        dweight = whole.weight[...]
        np.testing.assert_allclose(ours.lora.a[...], scale * b.T @ dweight, rtol=1e-4, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(ours.lora.b[...], scale * dweight @ a.T, rtol=1e-4, atol=1e-6, err_msg=name)
        checked += 1
    assert checked == 7


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("full", "bfloat16"), ("lora", "float32"), ("lora over nf4", "bfloat16"), ("one target", "bfloat16")],
)
def test_the_exported_checkpoint_computes_the_same(tmp_path, kind, dtype):
    base = model_of(dtype)
    if kind == "full":
        prepared = prepare_qat(base, group_size=32)
        converted = convert_qat(prepared)
    else:
        base = quantize(base) if "nf4" in kind else base
        settings = dict(target_modules=["q_proj"]) if kind == "one target" else {}
        prepared = prepare_qat(adapted_model(base, r=4, **settings), group_size=32)
        converted = merge_adapter(prepared)
    assert qat_spec(prepared) == converted.qat == FakeQuant("int4", 32, dtype)
    logits = prepared(TOKENS)
    np.testing.assert_array_equal(converted(TOKENS), logits)
    plain = dequantize(base)(TOKENS)
    assert not np.allclose(plain, logits, atol=1e-3)  # rounding does something

    save_pretrained(converted, tmp_path / "model")
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    assert written["qat"]["format"] == "int4" and written["qat"]["group_size"] == 32
    assert written["qat"]["modules_to_not_convert"] == ["lm_head"] and "quantization_config" not in written
    assert written["qat"]["dtype"] == dtype
    loaded, _ = from_pretrained(tmp_path / "model", dtype=dtype)
    assert loaded.qat == converted.qat
    np.testing.assert_array_equal(loaded(TOKENS), logits)
    for name, linear in linears(loaded):
        groups = np.asarray(linear.weight[...], np.float32).reshape(-1, 32)
        assert max(len(np.unique(group)) for group in groups) <= 16, name


def test_a_linear_that_the_groups_do_not_fit_stays_as_it_is():
    prepared = prepare_qat(tiny_model(**(SIZES | dict(head_dim=8))), group_size=32)
    converted = convert_qat(prepared)
    skipped = ["model.layers.0.self_attn.o_proj"]
    assert not_quantized(prepared, qat_spec(prepared)) == skipped
    assert qat_config(converted)["modules_to_not_convert"] == ["lm_head", *skipped]
    for (name, before), (_, after) in zip(linears(prepared), linears(converted), strict=True):
        assert np.array_equal(before.weight[...], after.weight[...]) == (name in skipped)


def test_what_cannot_be_prepared_converted_or_saved(tmp_path):
    with pytest.raises(ValueError, match=r"group_size = 128 divides no linear's input \(they are \[64, 96\]\)"):
        prepare_qat(model_of())
    with pytest.raises(ValueError, match="format 'int3' is not supported; supported: int4"):
        prepare_qat(model_of(), "int3")
    with pytest.raises(ValueError, match="group_size 48: int4 has groups of 32, 64 or 128"):
        prepare_qat(model_of(), group_size=48)
    with pytest.raises(ValueError, match="is not prepared for QAT"):
        convert_qat(model_of())
    prepared = prepare_qat(model_of(), group_size=32)
    with pytest.raises(ValueError, match="this model is prepared for QAT: make its weights the rounded ones first"):
        save_pretrained(prepared, tmp_path / "x")
    with pytest.raises(ValueError, match="q_proj has an adapter: merge_adapter converts"):
        convert_qat(prepare_qat(adapted_model(model_of(), r=2), group_size=32))
