"""quant_matmul against float64 numpy: one to several weights that share x, adapters, biases, dropout, gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.pallas.quant_matmul import LoraWeights, quant_matmul

IN, OUTS, RANKS = 24, (16, 8, 40), (4, 2, 3)
SCALES = (0.5, 2.0, 1.0)


def parts(dtype=np.float32, seed=0, adapted=(0, 1, 2), row_scaled=(), biased=(0, 2)):
    draw = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(draw.standard_normal(shape), dtype)

    x = normal(2, 5, IN)
    weights = [normal(out, IN) for out in OUTS]
    loras = []
    for i, (out, rank) in enumerate(zip(OUTS, RANKS, strict=True)):
        a, b = normal(rank, IN), normal(out, rank)
        row_scale = jnp.asarray(1 + 0.1 * draw.standard_normal(out), jnp.float32) if i in row_scaled else None
        loras.append(LoraWeights(a, b, row_scale, SCALES[i]) if i in adapted else None)
    biases = [normal(out) if i in biased else None for i, out in enumerate(OUTS)]
    return x, weights, loras, biases


def wide(a):
    return np.asarray(a, np.float64)


def expected(x, weights, loras, biases):
    outputs = []
    for weight, lora, bias in zip(weights, loras, biases, strict=True):
        total = wide(weight)
        if lora is not None:
            total = total + lora.scale * wide(lora.b) @ wide(lora.a)
            if lora.row_scale is not None:
                total = total * wide(lora.row_scale)[:, None]
        outputs.append(wide(x) @ total.T + (0 if bias is None else wide(bias)))
    return outputs


CASES = {
    "no adapter": dict(adapted=(), biased=()),
    "adapters and biases": {},
    "one adapter of three": dict(adapted=(1,), biased=(1,)),
    "row scales": dict(row_scaled=(0, 2)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.gpu
def test_forward_and_gradients(case):
    arguments = parts(**CASES[case])
    outputs, pullback = jax.vjp(quant_matmul, *arguments)
    for got, want in zip(outputs, expected(*arguments), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    # Gradients by the product rule, in float64.
    draw = np.random.default_rng(1)
    douts = [jnp.asarray(draw.standard_normal(out.shape), jnp.float32) for out in outputs]
    dx, dweights, dloras, dbiases = pullback(tuple(douts))
    x, weights, loras, biases = arguments
    flat = wide(x).reshape(-1, IN)
    want_dx = 0
    for i, dout in enumerate(douts):
        dy = wide(dout).reshape(-1, OUTS[i])
        if biases[i] is not None:
            np.testing.assert_allclose(dbiases[i], dy.sum(0), rtol=1e-5, atol=1e-4)
        lora = loras[i]
        if lora is None:
            want_dx = want_dx + dy @ wide(weights[i])
            np.testing.assert_allclose(dweights[i], dy.T @ flat, rtol=1e-5, atol=1e-4)
            continue
        plain = flat @ (wide(weights[i]) + lora.scale * wide(lora.b) @ wide(lora.a)).T
        if lora.row_scale is not None:
            np.testing.assert_allclose(dloras[i].row_scale, (dy * plain).sum(0), rtol=1e-5, atol=1e-3)
            dy = dy * wide(lora.row_scale)
        want_dx = want_dx + dy @ (wide(weights[i]) + lora.scale * wide(lora.b) @ wide(lora.a))
        np.testing.assert_allclose(dweights[i], dy.T @ flat, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(dloras[i].b, lora.scale * dy.T @ (flat @ wide(lora.a).T), rtol=1e-5, atol=1e-3)
        np.testing.assert_allclose(dloras[i].a, lora.scale * (dy @ wide(lora.b)).T @ flat, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(dx.reshape(-1, IN), want_dx, rtol=1e-5, atol=1e-3)


@pytest.mark.gpu
def test_bf16_computes_in_x_dtype_and_rounds_little():
    arguments = parts(jnp.bfloat16)
    for got, want in zip(quant_matmul(*arguments), expected(*arguments), strict=True):
        assert got.dtype == jnp.bfloat16
        # Rounded: the product, the adapter's inner product and its own product, the sum of both.
        assert np.abs(wide(got) - want).max() < 4 * 2**-8 * np.abs(want).max()


def test_weights_and_adapters_are_cast_to_the_dtype_of_x():
    x, weights, loras, biases = parts()
    low = quant_matmul(x.astype(jnp.bfloat16), weights, loras, biases)
    cast = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (x, weights, loras, biases))
    for one, other in zip(low, quant_matmul(*cast), strict=True):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_array_equal(one, other)


def test_no_tokens_give_no_rows():
    [y] = quant_matmul(jnp.zeros((2, 0, 64)), [jnp.ones((8, 64))])
    assert y.shape == (2, 0, 8)


def test_lists_may_be_left_out():
    x, weights, _, _ = parts()
    for one, other in zip(quant_matmul(x, weights), quant_matmul(x, weights, [None] * 3, [None] * 3), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("rate", [0.0, 0.05])
def test_numbers_beside_16_bits_are_not_rounded_to_them(rate):
    """A rounded scale or rate of dropout shifts all outputs one way (1.6 by 1e-3, 0.95 by 8e-4), and gradients."""
    x = jax.random.uniform(jax.random.key(0), (1 << 14, 1), minval=1, maxval=2).astype(jnp.bfloat16)
    lora = LoraWeights(jnp.ones((1, 1)), jnp.ones((1, 1)), None, 1.6)

    def run(x):
        return quant_matmul(x, [jnp.zeros((1, 1))], [lora], dropout_rate=rate, dropout_key=jax.random.key(1))[0]

    y, pullback = jax.vjp(run, x)
    (dx,) = pullback(x)
    kept = wide(y) != 0
    for got in (y, dx):
        np.testing.assert_allclose((wide(got)[kept] / wide(x)[kept]).mean(), 1.6 / (1 - rate), rtol=2e-4)


def test_dropout_is_one_mask_for_the_group_and_keeps_the_mean():
    """With unit A, B and no base weight the output is the dropped x itself."""
    rate, size = 0.25, 64
    x = jnp.ones((128, size))
    zero, one = jnp.zeros((size, size)), jnp.eye(size)
    arguments = [x, [zero, zero], [LoraWeights(one, one), LoraWeights(one, one)]]
    first, second = quant_matmul(*arguments, dropout_rate=rate, dropout_key=jax.random.key(0))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(np.unique(first), [0, 1 / (1 - rate)], rtol=1e-6)
    dropped = 1 - np.count_nonzero(first) / first.size
    assert abs(dropped - rate) < 4 * np.sqrt(rate * (1 - rate) / first.size)
    other, _ = quant_matmul(*arguments, dropout_rate=rate, dropout_key=jax.random.key(1))
    assert (np.asarray(first) != np.asarray(other)).any()
    for kept in (
        quant_matmul(*arguments, dropout_rate=rate)[0],
        quant_matmul(*arguments, dropout_key=jax.random.key(0))[0],
    ):
        np.testing.assert_array_equal(kept, x)


def test_dropout_leaves_the_base_product_alone():
    x, weights, loras, biases = parts()
    loras = [LoraWeights(l.a, jnp.zeros_like(l.b), None, l.scale) for l in loras]
    plain = quant_matmul(x, weights, None, biases)
    for one, other in zip(
        quant_matmul(x, weights, loras, biases, dropout_rate=0.5, dropout_key=jax.random.key(0)), plain, strict=True
    ):
        np.testing.assert_array_equal(one, other)
