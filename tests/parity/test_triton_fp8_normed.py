"""The Triton kernel that norms rows, rounds them to e4m3 and multiplies them by a thin array, in Triton's interpreter,
against plain JAX in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from triton_interpreter import interpreted

from jaxtune.pallas.quant_matmul import fp8_normed, fp8_product

# Rows that are and are no multiple of a tile, one and several programs, ranks of which some are no power of two, and
# more than 16 blocks a row, which is what a thread of a row keeps at once.
SHAPES = [(37, 256, 16), (130, 512, 3), (65, 128, 48), (16, 2176, 32), (33, 384, None)]


def drawn(rows: int, size: int, rank: int | None):
    """(x, factors, a), of which x has blocks of zeros and of small and large numbers, and a row of zeros."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, size)) * jnp.asarray([1.0, 0.0, 1e-3, 64.0])[jnp.arange(size) // 128 % 4]
    factors = jax.random.uniform(keys[1], (size,), minval=0.5, maxval=1.5)
    a = None if rank is None else jax.random.normal(keys[2], (rank, size))
    return x.at[3].set(0.0).astype(jnp.bfloat16), factors, a


@pytest.mark.parametrize(("rows", "size", "rank"), SHAPES)
@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_codes_and_products_are_those_of_plain_jax(rows, size, rank, blocks, dtype):
    assert_as_plain_jax(rows, size, rank, blocks, dtype)


@given(
    rows=st.integers(4, 80), size=st.integers(0, 9).map(lambda n: 64 * (2 * n + 1)), rank=st.sampled_from([None, 3, 16])
)
@example(rows=70, size=576, rank=48)  # SmolLM2-135M
@settings(max_examples=4, deadline=None)
def test_rows_of_an_odd_number_of_64s_have_a_scale_each(rows, size, rank):
    assert_as_plain_jax(rows, size, rank, False, jnp.bfloat16)


def assert_as_plain_jax(rows, size, rank, blocks, dtype):
    x, factors, a = drawn(rows, size, rank)
    factors = factors.astype(dtype)
    with interpreted((9, 0)):
        codes, scales, of_rows, inner = fp8_normed.normed(x, factors, a, 1e-5, blocks)
    assert codes.dtype == jnp.float8_e4m3fn and scales.dtype == of_rows.dtype == jnp.float32
    wide = np.float64(x)
    inverse = 1 / np.sqrt(np.square(wide).mean(1, keepdims=True) + 1e-5)
    exact = wide * inverse * np.float64(factors)
    assert of_rows.shape == inverse.shape
    np.testing.assert_allclose(of_rows, inverse, rtol=1e-6)
    want, want_scales = fp8_product.rounded(jnp.float32(exact), blocks)
    assert scales.shape == want_scales.shape
    of_zeros = np.float32(want_scales) == 1.0  # zeros have other scales
    np.testing.assert_allclose(np.where(of_zeros, 1.0, scales), want_scales, rtol=1e-5)
    assert (np.float32(codes) != np.float32(want)).mean() < 1e-3
    np.testing.assert_allclose(np.float32(codes), np.float32(want), rtol=1 / 8, atol=2**-9)
    if a is None:
        assert inner is None
        return
    assert inner.shape == (rows, rank) and inner.dtype == jnp.bfloat16
    product = exact @ np.float64(a).T
    # The interpreter cuts numbers off to bfloat16, which a GPU rounds.
    assert np.linalg.norm(np.float64(inner) - product) <= 2**-7 * np.linalg.norm(product)


def test_rows_that_are_not_finite_make_no_others_so():
    x, factors, a = drawn(37, 256, 16)
    x = x.at[5, 7].set(jnp.nan).at[9, 200].set(jnp.inf)
    for blocks in (True, False):
        with interpreted((9, 0)):
            codes, scales, of_rows, inner = fp8_normed.normed(x, factors, a, 1e-5, blocks)
        found = np.float32(codes) * np.repeat(np.float32(scales), 128 if blocks else 256, axis=1)
        bad = ~np.isfinite(found).all(1) | ~np.isfinite(np.float32(inner)).all(1)
        assert np.isfinite(np.delete(of_rows, [5, 9])).all() and np.isnan(of_rows[5]).all()
        assert sorted(np.flatnonzero(bad)) == [5, 9]
