"""The formats of quantisation-aware training: what each rounds to, and the gradients of linears and experts with
adapters, DoRA and dropout."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import mean_loss
from flax import nnx
from tiny_models import adapted_model, tiny_model

from jaxtune.models.adapters.merge import merge_adapter
from jaxtune.models.config import LayerSpec, MoEConfig
from jaxtune.models.files.quant import convert_qat, prepare_qat
from jaxtune.models.lora import copy_structure, experts, linears, matrices, without_adapter
from jaxtune.models.qat import rounded_inputs
from jaxtune.models.qat.fake_quant import ROUNDINGS, FakeQuant
from jaxtune.pallas.format_names import QAT_GROUPS
from jaxtune.pallas.formats import FORMATS

SIZES = dict(hidden_size=64, intermediate_size=96, head_dim=32, attention_scale=32**-0.5, layers=(LayerSpec(),))
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 48, (2, 12)))
SPECS = [(name, QAT_GROUPS[name][0]) for name in ROUNDINGS] + [("int8", None)]
DRAWN = np.random.default_rng(3).standard_normal((6, 128)).astype(np.float32)


def weights_only(model):
    """The same model, whose activations are not rounded."""
    model = copy_structure(model)
    for _, matrix in matrices(model):
        if matrix.fake_quant is not None:
            matrix.fake_quant = dataclasses.replace(matrix.fake_quant, inputs=False)
    return model


# ---- what each rounds to


@pytest.mark.parametrize(("name", "size"), SPECS)
def test_rounded_weights_are_those_of_the_format(name, size):
    weight = DRAWN.copy()
    weight[0, :32] = 0.0
    rounded = np.asarray(FakeQuant(name, size, "float32").round(jnp.asarray(weight)))
    groups = weight.reshape(-1, size or 1)
    if name.startswith("int8-int4") or name == "int4":
        scale = np.maximum(groups.max(1) * np.float32(1 / 7), -groups.min(1) / np.float32(8))[:, None]
        wanted = np.clip(np.rint(groups / np.where(scale == 0, 1, scale)), -8, 7) * scale
    elif name in ("q4_0", "q8_0"):
        gguf = pytest.importorskip("gguf")
        kind = gguf.GGMLQuantizationType[name.upper()]
        wanted = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
    elif size is not None:
        scale = (abs(groups).max(1) * np.float32(1 / 127))[:, None]
        wanted = np.clip(np.rint(groups / np.where(scale == 0, 1, scale)), -127, 127) * scale
    else:
        wanted = np.asarray(FORMATS[name.partition("-")[0]].encode(jnp.asarray(weight)).decode())
    np.testing.assert_array_equal(rounded, wanted.reshape(weight.shape))
    assert not np.array_equal(rounded, weight)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("name", "codes", "bits"), [("q4_0", (-8, 7), 5), ("q8_0", (-127, 127), 1)])
def test_gguf_scales_are_so_short_that_products_are_exact_in_16_bits(name, codes, bits, dtype):
    """Each block is a float16 number of few bits times whole numbers, and no number is far from its weight."""
    weight = DRAWN * np.float32(10.0) ** np.arange(-4, 2, dtype=np.float32)[:, None]
    rounded = np.asarray(FakeQuant(name, 32, dtype).round(jnp.asarray(weight)), np.float32)
    mantissas = np.arange(2 ** (bits - 1), 2**bits)
    scales = (mantissas * 2.0 ** np.arange(-24, 8)[:, None]).ravel()
    for group, kept in zip(weight.reshape(-1, 32), rounded.reshape(-1, 32), strict=True):
        steps = kept[:, None] / (scales * (1 if name == "q8_0" else -np.sign(group[abs(group).argmax()])))
        fits = ((steps == np.rint(steps)) & (steps >= codes[0]) & (steps <= codes[1])).all(0)
        step = scales[fits].max()
        assert step < 1.04 * abs(group).max() * (1 / 8 if name == "q4_0" else 2 / 127)
        # Q4_0 clips what lies opposite its largest number.
        assert (abs(group - kept) <= step * (1.3 if name == "q4_0" else 0.5001)).all()


def test_rounded_activations_are_those_of_the_format():
    x = jnp.asarray(DRAWN).at[0].set(0.0).reshape(2, 3, 128)
    wide = np.asarray(x)
    scale = abs(wide).max(-1, keepdims=True) / np.float32(127.5)
    scale = np.where(scale == 0, np.finfo(np.float32).eps, scale)
    wanted = np.clip(np.rint(wide / scale), -128, 127) * scale
    np.testing.assert_array_equal(rounded_inputs.int8_by_token(x), wanted)

    low, high = np.minimum(wide.min(-1, keepdims=True), 0), np.maximum(wide.max(-1, keepdims=True), 0)
    scale = np.maximum((high - low) / np.float32(255), np.finfo(np.float32).eps)
    zero = np.clip(-128 - np.rint(low / scale), -128, 127)
    wanted = (np.clip(np.rint(wide * (np.float32(1) / scale)) + zero, -128, 127) - zero) * scale
    np.testing.assert_array_equal(rounded_inputs.int8_by_token_asymmetric(x), wanted)

    scale = abs(wide).max(-1, keepdims=True) / np.float32(448)
    scale = np.where(scale == 0, 1, scale)
    wanted = (wide / scale).astype(jnp.float8_e4m3fn).astype(np.float32) * scale
    np.testing.assert_array_equal(rounded_inputs.fp8_by_token(x), wanted)

    blocks = wide.reshape(-1, 32)
    largest = np.where((blocks == 0).all(1), 1, abs(blocks).max(1)).astype(np.float64)
    power = 2.0 ** np.floor(np.log2(largest))
    scale = np.where(largest >= 1.75 * power, power / 2, power / 4)[:, None]
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # no number drawn lies between two
    wanted = np.sign(blocks) * numbers[abs(abs(blocks / scale)[..., None] - numbers).argmin(-1)] * scale
    np.testing.assert_array_equal(rounded_inputs.mxfp4_activations(x), wanted.reshape(x.shape))


@pytest.mark.parametrize("observed", [np.float32(abs(DRAWN).max()), np.float32(0.01)])
def test_activations_in_nvfp4_are_rounded_under_their_observed_scale(observed):
    """Also where the range that was observed is so much smaller that scales of blocks end at 448: the numbers beyond it
    become its bound."""
    x = jnp.asarray(DRAWN).at[0].set(0.0).reshape(2, 3, 128)
    scale = np.float32(448 * 6) * (np.float32(1) / observed)
    blocks = np.asarray(x).reshape(-1, 16)
    own = np.minimum(abs(blocks).max(1, keepdims=True) / np.float32(6) * scale, np.float32(448))
    own = own.astype(jnp.float8_e4m3fn).astype(np.float32)
    own = np.where(own == 0, np.float32(0.125), own) / scale
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # no number drawn lies between two
    wanted = np.sign(blocks) * numbers[abs(abs(blocks / own)[..., None] - numbers).argmin(-1)] * own
    found = rounded_inputs.nvfp4_activations(x, FORMATS["nvfp4"].kinds[0].global_scale(observed))
    np.testing.assert_array_equal(found, wanted.reshape(x.shape))
    assert abs(found).max() == pytest.approx(min(abs(np.asarray(x)).max(), observed), rel=0.1)


def test_activations_are_rounded_before_products_and_gradients_pass():
    for name in ("int8-int4", "fp8", "nvfp4-nvfp4", "mxfp4-mxfp4"):
        spec = FakeQuant(name, QAT_GROUPS[name][0], "float32")
        x, scale = jnp.asarray(DRAWN), jnp.float32(800) if name == "nvfp4-nvfp4" else None
        value, pullback = jax.vjp(lambda x, spec=spec, scale=scale: spec.round_inputs(x, scale), x)
        assert spec.rounds_inputs and not np.array_equal(value, x)
        np.testing.assert_array_equal(pullback(2 * x)[0], 2 * x)
        assert dataclasses.replace(spec, inputs=False).round_inputs(x) is x


# ---- models


@pytest.mark.full
@pytest.mark.parametrize(("name", "size"), [("int8-int4", 32), ("fp8", None), ("nvfp4", None), ("q4_0", 32)])
def test_gradients_pass_straight_through_in_full_fine_tuning(name, size):
    """The gradient of a prepared model is that of the model of rounded weights; activations apart."""
    prepared = prepare_qat(tiny_model(**SIZES), name, size)
    loss, gradient = nnx.value_and_grad(mean_loss)(weights_only(prepared), TOKENS)
    wanted_loss, wanted = nnx.value_and_grad(mean_loss)(convert_qat(prepared), TOKENS)
    assert loss == wanted_loss
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), gradient, wanted)
    rounded = mean_loss(prepared, TOKENS)
    assert (rounded != loss) == (ROUNDINGS[name].activations is not None)


@pytest.mark.full
def test_gradients_with_rounded_activations_are_those_of_the_rounded_product():
    """y = round(x) round(w)^T: the gradient of w is dy^T round(x), that of x is dy round(w)."""
    linear = next(linear for _, linear in linears(prepare_qat(tiny_model(**SIZES), "int8-int4", 32)))
    x = jnp.asarray(DRAWN[:, :64])
    dy = jnp.asarray(DRAWN[:, : linear.sizes[0]])
    graph, state = nnx.split(linear)
    out, pullback = jax.vjp(lambda state, x: nnx.merge(graph, state)(x), state, x)
    spec = linear.fake_quant
    xq, wq = np.asarray(spec.round_inputs(x)), np.asarray(spec.round(linear.weight[...]))
    np.testing.assert_allclose(out, xq @ wq.T, rtol=1e-5, atol=1e-6)
    dstate, dx = pullback(dy)
    np.testing.assert_allclose(dstate["weight"][...], dy.T @ xq, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, dy @ wq, rtol=1e-5, atol=1e-5)


EXPERTS = dict(moe=MoEConfig(4, 2, 32))
NAMES = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.full
@pytest.mark.parametrize(("name", "transposed"), [("int4", False), ("nvfp4", True)])
def test_experts_are_rounded_with_their_adapters(name, transposed):
    """Equal to the merged model, whose gradients give those of the adapters."""
    base = tiny_model(**SIZES, moe=dataclasses.replace(EXPERTS["moe"], transposed=transposed))
    adapted = adapted_model(base, r=2, lora_alpha=4, target_parameters=NAMES)
    model = weights_only(prepare_qat(adapted, name, QAT_GROUPS[name][0]))
    assert all(matrix.fake_quant is not None for _, matrix in experts(model))
    merged = merge_adapter(model)
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    loss, gradient = jax.value_and_grad(lambda t: mean_loss(nnx.merge(graph, t, frozen), TOKENS))(trainable)
    wanted_loss, dense = nnx.value_and_grad(mean_loss)(merged, TOKENS)
    of_base = mean_loss(base, TOKENS)
    assert float(loss) == pytest.approx(float(wanted_loss), abs=1e-5) and loss != of_base
    assert mean_loss(without_adapter(model), TOKENS) == of_base  # nothing of it is rounded
    ours = dict(experts(nnx.merge(graph, gradient, frozen)))
    for (key, whole), (_, matrix) in zip(experts(nnx.merge(nnx.graphdef(merged), dense)), experts(model), strict=True):
        dweight = np.asarray(whole.weight[...])
        dweight = dweight.swapaxes(1, 2) if transposed else dweight
        a, b, scale = matrix.lora.a[...], matrix.lora.b[...], matrix.lora.scale
        da, db = scale * jnp.einsum("eor,eoi->eri", b, dweight), scale * jnp.einsum("eoi,eri->eor", dweight, a)
        np.testing.assert_allclose(ours[key].lora.a[...], da, rtol=1e-3, atol=1e-6, err_msg=key)
        np.testing.assert_allclose(ours[key].lora.b[...], db, rtol=1e-3, atol=1e-6, err_msg=key)


@pytest.mark.full
def test_experts_in_full_fine_tuning():
    prepared = prepare_qat(tiny_model(**SIZES, **EXPERTS), "int4", 32)
    loss, gradient = nnx.value_and_grad(mean_loss)(prepared, TOKENS)
    converted = convert_qat(prepared)
    wanted_loss, wanted = nnx.value_and_grad(mean_loss)(converted, TOKENS)
    assert float(loss) == pytest.approx(float(wanted_loss), abs=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradient, wanted)
    for _, matrix in experts(converted):
        groups = np.asarray(matrix.weight[...]).reshape(-1, 32)
        assert max(len(np.unique(group)) for group in groups) <= 16


@pytest.mark.full
def test_dora_trains_its_magnitude_through_the_rounding():
    model = prepare_qat(adapted_model(tiny_model(**SIZES), r=3, use_dora=True), "int4", 32)
    np.testing.assert_allclose(model(TOKENS), merge_adapter(model)(TOKENS), atol=2e-5)
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)

    def loss(trained):
        return mean_loss(nnx.merge(graph, trained, frozen), TOKENS)

    gradient = nnx.merge(graph, jax.grad(loss)(trainable), frozen)
    merged = merge_adapter(model)
    dense = nnx.merge(nnx.graphdef(merged), nnx.grad(mean_loss)(merged, TOKENS))
    for (name, ours), (_, adapted), (_, dwhole), (_, whole) in zip(
        linears(gradient), linears(model), linears(dense), linears(merged), strict=True
    ):
        dweight, magnitude = dwhole.weight[...], adapted.lora.magnitude[...]
        wanted = (dweight * whole.weight[...]).sum(1) / magnitude
        np.testing.assert_allclose(ours.lora.magnitude[...], wanted, rtol=1e-3, atol=1e-6, err_msg=name)
        rows = adapted.lora.weights(adapted.stored_weight).row_scale[:, None] * dweight
        scale = adapted.lora.scale
        np.testing.assert_allclose(ours.lora.a[...], scale * adapted.lora.b[...].T @ rows, rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(ours.lora.b[...], scale * rows @ adapted.lora.a[...].T, rtol=1e-3, atol=1e-6)


@pytest.mark.full
def test_dropout_adds_noise_whose_mean_is_zero_to_the_rounded_product():
    model = prepare_qat(adapted_model(tiny_model(**SIZES), r=3, lora_dropout=0.25), "int4", 32)
    linear = next(linear for _, linear in linears(model))
    x = jnp.asarray(DRAWN[:, :64])
    plain = linear(x)
    noisy = jax.vmap(lambda key: linear(x, key))(jax.random.split(jax.random.key(0), 4000))
    assert not np.array_equal(noisy[0], plain)
    error = abs(noisy.mean(0) - plain) / (noisy.std(0) / 4000**0.5)
    assert float(error.max()) < 5
    graph, trainable, frozen = nnx.split(linear, nnx.Param, ...)
    gradient = jax.grad(lambda t: nnx.merge(graph, t, frozen)(x, jax.random.key(1)).sum())(trainable)
    unrounded = adapted_model(tiny_model(**SIZES), r=3, lora_dropout=0.25)
    other = nnx.split(next(each for _, each in linears(unrounded)), nnx.Param, ...)
    wanted = jax.grad(lambda t: nnx.merge(other[0], t, other[2])(x, jax.random.key(1)).sum())(other[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), gradient, wanted)


def test_group_sizes_are_those_of_the_format():
    with pytest.raises(ValueError, match="qat group_size 32: nvfp4 has blocks of its own size: leave group_size out"):
        prepare_qat(tiny_model(**SIZES), "nvfp4", 32)
    with pytest.raises(ValueError, match="int8 has groups of 32, or a scale for each row without group_size"):
        prepare_qat(tiny_model(**SIZES), "int8", 64)
