"""The Triton kernel of the two thin products of the backward of experts' adapters, in Triton's interpreter, against
plain JAX in float32. What the kernel leaves unwritten is NaN there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton_interpreter import interpreted

from jaxtune.pallas import targets
from jaxtune.pallas.grouped_matmul import reference, thin_pair
from jaxtune.pallas.grouped_matmul.layout import groups_of


# Rows of each expert, an upper bound of their sum, columns, rank, multiprocessors. With 132 of these the rows of few
# experts are divided into ranges, some of which are empty.
@pytest.mark.parametrize(
    ("sizes", "most", "out", "rank", "processors"),
    [
        ((300, 0, 1, 128, 190), 800, 1032, 16, 1),  # unequal, with tiles that no expert needs
        ((300, 0, 1, 128, 190), 619, 520, 5, 132),
        ((0, 0, 400, 0), 400, 512, 16, 132),  # one expert has all rows
        ((0, 0), 200, 512, 16, 1),  # no rows at all
        ((65, 64, 63), 192, 264, 8, 4),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_products_are_those_of_plain_jax(sizes, most, out, rank, processors, dtype, monkeypatch):
    """Whatever is in empty rows, which are NaN here: they are not read, and their products are zero."""
    groups = groups_of(jnp.asarray(sizes, jnp.int32), most)
    keys = jax.random.split(jax.random.key(0), 3)
    inside = (jnp.arange(groups.tile_rows) < groups.tile_sizes[:, None]).reshape(-1, 1)
    dout, inner = (jax.random.normal(key, (groups.rows, size)).astype(dtype) for key, size in zip(keys, (out, rank)))
    # The interpreter does not round to bfloat16 as a GPU does, so nothing is left to round.
    b = jax.random.normal(keys[2], (len(sizes), out, rank)).astype(dtype).astype(jnp.float32)
    padded = jnp.pad(jnp.where(inside, inner, jnp.nan), ((0, 0), (0, 64 - rank)), constant_values=jnp.nan)
    monkeypatch.setattr(targets, "multiprocessors", lambda: processors)
    with interpreted((9, 0)):
        assert thin_pair.refusal(dout, b) is None
        dinner, db = thin_pair.thin_pair(jnp.where(inside, dout, jnp.nan), b, padded, groups)
    assert dinner.dtype == dtype and dinner.shape == (groups.rows, 64) and db.dtype == jnp.float32
    assert not dinner[:, rank:].any() and not jnp.where(inside, 0, dinner).any()
    dout, inner = (jnp.where(inside, array, 0).astype(jnp.float32) for array in (dout, inner))
    step = jnp.finfo(dtype).eps
    np.testing.assert_allclose(np.float32(dinner[:, :rank]), reference.thin(dout, b, groups, 1), rtol=step, atol=1e-3)
    want = reference.contract_rows(dout, inner, groups, jnp.float32)
    np.testing.assert_allclose(db, want, rtol=1e-4, atol=2e-3)
