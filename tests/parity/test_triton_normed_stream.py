"""The Triton kernel of `normed_stream` in Triton's interpreter, against plain JAX. In float16: the interpreter does not
round to bfloat16 as a GPU does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton_interpreter import interpreted

from jaxtune.pallas.normed_heads import normed
from jaxtune.pallas.normed_stream import triton


# Sizes that are and are no power of two; rows that are no multiple of a tile, nor of a program that sums.
@pytest.mark.parametrize(("rows", "size"), [(37, 1024), (35, 2880), (3, 5120), (9, 520)])
@pytest.mark.parametrize(("offset", "float32"), [(0.0, False), (0.0, True), (1.0, True)])
@pytest.mark.parametrize("passing", [True, False])
def test_the_gradients_are_those_of_plain_jax(rows, size, offset, float32, passing):
    keys = jax.random.split(jax.random.key(0), 4)
    x, dnormed, passed = (jax.random.normal(key, (1, rows, size)).astype(jnp.float16) for key in keys[:3])
    weight = (1.0 - offset + 0.3 * jax.random.normal(keys[3], (size,))).astype(jnp.float16)
    zero = jax.custom_derivatives.SymbolicZero(jax.typeof(x))

    def plainly(x, weight):
        return x, normed(x, weight, 1e-5, offset, float32)

    # The interpreter runs outside of a trace, so the rule of the derivative is called as JAX calls it.
    gradients = (passed if passing else zero, dnormed)
    with interpreted():
        dx, dweight = triton._normed_stream_bwd(1e-5, offset, float32, (x, weight, ()), gradients)
        alone, frozen = triton._normed_stream_bwd(1e-5, offset, float32, (x, weight, None), gradients)
    pull = jax.vjp(plainly, *(array.astype(jnp.float32) for array in (x, weight)))[1]
    want = pull((passing * passed.astype(jnp.float32), dnormed.astype(jnp.float32)))
    for one, other in zip((dx, dweight), map(np.asarray, want), strict=True):
        assert one.dtype == jnp.float16 and one.shape == other.shape
        np.testing.assert_allclose(np.float32(one), other, rtol=2**-10, atol=1e-4 * np.abs(other).max())
    assert frozen is None and (np.asarray(alone) == np.asarray(dx)).all()
