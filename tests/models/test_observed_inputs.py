"""The observed scales of activations in nvfp4-nvfp4: what is observed, how products use it, what files record of it,
and what is refused."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import adapted_model, tiny_model

import jaxtune
from jaxtune.models import linear as linear_module
from jaxtune.models.adapters import trained_over
from jaxtune.models.config import LayerSpec, MoEConfig
from jaxtune.models.files.quant import convert_qat, prepare_qat, qat_spec, unrounded
from jaxtune.models.lora import linears, without_adapter
from jaxtune.models.observed_inputs import known_scales, observed_scales
from jaxtune.models.qat.fake_quant import INPUT_SCALES, FakeQuant

SIZES = dict(hidden_size=64, intermediate_size=96, head_dim=32, attention_scale=32**-0.5)
TOKENS = np.random.default_rng(0).integers(0, 48, (3, 12)).astype(np.int32)
NAME = "nvfp4-nvfp4"


def model_of(dtype="float32", layers=1, **changes):
    return tiny_model(dtype, **SIZES, layers=(LayerSpec(),) * layers, **changes)


def prepared(model, tokens=TOKENS):
    return prepare_qat(model, NAME, input_scales=observed_scales(model, NAME, tokens))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_scale_follows_from_the_largest_input_of_all_rows(monkeypatch, dtype):
    """Of each product, which is known here by the shapes of its weights."""
    model, largest = adapted_model(model_of(dtype), r=2), {}
    scales = observed_scales(model, NAME, TOKENS)
    multiply = linear_module.quant_matmul

    def watched(x, weights, *others, **options):
        key = tuple(weight.shape for weight in weights)
        jax.debug.callback(lambda value: largest.update({key: max(largest.get(key, 0), float(value))}), abs(x).max())
        return multiply(x, weights, *others, **options)

    monkeypatch.setattr(linear_module, "quant_matmul", watched)
    # Otherwise gated_matmul would multiply by down_proj, which computes its input itself.
    monkeypatch.setattr(linear_module.Linear, "only_adapted", lambda *arguments: False)
    jax.clear_caches()
    for row in TOKENS:
        jax.block_until_ready(model(jnp.asarray(row[None])))
    jax.effects_barrier()
    own = dict(linears(model))
    groups = [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)]
    assert len(largest) == len(groups) and len(scales) == 7
    for group in groups:
        names = [name for name in own if name.endswith(group)]
        found = {scales[name] for name in names}
        value = jnp.float32(largest[tuple(own[name].weight.shape for name in names)])
        assert found == {float(1 / value * jnp.float32(448 * 6))}, group
    assert len(set(scales.values())) == len(groups)
    jax.clear_caches()


@pytest.mark.full
def test_padding_and_other_documents_of_a_row_do_not_count():
    model = model_of()
    loud = model.embedding.weight[...].at[47].set(jnp.zeros(64).at[5].set(1.0))  # one large number after the norm
    model.embedding.weight = model.embedding.weight.replace(loud)
    tokens = np.where(TOKENS == 47, 1, TOKENS)
    wanted = observed_scales(model, NAME, tokens)
    packed = np.full((2, 24), 47, np.int32)
    ids = np.zeros((2, 24), np.int32)
    packed[0, :12], packed[0, 12:], packed[1, :12] = tokens
    ids[0, :12], ids[0, 12:], ids[1, :12] = 1, 2, 1
    found = observed_scales(model, NAME, packed, ids)
    assert found == pytest.approx(wanted, rel=1e-5)
    ids[1, 12:] = 2  # the same tokens, no padding any more
    assert observed_scales(model, NAME, packed, ids) != pytest.approx(wanted, rel=1e-5)


def test_what_is_not_finite_is_refused():
    model = model_of()
    model.embedding.weight = model.embedding.weight.replace(model.embedding.weight[...].at[TOKENS[1, 3]].set(np.nan))
    with pytest.raises(FloatingPointError, match=r"the inputs of model.layers.0.self_attn.\w_proj are not finite"):
        observed_scales(model, NAME, TOKENS)


@pytest.mark.full
def test_products_are_those_of_rounded_inputs_and_weights_and_gradients_pass():
    """y = round(x) round(w)^T under each linear's own scale; the gradient of x is dy round(w)."""
    model = prepared(model_of(layers=2))
    draw = np.random.default_rng(1)
    for name, linear in linears(model):
        x = jnp.asarray(draw.standard_normal((5, linear.sizes[1])), jnp.float32)
        dy = jnp.asarray(draw.standard_normal((5, linear.sizes[0])), jnp.float32)
        out, pullback = jax.vjp(linear, x)
        spec = linear.fake_quant
        xq = np.asarray(spec.round_inputs(x, jnp.float32(known_scales(model)[name])))
        wq = np.asarray(FakeQuant("nvfp4", None, "float32").round(linear.weight[...]))
        assert not np.array_equal(xq, x)
        np.testing.assert_allclose(out, xq @ wq.T, rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(pullback(dy)[0], dy @ wq, rtol=1e-5, atol=1e-6, err_msg=name)
    assert abs(model(TOKENS) - convert_qat(model)(TOKENS)).max() > 1e-2  # the converted one rounds no activations


@pytest.mark.full
@pytest.mark.parametrize("how", ["adapter", "merged", "full"])
def test_files_record_the_scales(tmp_path, how):
    """An adapter is loaded with them, and a merged folder has them for its export; they are floats of 32 bits."""
    jaxtune.save_pretrained(model_of("bfloat16"), tmp_path / "base")
    base, _ = jaxtune.from_pretrained(tmp_path / "base")
    model = prepared(base if how == "full" else adapted_model(base, r=2))
    scales = known_scales(model)
    assert set(scales) == {name for name, _ in linears(model)}
    if how == "adapter":
        jaxtune.save_adapter(model, tmp_path / "out")
        assert trained_over.read(tmp_path / "out").qat.input_scales == tuple(sorted(scales.items()))
        again, _ = jaxtune.from_pretrained(tmp_path / "out")
        assert qat_spec(again) == FakeQuant(NAME, None, "bfloat16") and known_scales(again) == scales
        np.testing.assert_array_equal(again(TOKENS), model(TOKENS))
        whole = jaxtune.merge_adapter(again)
    else:
        whole = convert_qat(model) if how == "full" else jaxtune.merge_adapter(model)
        jaxtune.save_pretrained(whole, tmp_path / "out")
        said = json.loads((tmp_path / "out/config.json").read_text())["qat"]
        assert said[INPUT_SCALES] == scales
        again, _ = jaxtune.from_pretrained(tmp_path / "out")
        assert known_scales(again) == scales and again.qat == whole.qat
        np.testing.assert_array_equal(prepare_qat(again, NAME)(TOKENS), prepare_qat(whole, NAME)(TOKENS))
    assert whole.qat == FakeQuant(NAME, None, "bfloat16", input_scales=tuple(sorted(scales.items())))
    assert all(linear.input_scale is None and linear.fake_quant is None for _, linear in linears(whole))


def test_a_model_that_stops_rounding_has_no_scales():
    model = prepared(adapted_model(model_of(), r=2))
    for plain in (unrounded(model), without_adapter(model), prepare_qat(model, "nvfp4")):
        assert all(linear.input_scale is None for _, linear in linears(plain)) and known_scales(plain) == {}
    assert known_scales(prepare_qat(model, NAME)) == known_scales(model) != {}  # prepared again, it keeps them


def test_what_cannot_be_rounded_so_is_refused():
    model = model_of()
    with pytest.raises(
        ValueError, match="nvfp4-nvfp4 rounds activations under observed scales, and model.layers.0.sel"
    ):
        prepare_qat(model, NAME)
    with pytest.raises(ValueError, match="observed_scales: 'mxfp4-mxfp4' rounds no activations under observed scales"):
        observed_scales(model, "mxfp4-mxfp4", TOKENS)
    with pytest.raises(ValueError, match="nvfp4-nvfp4 does not round experts, .*: take nvfp4, or mxfp4-mxfp4"):
        prepare_qat(model_of(moe=MoEConfig(4, 2, 32)), NAME)
    record = FakeQuant(NAME, None, "bfloat16", input_scales=(("a", 2.0),)).record()
    assert FakeQuant.of_record("file: qat", record).input_scales == (("a", 2.0),)
    for wrong, message in (([1.0], "must be an object"), ({"a": 0.0}, "a = 0.0: must be a finite number above 0")):
        with pytest.raises(ValueError, match=f"file: qat: {INPUT_SCALES}.*{message}"):
            FakeQuant.of_record("file: qat", record | {INPUT_SCALES: wrong})
    assert INPUT_SCALES not in dataclasses.replace(FakeQuant(NAME, None, "bfloat16")).record()
