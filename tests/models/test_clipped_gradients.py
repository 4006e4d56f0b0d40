"""`qat.gradients: clipped`: no gradient where a number is outside the range of its scale, by each format's definition
in numpy, for weights trained whole, adapters, experts and activations."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checks import mean_loss
from flax import nnx
from tiny_models import adapted_model, tiny_model

from jaxtune.models.adapters.merge import merge_adapter
from jaxtune.models.config import LayerSpec, MoEConfig
from jaxtune.models.files.quant import convert_qat, prepare_qat
from jaxtune.models.layers.expert_linear import ExpertLinear
from jaxtune.models.linear import merged_weight
from jaxtune.models.lora import experts, linears
from jaxtune.models.qat.fake_quant import ROUNDINGS, FakeQuant
from jaxtune.models.qat.qat_gradients import straight_through
from jaxtune.pallas.format_names import QAT_GROUPS
from jaxtune.pallas.quant_matmul import LoraWeights

SIZES = dict(hidden_size=64, intermediate_size=96, head_dim=32, attention_scale=32**-0.5, layers=(LayerSpec(),))
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 48, (2, 12)))
SPECS = [(name, QAT_GROUPS[name][0]) for name in ROUNDINGS] + [("int8", None)]
DRAWN = np.random.default_rng(3).standard_normal((64, 128)).astype(np.float32)
# How many of the numbers drawn are outside, (least, most) by format and dtype; none in the formats that are not named.
OUTSIDE = {
    ("int4", "bfloat16"): (20, 200),
    ("int8-int4", "bfloat16"): (20, 200),
    ("int8-int4-asymmetric", "bfloat16"): (20, 200),
    ("int8", "bfloat16"): (20, 200),
    ("int8 by rows", "float32"): (10, 64),  # the largest number of a row, rounded to float16
    ("int8 by rows", "bfloat16"): (10, 64),
    ("nvfp4", "float32"): (100, 400),
    ("nvfp4", "bfloat16"): (100, 400),
    ("nvfp4-nvfp4", "float32"): (100, 400),
    ("nvfp4-nvfp4", "bfloat16"): (100, 400),
    ("mxfp4", "float32"): (50, 250),
    ("mxfp4", "bfloat16"): (50, 250),
    ("mxfp4-mxfp4", "float32"): (50, 250),
    ("mxfp4-mxfp4", "bfloat16"): (50, 250),
    ("q4_0", "float32"): (20, 250),
    ("q4_0", "bfloat16"): (20, 350),
    ("q8_0", "float32"): (20, 250),
}


def e2m1(size: np.ndarray) -> np.ndarray:
    """The nearest numbers of e2m1 to magnitudes, float64, ties to the even code."""
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    distance = abs(size[..., None] - numbers)
    nearest = distance == distance.min(-1, keepdims=True)
    even = np.where(nearest.sum(-1, keepdims=True) > 1, nearest & (np.arange(8) % 2 == 0), nearest)
    return numbers[even.argmax(-1)]


def nv_scales(block: np.ndarray, of_tensor: np.float32) -> np.ndarray:
    """The scale of each block [n, 16] of weights in e4m3: the one for its largest number, or one of the next six where
    the error is smaller."""
    bits = (abs(block).max(1) / np.float32(6) * of_tensor).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    tried = np.where(bits == 126, 126, np.minimum(bits[None] + np.arange(7, dtype=np.uint8)[:, None], 126))
    scales = tried.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scaled = abs(block)[None] * (of_tensor / scales)[..., None]
    error = np.square(np.minimum(e2m1(scaled), 6) - scaled).sum(-1) * scales**2
    return np.take_along_axis(scales, error.argmin(0)[None], 0)[0]


def mx_exponents(block: np.ndarray) -> np.ndarray:
    """The exponent of each block [n, 32] of weights: the specification's, or one more where the error is smaller."""
    low = np.floor(np.log2(abs(block).max(1))) - 2

    def error(exponent):
        scale = 2.0 ** exponent[:, None]
        return ((e2m1(abs(block) / scale) * scale - abs(block)) ** 2).sum(1)

    return np.where(error(low + 1) < error(low), low + 1, low)


