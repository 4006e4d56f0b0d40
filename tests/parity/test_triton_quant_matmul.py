"""The Triton kernels over four-bit weights, in Triton's interpreter: the bits of decode, and products of few rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton_interpreter import interpreted

from jaxtune.pallas.formats import FP4, NF4
from jaxtune.pallas.quant_matmul import triton

# Whole programs; a tail of blocks; a last block that is short; an odd number of elements; less than a block.
SHAPES = [(128, 64), (300, 96), (7, 333), (5, 7), (1, 3)]


def normal(*shape, seed=0, dtype=jnp.float16):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantised_bits_are_those_of_decode(shape, double_quant, dtype):
    """Scales from 1e-4 to 1e3: a rounding that is left out, or one too many, shows."""
    scales = 10.0 ** jax.random.uniform(jax.random.key(1), (shape[0], 1), minval=-4, maxval=3)
    weight = NF4.encode(normal(*shape, dtype=jnp.float32) * scales, double_quant)
    with interpreted():
        got = triton.dequantize(weight, dtype)
    want = weight.decode(dtype)
    assert got.shape == shape and got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))


def test_fp4_has_its_own_table():
    nf4 = NF4.encode(normal(16, 64), double_quant=False)
    weight = FP4(nf4.codes, nf4.absmax, None, None, None, nf4.shape, "float16")
    with interpreted():
        np.testing.assert_array_equal(triton.dequantize(weight), weight.decode())


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 16])
@pytest.mark.parametrize("shape", [(40, 128), (33, 1088)])
def test_products_of_few_rows(shape, count, double_quant):
    weight = NF4.encode(normal(*shape, seed=2) * 0.02, double_quant)
    x = normal(count, shape[1], seed=3)
    exact = np.asarray(x, np.float64) @ np.asarray(weight.decode(jnp.float32), np.float64).T
    xla = np.asarray(jnp.einsum("mk,nk->mn", x, weight.decode(x.dtype), preferred_element_type=x.dtype), np.float64)
    with interpreted():
        got = triton.small_matmul(x, weight)
    assert got.shape == (count, shape[0]) and got.dtype == x.dtype
    error = np.linalg.norm(np.asarray(got, np.float64) - exact)
    assert error <= 2 * np.linalg.norm(xla - exact)
