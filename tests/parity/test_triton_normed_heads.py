"""The Triton kernels of `normed_heads` in Triton's interpreter, against plain JAX. In float16: the interpreter does not
round to bfloat16 as a GPU does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton_interpreter import interpreted

from jaxtune.pallas import dispatch
from jaxtune.pallas.normed_heads import normed, normed_heads, rotated, triton


# The heads of all tokens are no multiple of a tile, nor of a program of the backward.
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(9, 4, 128), (41, 5, 64), (20, 1, 256), (300, 3, 32)])
@pytest.mark.parametrize(("offset", "float32"), [(0.0, False), (0.0, True), (1.0, True)])
def test_the_kernels_are_plain_jax(tokens, heads, dim, offset, float32):
    keys = jax.random.split(jax.random.key(0), 4)
    x, dout = (jax.random.normal(key, (2, tokens, heads, dim)).astype(jnp.float16) for key in keys[:2])
    weight = (1.0 - offset + 0.3 * jax.random.normal(keys[2], (dim,))).astype(jnp.float16)
    angles = 3 * jax.random.normal(keys[3], (2, tokens, dim // 2))
    table = jnp.cos(angles), jnp.sin(angles)

    def plainly(x, weight):
        return rotated(False, normed(x, weight, 1e-5, offset, float32), *table)

    # The interpreter runs outside of a trace, so the rule of the derivative is called as JAX calls it.
    with interpreted():
        got = normed_heads(x, weight, table, eps=1e-5, offset=offset, float32=float32, implementation="triton")
        dx, dweight, *others = triton._normed_heads_bwd(1e-5, offset, float32, (x, weight, *table), dout)
    assert dispatch.record["normed_heads"] == ("triton", {}) and others == [None, None]
    want = plainly(x, weight)
    assert got.dtype == jnp.float16 and (np.asarray(got) == np.asarray(want)).mean() > 0.99
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=2**-9, atol=2**-9)
    pull = jax.vjp(plainly, *(array.astype(jnp.float32) for array in (x, weight)))[1]
    for one, other in zip((dx, dweight), map(np.asarray, pull(dout.astype(jnp.float32))), strict=True):
        assert one.dtype == jnp.float16 and one.shape == other.shape
        np.testing.assert_allclose(np.float32(one), other, rtol=2**-10, atol=1e-4 * np.abs(other).max())