def bounds(name: str, size: int | None, weight: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest number of each weight's scale, float64, by the definition of the format."""
    kind = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype]
    if name == "fp8":
        high = abs(weight).max(1, keepdims=True).astype(np.float64)
        return -high, high
    if name == "int8" and size is None:  # bitsandbytes' rows, in float16
        high = abs(weight.astype(np.float16)).max(1, keepdims=True).astype(np.float64)
        return -high, high
    if name.startswith("nvfp4"):
        of_tensor = np.float32(448 * 6) * (np.float32(1) / abs(weight).max())
        high = 6 * nv_scales(weight.reshape(-1, 16), of_tensor) / of_tensor
        low = -high
    elif name.startswith("mxfp4"):
        high = 6 * 2.0 ** mx_exponents(weight.reshape(-1, 32).astype(np.float64))
        low = -high
    elif name == "q4_0":
        block = weight.reshape(-1, 32)
        scale = block[np.arange(len(block)), abs(block).argmax(1)] / np.float32(-8)
        if dtype != "float32":  # five significant bits
            fraction, exponent = np.frexp(scale.astype(np.float64))
            scale = np.trunc(fraction * 32 + np.copysign(0.5, fraction)) / 32 * 2.0**exponent
        scale = scale.astype(np.float16).astype(np.float64)
        low, high = np.minimum(-8 * scale, 7 * scale), np.maximum(-8 * scale, 7 * scale)
    elif name == "q8_0":
        scale = abs(weight.reshape(-1, 32)).max(1) / np.float32(127)
        scale = scale if dtype == "float32" else 2.0 ** np.ceil(np.log2(scale.astype(np.float64)))
        high = 127 * scale.astype(np.float16).astype(np.float64)
        low = -high
    else:
        group = weight.reshape(-1, size)
        if name == "int8":
            scale = abs(group).max(1) * np.float32(1 / 127)
            lowest, highest = -127, 127
        else:
            scale = np.maximum(group.max(1) * np.float32(1 / 7), -group.min(1) / np.float32(8))
            lowest, highest = -8, 7
        scale = scale.astype(kind).astype(np.float64)
        low, high = lowest * scale, highest * scale
    each = weight.size // len(high)
    return np.repeat(low, each).reshape(weight.shape), np.repeat(high, each).reshape(weight.shape)


