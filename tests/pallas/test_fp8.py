"""FP8 against its definition, number by number in numpy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxtune.pallas.formats import FP8
from jaxtune.pallas.formats.fp8 import MATRIX, ROW, TILE
from jaxtune.pallas.grouped_matmul import grouped_matmul
from jaxtune.pallas.grouped_matmul.layout import groups_of
from jaxtune.pallas.quant_matmul import LoraWeights, quant_matmul

SHAPES = [(1, 1), (3, 130), (257, 129), (128, 256), (2, 5, 140)]


def by_definition(array: np.ndarray, block) -> tuple[np.ndarray, np.ndarray]:
    """(codes, float32 scales), block after block."""
    *lead, out, in_ = array.shape
    rows, columns = (whole if size is None else size for whole, size in zip((out, in_), block, strict=True))
    codes = np.zeros(array.shape, ml_dtypes.float8_e4m3fn)
    scales = np.zeros((*lead, -(-out // rows), -(-in_ // columns)), np.float32)
    for place in np.ndindex(scales.shape):
        *at, r, c = place
        part = (*at, slice(r * rows, (r + 1) * rows), slice(c * columns, (c + 1) * columns))
        largest = np.abs(array[part].astype(np.float32)).max()
        scales[place] = largest / np.float32(448) if largest else 1
        scaled = array[part].astype(np.float32) / scales[place]
        codes[part] = np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return codes, scales


def drawn(shape, dtype="float32", seed=0) -> np.ndarray:
    array = np.random.default_rng(seed).normal(size=shape) * 10.0 ** np.random.default_rng(1).integers(-4, 3, shape)
    array[..., 0, :] = 0  # a row of zeros
    return array.astype(jnp.dtype(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("block", [ROW, TILE, MATRIX])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_the_definitions(shape, block, dtype):
    array = drawn(shape, dtype)
    codes, scales = by_definition(array, block)
    got = FP8.encode(array, block)
    assert got.problem() is None and got.shape == shape and got.dtype == array.dtype
    np.testing.assert_array_equal(np.asarray(got.scales), scales)
    np.testing.assert_array_equal(np.asarray(got.codes).view(np.uint8), codes.view(np.uint8))
    wide = got.decode(jnp.float32)
    expected = [codes[p].astype(np.float32) * scales[_block_of(p, shape, block)] for p in np.ndindex(*shape)]
    np.testing.assert_array_equal(np.asarray(wide).ravel(), np.array(expected, np.float32))


def _block_of(place, shape, block):
    *at, r, c = place
    rows, columns = (whole if size is None else size for whole, size in zip(shape[-2:], block, strict=True))
    return (*at, r // rows, c // columns)


def test_cut_at_its_blocks_a_part_is_what_is_stored_of_it():
    for block, axis, size in ((ROW, 0, 3), (TILE, 0, 128), (TILE, 1, 128)):
        array = drawn((256, 384))
        whole = FP8.encode(array, block)
        assert whole.cut(axis) in (1, size)
        part = FP8.encode(np.take(array, range(size), axis), block)
        index = (slice(None),) * axis + (slice(0, size),)
        np.testing.assert_array_equal(np.asarray(whole.codes)[index], np.asarray(part.codes))
    assert FP8.encode(drawn((4, 8)), ROW).cut(1) is None and FP8.encode(drawn((4, 8)), MATRIX).cut(0) is None
    assert FP8.encode(drawn((2, 4, 8)), MATRIX).cut(0) == 1


def test_parts_that_do_not_fit_are_refused():
    good = FP8.encode(drawn((4, 8)))
    for changed, words in (
        ({"codes": good.codes.astype(jnp.float32)}, "codes are float32"),
        ({"scales": good.scales[:3]}, r"scales are float32\[3, 1\]"),
        ({"block": (64, 64)}, r"blocks of \(64, 64\) asks for \(1, 1\)"),
    ):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(good, **changed).decode()
    with pytest.raises(ValueError, match="block = .64, 64.: must be one of"):
        FP8.encode(drawn((4, 8)), (64, 64))
    with pytest.raises(ValueError, match="must have an element"):
        FP8.encode(np.zeros((0, 4), np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("block", [ROW, TILE])
def test_products_and_gradients_equal_those_over_decoded_weights(block):
    draw = np.random.default_rng(0)
    weight = FP8.encode(draw.normal(size=(130, 150)).astype(np.float32), block)
    x = jnp.asarray(draw.normal(size=(5, 150)), jnp.float32)
    a, b = (jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in ((4, 150), (130, 4)))

    def loss(x, a, b, weight):
        return (quant_matmul(x, [weight], [LoraWeights(a, b, None, 0.5)])[0] ** 2).sum()

    packed = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, a, b, weight)
    plain = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, a, b, weight.decode(jnp.float32))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-3), packed, plain)


@pytest.mark.gpu
def test_experts_in_fp8_multiply_as_their_decoded_weights():
    draw = np.random.default_rng(0)
    weight = FP8.encode(draw.normal(size=(3, 16, 32)).astype(np.float32))
    groups = groups_of(jnp.array([5, 0, 130]), 135)
    x = jnp.asarray(draw.normal(size=(groups.rows, 32)), jnp.float32)
    out, plain = (grouped_matmul(x, w, groups) for w in (weight, weight.decode(jnp.float32)))
    held = np.arange(groups.rows) < 5
    np.testing.assert_allclose(np.asarray(out)[held], np.asarray(plain)[held], rtol=1e-5, atol=1e-5)
    first = np.asarray(x[:5]) @ np.asarray(weight.decode(jnp.float32))[0].T
    np.testing.assert_allclose(np.asarray(out)[:5], first, rtol=1e-4, atol=1e-4)


# ---- products as they are stored


def _in_fp8(x: np.ndarray) -> np.ndarray:
    """Each row rounded to e4m3 by its largest magnitude, in float32."""
    scale = np.abs(x).max(1, keepdims=True) / np.float32(448)
    scale[scale == 0] = 1
    return np.clip(x / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


@pytest.mark.gpu
@pytest.mark.parametrize("block", [ROW, MATRIX])
def test_both_products_are_those_of_rounded_rows(block):
    """x W^T of x's rounded rows; dy W of dy's, which take the scales of W's rows before they are rounded."""
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(48, 80)) * np.logspace(-3, 1, 48)[:, None]
    weight = FP8.encode(rows.astype(np.float32), block)
    x, dy = (draw.normal(size=(16, n)).astype(np.float32) for n in (80, 48))
    x[3] = 0
    out, pull = jax.vjp(lambda x: quant_matmul(x, [weight], fp8=True)[0], jnp.asarray(x))
    wide, codes = np.asarray(weight.decode(jnp.float32)), np.asarray(weight.codes).astype(np.float32)
    scales = np.broadcast_to(np.asarray(weight.scales), (48, 1))[:, 0]
    np.testing.assert_allclose(out, _in_fp8(x) @ wide.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(pull(jnp.asarray(dy))[0], _in_fp8(dy * scales) @ codes, rtol=1e-4, atol=1e-5)
    # The error that the rounding makes: 2^-4 of a number at most, which averages out to under 4 % of the product.
    for got, exact in ((out, x @ wide.T), (pull(jnp.asarray(dy))[0], dy @ wide)):
        assert np.linalg.norm(got - exact) < 0.04 * np.linalg.norm(exact)


def test_a_tokens_outliers_touch_no_other_token():
    """A massive activation, and channels 50 times larger, cost precision where they are and nowhere else."""
    draw = np.random.default_rng(0)
    weight = FP8.encode(draw.normal(size=(32, 256)).astype(np.float32))
    x = draw.normal(size=(8, 256)).astype(np.float32)
    plain = np.asarray(quant_matmul(jnp.asarray(x), [weight], fp8=True)[0])
    spiked = x.copy()
    spiked[2, 7] = 3000.0
    got = np.asarray(quant_matmul(jnp.asarray(spiked), [weight], fp8=True)[0])
    others = np.arange(8) != 2
    np.testing.assert_array_equal(got[others], plain[others])
    exact = spiked[2] @ np.asarray(weight.decode(jnp.float32)).T
    assert np.linalg.norm(got[2] - exact) < 0.04 * np.linalg.norm(exact)
    x[:, ::64] *= 50
    got, exact = quant_matmul(jnp.asarray(x), [weight], fp8=True)[0], x @ np.asarray(weight.decode(jnp.float32)).T
    assert np.linalg.norm(got - exact) < 0.04 * np.linalg.norm(exact)


def test_adapters_multiply_what_is_not_rounded():
    draw = np.random.default_rng(0)
    zero = FP8.encode(np.zeros((16, 32), np.float32))
    x = jnp.asarray(draw.normal(size=(4, 32)), jnp.float32)
    lora = LoraWeights(*(jnp.asarray(draw.normal(size=s), jnp.float32) for s in ((3, 32), (16, 3))))
    got = quant_matmul(x, [zero], [lora], fp8=True)[0]
    np.testing.assert_array_equal(got, quant_matmul(x, [zero], [lora])[0])


def test_scales_inside_the_sum_are_refused():
    tiles = FP8.encode(np.ones((130, 130), np.float32), TILE)
    with pytest.raises(ValueError, match=r"weights\[0\] has a scale for each 128 x 128 numbers"):
        quant_matmul(jnp.ones((2, 130)), [tiles], fp8=True)
