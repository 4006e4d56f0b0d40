"""Merging: the result computes what the adapter computed, or there is no result."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from llama_cpp_models import made
from tiny_models import adapted_model, tiny_model

from jaxtune import get_peft_model, merge_adapter
from jaxtune.models.adapters import merge
from jaxtune.models.files.quant import compute_in_fp8, computes_in_fp8, dequantize, quantize
from jaxtune.models.linear import Frozen
from jaxtune.models.lora import linears

TOKENS = jnp.arange(24).reshape(2, 12)
# Size of the difference of logits, of models that compute in the dtype: a few roundings of 14 products.
LOGITS = {"float32": 1e-6, "bfloat16": 0.03, "float16": 0.004}

SETTINGS = {
    "lora": dict(r=4),
    "rslora": dict(r=4, use_rslora=True),
    "dora": dict(r=4, use_dora=True, lora_dropout=0.1),
    "patterns": dict(
        r=4, rank_pattern={"q_proj": 2}, alpha_pattern={"up_proj": 3}, target_modules=["q_proj", "up_proj"]
    ),
    "saved": dict(r=2, modules_to_save=["embed_tokens", "lm_head"]),
}


def difference(got, expected):
    return float(jnp.sqrt(jnp.mean((got - expected) ** 2)) / jnp.std(expected))


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in SETTINGS), ("lora", "bfloat16"), ("dora", "float16")]
)
def test_merged_logits_equal_adapter_logits(name, dtype):
    model = adapted_model(tiny_model(dtype), **SETTINGS[name])
    merged = merge_adapter(model)
    assert difference(merged(TOKENS), model(TOKENS)) < LOGITS[dtype]
    assert difference(tiny_model(dtype)(TOKENS), model(TOKENS)) > 10 * LOGITS[dtype]
    variables = [v for _, v in nnx.iter_graph(merged) if isinstance(v, nnx.Variable)]
    assert all(type(v) is nnx.Param for v in variables)
    assert {v.get_value().dtype for v in variables} == {jnp.dtype(dtype)}
    assert nnx.graphdef(merged) == nnx.graphdef(tiny_model(dtype))  # a base again: it trains, merges, saves as one


def test_tied_heads_stay_tied():
    model = adapted_model(tiny_model(tie_embeddings=True), **SETTINGS["saved"])
    merged = merge_adapter(model)
    assert merged.head is None
    np.testing.assert_array_equal(merged.embedding.weight[...], model.embedding.weight[...])


def test_the_argument_is_untouched_and_the_rest_is_shared():
    base = tiny_model()
    base.base_fingerprint = "abc"
    model = adapted_model(base, r=2, target_modules=["q_proj"])
    before = model(TOKENS)
    merged = merge_adapter(model)
    assert merged.base_fingerprint is None and model.base_fingerprint == "abc"
    assert model.layers[0].mixer.q_proj.lora is not None and type(model.norm.weight) is Frozen
    np.testing.assert_array_equal(model(TOKENS), before)
    assert merged.layers[0].mlp.up_proj.weight.get_value() is base.layers[0].mlp.up_proj.weight.get_value()


@pytest.mark.full
def test_a_merge_over_a_base_that_computes_in_fp8():
    """Weights in FP8 that multiply as they are: the merged model has 16 bits, or 32, and multiplies in them."""
    base = compute_in_fp8(quantize(tiny_model(), "fp8"))
    model = adapted_model(base, r=4)
    merged = merge_adapter(model)
    assert not computes_in_fp8(merged) and not computes_in_fp8(dequantize(base)) and computes_in_fp8(model)
    decoded = dequantize(model)
    assert difference(merged(TOKENS), decoded(TOKENS)) < LOGITS["float32"]


@pytest.mark.full
def test_what_no_training_changes_stays_so():
    model = adapted_model(made("gemma4"), r=2)
    merged = merge_adapter(model)
    variables = [v for _, v in nnx.iter_graph(merged) if isinstance(v, nnx.Variable)]
    scalars = [layer.layer_scalar for layer in merged.layers]
    assert all(isinstance(scalar, Frozen) for scalar in scalars)
    assert sum(not isinstance(v, nnx.Param) for v in variables) == len(scalars)


@pytest.mark.full
def test_adapter_at_its_start_merges_to_the_base_bit_for_bit():
    for settings in (dict(), dict(use_dora=True)):
        base = tiny_model("bfloat16")
        merged = merge_adapter(get_peft_model(base, r=2, **settings))
        for (name, ours), (_, theirs) in zip(linears(merged), linears(base), strict=True):
            np.testing.assert_array_equal(ours.weight[...], theirs.weight[...], err_msg=name)


def test_no_adapter():
    with pytest.raises(ValueError, match="this model has no adapter"):
        merge_adapter(tiny_model())


def test_overflow_in_storage_is_refused():
    model = adapted_model(tiny_model("float16"), r=2)
    lora = model.layers[1].mlp.up_proj.lora
    lora.b.set_value(lora.b.get_value().at[3].set(1e6))
    with pytest.raises(ArithmeticError, match=r"layers\.1\.mlp\.up_proj is not finite in float16"):
        merge_adapter(model)


@pytest.mark.full
@pytest.mark.parametrize(("name", "dtype"), [("lora", "bfloat16"), ("dora", "float32")])
def test_wrong_arithmetic_is_caught(monkeypatch, name, dtype):
    right = merge.merged_weight

    def wrong(weight, lora):
        return right(weight, dataclasses.replace(lora, scale=0.9 * lora.scale))

    monkeypatch.setattr(merge, "merged_weight", wrong)
    jax.clear_caches()
    with pytest.raises(ArithmeticError, match=r"proj does not act like its adapter: .* times the rounding error"):
        merge_adapter(adapted_model(tiny_model(dtype), **SETTINGS[name]))
    jax.clear_caches()


def test_logits_that_differ_are_caught(monkeypatch):
    """Something between the matrices: here the merge changes a norm by 1 %."""
    model = adapted_model(tiny_model(), r=4)
    right = merge.copy_structure

    def forgetful(module):
        copy = right(module)
        copy.layers[1].mlp_norm.weight.set_value(jnp.full(16, 1.01))
        monkeypatch.setattr(merge, "copy_structure", right)
        return copy

    monkeypatch.setattr(merge, "copy_structure", forgetful)
    with pytest.raises(ArithmeticError, match="logits differ from the adapter model's by"):
        merge_adapter(model)
    np.testing.assert_array_equal(model.layers[1].mlp_norm.weight[...], 1.0)