def inside(numbers: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Where numbers are in the range; beyond what rounding a float32 scale adds."""
    slack = 2.0**-22
    return (numbers >= low - slack * abs(low)) & (numbers <= high + slack * abs(high))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "size"), SPECS)
def test_weights_outside_their_range_get_no_gradient(name, size, dtype):
    weight = DRAWN.copy()
    weight[0, :32] = 0.0
    spec = FakeQuant(name, size, dtype, gradients="clipped")
    gradient = jnp.asarray(np.random.default_rng(5).standard_normal(weight.shape), jnp.float32)

    def of(spec):
        out, pullback = jax.vjp(lambda weight: straight_through(spec, weight, jnp.ones(1)), jnp.asarray(weight))
        return np.asarray(out), np.asarray(pullback(gradient)[0])

    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = bounds(name, size, weight, dtype)
    kept = inside(weight, low, high) | (weight == 0)
    (out, found), (plain_out, plain) = of(spec), of(dataclasses.replace(spec, gradients="straight_through"))
    np.testing.assert_array_equal(found, np.where(kept, gradient, 0))
    np.testing.assert_array_equal(plain, gradient)
    np.testing.assert_array_equal(out, plain_out)
    least, most = OUTSIDE.get(("int8 by rows" if (name, size) == ("int8", None) else name, dtype), (0, 0))
    assert least <= (~kept).sum() <= most


OBSERVED = np.float32(448 * 6 / 3)  # the scale of activations whose largest magnitude was 3 when it was observed


def activation_bounds(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest number of each activation's scale, float64, by the definition of the format."""
    wide = x.astype(np.float64)
    largest = abs(wide).max(-1, keepdims=True)
    if name == "int8-int4":
        return -128 * largest / 127.5, 127 * largest / 127.5
    if name == "fp8":
        return -largest, largest
    if name == "int8-int4-asymmetric":
        least, most = np.minimum(wide.min(-1, keepdims=True), 0), np.maximum(wide.max(-1, keepdims=True), 0)
        scale = (most - least) / 255
        zero = np.clip(-128 - np.rint(least / scale), -128, 127)
        return (-128 - zero) * scale, (127 - zero) * scale
    if name == "nvfp4-nvfp4":
        block = abs(x.reshape(-1, 16)).max(1) / np.float32(6)
        scale = np.minimum(block * OBSERVED, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        high = np.repeat(6 * scale.astype(np.float64) / OBSERVED, 16).reshape(x.shape)
        return -high, high
    block = abs(wide.reshape(-1, 32)).max(1)
    power = np.floor(np.log2(block))
    high = 6 * 2.0 ** np.where(block >= 1.75 * 2.0**power, power - 1, power - 2)
    high = np.repeat(high, 32).reshape(x.shape)
    return -high, high


@pytest.mark.parametrize("name", [name for name, each in ROUNDINGS.items() if each.activations is not None])
def test_activations_outside_their_range_get_no_gradient(name):
    x = DRAWN.reshape(2, 32, 128)
    spec = FakeQuant(name, QAT_GROUPS[name][0], "float32", gradients="clipped")
    scale = jnp.asarray(OBSERVED) if spec.observes else None
    value, pullback = jax.vjp(lambda x: spec.round_inputs(x, scale), jnp.asarray(x))
    kept = inside(x, *activation_bounds(name, x))
    np.testing.assert_array_equal(pullback(value)[0], np.where(kept, value, 0))
    straight = dataclasses.replace(spec, gradients="straight_through")
    np.testing.assert_array_equal(value, straight.round_inputs(jnp.asarray(x), scale))
    assert kept.all() if name == "fp8" else 10 < (~kept).sum() < 400


@pytest.mark.full
def test_full_fine_tuning_gets_the_gradient_within_the_range():
    base = tiny_model(**SIZES)
    prepared = prepare_qat(base, "mxfp4", gradients="clipped")
    _, gradient = nnx.value_and_grad(mean_loss)(prepared, TOKENS)
    wanted = dict(linears(nnx.merge(nnx.graphdef(base), nnx.grad(mean_loss)(convert_qat(prepared), TOKENS))))
    clipped = 0
    for (name, ours), (_, own) in zip(linears(nnx.merge(nnx.graphdef(base), gradient)), linears(prepared), strict=True):
        kept = np.asarray(own.fake_quant.in_range(own.weight[...]))
        dense = np.where(kept, wanted[name].weight[...], 0)
        np.testing.assert_allclose(ours.weight[...], dense, rtol=1e-5, atol=1e-7, err_msg=name)
        clipped += (~kept & (np.asarray(wanted[name].weight[...]) != 0)).sum()
    assert clipped > 50


@pytest.mark.parametrize(("kind", "name"), [("lora", "mxfp4"), ("dora", "nvfp4"), ("lora", "mxfp4-mxfp4")])
def test_adapters_get_the_gradient_of_the_merged_weight_within_the_range(kind, name):
    model = adapted_model(tiny_model(**SIZES), r=3, lora_alpha=6, use_dora=kind == "dora")
    model = prepare_qat(model, name, gradients="clipped")
    linear = next(linear for _, linear in linears(model))
    x, dy = jnp.asarray(DRAWN[:32, :64]), jnp.asarray(DRAWN[32:, : linear.sizes[0]])
    graph, trainable, frozen = nnx.split(linear, nnx.Param, ...)
    out, pullback = jax.vjp(lambda state, x: nnx.merge(graph, state, frozen)(x), trainable, x)
    found, dx = pullback(dy)

    weight, lora, spec = linear.weight.get_value(), linear.lora.weights(linear.weight.get_value()), linear.fake_quant
    merged = np.asarray(merged_weight(weight, lora))
    xq, wq = np.asarray(spec.round_inputs(x)), np.asarray(spec.round(jnp.asarray(merged)))
    np.testing.assert_allclose(out, xq @ wq.T, rtol=1e-5, atol=1e-5)
    with np.errstate(divide="ignore"):
        kept = inside(merged, *bounds(name, None, merged, "float32"))
    assert (~kept).sum() > 10
    dmerged = np.where(kept, np.asarray(dy).T @ xq, 0)
    rows = dmerged if lora.row_scale is None else np.asarray(lora.row_scale)[:, None] * dmerged
    a, b = np.asarray(lora.a), np.asarray(lora.b)
    np.testing.assert_allclose(found["lora"]["a"][...], lora.scale * b.T @ rows, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found["lora"]["b"][...], lora.scale * rows @ a.T, rtol=1e-4, atol=1e-4)
    passes = inside(np.asarray(x), *activation_bounds(name, np.asarray(x))) if spec.rounds_inputs else True
    np.testing.assert_allclose(dx, np.where(passes, dy @ wq, 0), rtol=1e-4, atol=1e-4)
    if kind == "dora":
        magnitude = np.asarray(linear.lora.magnitude[...])
        wanted = (dmerged * merged).sum(1) / magnitude
        np.testing.assert_allclose(found["lora"]["magnitude"][...], wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.full
def test_dropout_adds_gradients_whose_mean_is_zero():
    model = prepare_qat(adapted_model(tiny_model(**SIZES), r=3, lora_dropout=0.25), "mxfp4", gradients="clipped")
    linear = next(linear for _, linear in linears(model))
    graph, trainable, frozen = nnx.split(linear, nnx.Param, ...)
    x = jnp.asarray(DRAWN[:8, :64])

    def gradient(key):
        return jax.grad(lambda t: nnx.merge(graph, t, frozen)(x, key).sum())(trainable)

    without = gradient(None)
    noisy = jax.vmap(gradient)(jax.random.split(jax.random.key(0), 3000))
    for one, many in zip(jax.tree.leaves(without), jax.tree.leaves(noisy), strict=True):
        error = abs(many.mean(0) - one) / (many.std(0) / 3000**0.5 + 1e-6)
        assert float(many.std(0).max()) > 1e-3 and float(error.max()) < 5


@pytest.mark.full
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_get_the_gradient_within_the_range(transposed):
    """Adapters of experts, and experts that are trained whole."""
    base = tiny_model(**SIZES, moe=MoEConfig(4, 2, 32, transposed=transposed))
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = prepare_qat(adapted_model(base, r=2, lora_alpha=4, target_parameters=names), "mxfp4", gradients="clipped")
    merged = merge_adapter(adapted)
    graph, trainable, frozen = nnx.split(adapted, nnx.Param, ...)
    loss, gradient = jax.value_and_grad(lambda t: mean_loss(nnx.merge(graph, t, frozen), TOKENS))(trainable)
    wanted_loss, dense = nnx.value_and_grad(mean_loss)(merged, TOKENS)
    assert float(loss) == pytest.approx(float(wanted_loss), abs=1e-5)
    ours, clipped = dict(experts(nnx.merge(graph, gradient, frozen))), 0
    for (key, whole), (_, matrix) in zip(
        experts(nnx.merge(nnx.graphdef(merged), dense)), experts(adapted), strict=True
    ):
        kept, a, b, scale = oriented(matrix)
        dweight = np.asarray(whole.weight[...])
        dweight = np.where(kept, dweight.swapaxes(1, 2) if transposed else dweight, 0)
        da, db = scale * jnp.einsum("eor,eoi->eri", b, dweight), scale * jnp.einsum("eoi,eri->eor", dweight, a)
        np.testing.assert_allclose(ours[key].lora.a[...], da, rtol=1e-3, atol=1e-6, err_msg=key)
        np.testing.assert_allclose(ours[key].lora.b[...], db, rtol=1e-3, atol=1e-6, err_msg=key)
        clipped += (~kept).sum()
    assert clipped > 50

    whole = prepare_qat(base, "mxfp4", gradients="clipped")
    gradient = dict(experts(nnx.merge(nnx.graphdef(base), nnx.grad(mean_loss)(whole, TOKENS))))
    wanted = dict(experts(nnx.merge(nnx.graphdef(base), nnx.grad(mean_loss)(convert_qat(whole), TOKENS))))
    for key, matrix in experts(whole):
        weight = matrix.weight[...].swapaxes(1, 2) if transposed else matrix.weight[...]
        kept = matrix.fake_quant.in_range(weight)
        dweight = np.where(kept.swapaxes(1, 2) if transposed else kept, wanted[key].weight[...], 0)
        np.testing.assert_allclose(gradient[key].weight[...], dweight, rtol=1e-4, atol=1e-6, err_msg=key)


def oriented(matrix: ExpertLinear) -> tuple[np.ndarray, jax.Array, jax.Array, float]:
    """(where the merged weights [E, out, in] of experts are in the range of MXFP4, a, b and the scale of their
    adapters)."""
    assert matrix.lora is not None
    weight, a, b = np.asarray(matrix.weight.get_value()), matrix.lora.a[...], matrix.lora.b[...]
    weight = weight.swapaxes(1, 2) if matrix.transposed else weight
    scale = matrix.lora.scale
    merged = [np.asarray(merged_weight(w, LoraWeights(*ab, None, scale))) for w, *ab in zip(weight, a, b, strict=True)]
    kept = [inside(each, *bounds("mxfp4", None, each, "float32")) for each in merged]
    return np.stack(kept), a, b, scale


def test_gradients_are_no_part_of_the_grid():
    prepared = prepare_qat(tiny_model(**SIZES), "int4", 32, "clipped")
    assert convert_qat(prepared).qat == FakeQuant("int4", 32, "float32")
    assert prepared.layers[0].mlp.up_proj.fake_quant.record().keys() == {"format", "group_size", "dtype"}
