"""The Triton kernels of `gated_thin` and `gated_thin_backward` in Triton's interpreter, against plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton_interpreter import interpreted

from jaxtune.pallas import dispatch
from jaxtune.pallas.gated import gated_thin, gated_thin_backward, reference, thin, thin_of_gated
from jaxtune.pallas.quant_matmul import fp8_product


def drawn(tokens: int, size: int, rank: int, dtype):
    """(gate, up, dgated, dinner, a) of numbers that `dtype` has."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(tokens, size)] * 3 + [(tokens, rank), (rank, size)]
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


def wide(*arrays):
    return [array.astype(jnp.float32) for array in arrays]


# Rows and columns that are and are no multiple of a tile, one and several programs along each axis, and ranks of which
# some are no power of two.
SHAPES = [(37, 1032, 16), (512, 256, 8), (65, 520, 1), pytest.param(4200, 136, 31, marks=pytest.mark.full)]


@pytest.mark.parametrize(("tokens", "size", "rank"), SHAPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_forward_is_that_of_plain_jax(tokens, size, rank, activation, dtype):
    gate, up, _, _, a = drawn(tokens, size, rank, dtype)
    with interpreted((9, 0)):
        gated, inner = gated_thin(gate, up, a.astype(jnp.float32), activation, implementation="triton")
    assert gated.dtype == inner.dtype == dtype
    want, _ = reference.gated_thin(*wide(gate, up, a), activation)
    step = jnp.finfo(dtype).eps
    np.testing.assert_allclose(np.float32(gated), want, rtol=step, atol=1e-6)
    # The product is that of the rounded activation.
    of_rounded = np.float64(gated) @ np.float64(a).T
    np.testing.assert_allclose(np.float64(inner), of_rounded, rtol=step, atol=1e-3)


@pytest.mark.parametrize(("tokens", "size", "rank"), SHAPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_backward_is_that_of_plain_jax(tokens, size, rank, activation, dtype):
    gate, up, dgated, dinner, _ = drawn(tokens, size, rank, dtype)
    with interpreted((9, 0)):
        dgate, dup, da = gated_thin_backward(gate, up, dgated, dinner, activation, implementation="triton")
    assert dgate.dtype == dup.dtype == dtype and da.dtype == jnp.float32
    *wants, _ = reference.gated_thin_backward(*wide(gate, up, dgated, dinner), activation)
    for got, want in zip((dgate, dup), wants, strict=True):
        np.testing.assert_allclose(np.float32(got), want, rtol=jnp.finfo(dtype).eps, atol=1e-5)
    gated, _ = reference.gated_thin(*wide(gate, up, jnp.zeros((1, size))), activation)
    want = np.float64(dinner).T @ np.float64(gated.astype(dtype))
    # The interpreter cuts numbers off to bfloat16, which a GPU rounds.
    assert np.linalg.norm(np.float64(da) - want) <= jnp.finfo(dtype).eps * np.linalg.norm(want)


@pytest.mark.parametrize(("tokens", "size", "rank"), SHAPES)
def test_rounded_to_e4m3_it_has_the_codes_of_plain_jax(tokens, size, rank):
    """Zeros, the smallest and the largest numbers included; nothing else than codes is written."""
    gate, up, _, _, a = drawn(tokens, size, rank, jnp.float16)
    factors = jnp.asarray([0.0, 1e-4, 1.0, 64.0], jnp.float16)
    up = up * factors[jnp.arange(size) // 128 % 4]
    with interpreted((9, 0)):
        x, inner = gated_thin(gate, up, a, "silu", implementation="triton")
        codes, scales, product = thin.by_kernel(gate, up, a, "silu", "e4m3")
    want, want_scales = fp8_product.rounded(x, True)
    np.testing.assert_array_equal(scales, want_scales)
    # The interpreter does not fuse multiply-adds, by which a GPU divides exactly.
    assert (np.float32(codes) != np.float32(want)).mean() < 1e-3
    np.testing.assert_allclose(np.float32(codes), np.float32(want), rtol=1 / 8, atol=2**-9)
    np.testing.assert_array_equal(np.float32(product), np.float32(inner))


def drawn_adapters(tokens: int, size: int, ranks, dtype):
    """(low-rank inputs, B's) of the adapters of gate and up: of numbers that `dtype` has, B's in float32."""
    keys = jax.random.split(jax.random.key(1), 4)
    inners = [jax.random.normal(key, (tokens, rank)).astype(dtype) for key, rank in zip(keys, ranks, strict=False)]
    bs = [jax.random.normal(key, (size, rank)).astype(dtype) for key, rank in zip(keys[2:], ranks, strict=True)]
    return inners, wide(*bs)


@pytest.mark.parametrize(
    ("tokens", "size", "ranks"),
    [(37, 1032, (16, 16, 16)), (48, 256, (8, 3, 20)), (65, 520, (1, 1, 1)), (130, 136, (31, 31, 31))],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rounded_gradients_are_those_of_the_backward(tokens, size, ranks, dtype):
    """Codes side by side, filled up with zeros, and the adapters' products with what the backward returns unrounded."""
    gate, up, dgated, dinner, _ = drawn(tokens, size, ranks[0], dtype)
    factors = jnp.asarray([0.0, 1e-3, 1.0, 64.0], dtype)
    dgated = dgated * factors[jnp.arange(size) // 128 % 4]
    inners, bs = drawn_adapters(tokens, size, ranks[1:], dtype)
    with interpreted((9, 0)):
        dgate, dup, da_apart = gated_thin_backward(gate, up, dgated, dinner, "silu", implementation="triton")
        (codes, scales), products, da, dbs = thin.rounded_gradients(gate, up, dgated, dinner, inners, bs, "silu")
    gradients = [dgate, dup]
    want, want_scales = fp8_product.side_by_side(gradients, None, True, "reference")
    assert codes.shape == want.shape
    np.testing.assert_array_equal(scales, want_scales)
    # The interpreter does not fuse multiply-adds, by which a GPU divides exactly.
    assert (np.float32(codes) != np.float32(want)).mean() < 1e-3
    np.testing.assert_allclose(np.float32(codes), np.float32(want), rtol=1 / 8, atol=2**-9)
    np.testing.assert_allclose(da, da_apart, rtol=1e-5, atol=1e-4)
    assert products.dtype == dtype
    exact = np.concatenate([np.float64(gradient) @ np.float64(b) for gradient, b in zip(gradients, bs)], axis=1)
    assert np.linalg.norm(np.float64(products) - exact) <= jnp.finfo(dtype).eps * np.linalg.norm(exact)
    for gradient, db, inner in zip(gradients, dbs, inners, strict=True):
        assert db.dtype == jnp.float32
        exact = np.float64(gradient).T @ np.float64(inner)
        assert np.linalg.norm(np.float64(db) - exact) <= 1e-6 * np.linalg.norm(exact)


@pytest.mark.full
def test_the_check_of_rounded_gradients_compares_codes_with_those_of_the_kernel_s_own(monkeypatch):
    """Of exact gradients, which differ from the kernel's in their last digit, some have other codes."""
    checks = {}
    monkeypatch.setattr(dispatch, "first_use", lambda op, name, kind, compare: checks.setdefault(op, compare) and None)
    fp8_product._first_gradients(jnp.dtype(jnp.bfloat16), 16, "silu")
    monkeypatch.setattr(jax, "jit", lambda function, **_: function)  # the interpreter runs on arrays
    with interpreted((9, 0)):
        (*_, codes), (*_, wanted) = checks["gated_gradients_to_fp8"]()
    np.testing.assert_array_equal(codes, wanted)


def test_the_product_alone_is_that_of_the_forward():
    gate, up, _, _, a = drawn(100, 264, 8, jnp.bfloat16)
    with interpreted((9, 0)):
        _, inner = gated_thin(gate, up, a, "silu", implementation="triton")
        alone = thin_of_gated(gate, up, a, "silu", implementation="triton")
    np.testing.assert_array_equal(np.float32(alone), np.float32(inner))
