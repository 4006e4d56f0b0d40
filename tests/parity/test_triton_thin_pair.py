"""The Triton kernel of `thin_pair` in Triton's interpreter, against plain JAX in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from triton_interpreter import interpreted

from jaxtune.pallas.thin_pair import thin_pair, triton


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


@given(
    tokens=st.integers(1, 100),
    sizes=st.lists(st.integers(1, 40).map(lambda number: 8 * number), min_size=2, max_size=3),
    rank=st.integers(1, 17),
    capability=st.sampled_from([(8, 0), (9, 0)]),
)
@example(tokens=70, sizes=[576, 192, 192], rank=16, capability=(9, 0))  # query, key and value of SmolLM2-135M
@example(tokens=65, sizes=[256, 8], rank=3, capability=(9, 0))
@settings(max_examples=3, deadline=None)
def test_of_several_outputs_each_has_its_products(tokens, sizes, rank, capability):
    keys = jax.random.split(jax.random.key(0), 2 * len(sizes) + 1)
    douts = [jax.random.normal(key, (tokens, size)).astype(jnp.float16) for key, size in zip(keys, sizes)]
    bs = [jax.random.normal(key, (size, rank)).astype(jnp.float16) for key, size in zip(keys[::-1], sizes)]
    inner = jax.random.normal(keys[len(sizes)], (tokens, rank * len(sizes))).astype(jnp.float16)
    with interpreted(capability):
        dinner, dbs = triton.thin_pairs(douts, inner, bs)
        alone = [triton.thin_pair(*each) for each in zip(douts, jnp.split(inner, len(sizes), axis=1), bs)]
    assert dinner.shape == inner.shape and dinner.dtype == jnp.float16
    np.testing.assert_array_equal(dinner, jnp.concatenate([thin for thin, _ in alone], axis=1))
    for db, (_, want), size in zip(dbs, alone, sizes):
        assert db.shape == (size, rank) and db.dtype == jnp.float32
        np.testing.assert_allclose(db, want, rtol=1e-4, atol=2e-3)  # other ranges of rows
    want = np.concatenate([np.float32(dout) @ np.float32(b) for dout, b in zip(douts, bs)], axis=1)
    np.testing.assert_allclose(np.float32(dinner), want, rtol=2**-10, atol=1e-2)
