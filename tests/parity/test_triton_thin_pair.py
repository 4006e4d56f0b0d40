"""The Triton kernel of `thin_pair` in Triton's interpreter, against plain JAX in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton_interpreter import interpreted

from jaxtune.pallas.thin_pair import thin_pair


# Rows and columns that are and are no multiple of a tile, one and several programs along each axis, and ranks of which
# some are no power of two.
@pytest.mark.parametrize(
    ("tokens", "out", "rank"),
    [(37, 1032, 16), (512, 256, 8), (65, 520, 1), pytest.param(8300, 1024, 31, marks=pytest.mark.full)],
)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_products_are_those_of_plain_jax(tokens, out, rank, capability, dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    dout, inner = (jax.random.normal(key, (tokens, size)).astype(dtype) for key, size in zip(keys, (out, rank)))
    # The interpreter does not round to bfloat16 as a GPU does, so nothing is left to round.
    b = jax.random.normal(keys[2], (out, rank)).astype(dtype).astype(jnp.float32)
    with interpreted(capability):
        dinner, db = thin_pair(dout, b, inner, implementation="triton")
    dout, b, inner = (np.asarray(array, np.float32) for array in (dout, b, inner))
    assert dinner.dtype == dtype and db.dtype == jnp.float32
    step = jnp.finfo(dtype).eps
    np.testing.assert_allclose(np.float32(dinner), dout @ b, rtol=step, atol=1e-3)
    np.testing.assert_allclose(db, dout.T @ inner, rtol=1e-4, atol=2e-3)
