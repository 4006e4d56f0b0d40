"""The Triton kernels of experts' gated activation with the thin products of their down projection's adapters, in
Triton's interpreter, against plain JAX in float32. What a kernel leaves unwritten is NaN there, and so are empty rows
here."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton_interpreter import interpreted

from jaxtune.pallas import gpu_kernel, targets
from jaxtune.pallas.gated import RowGate, gated_rows, gated_rows_backward
from jaxtune.pallas.grouped_matmul import gated_thin, reference
from jaxtune.pallas.grouped_matmul.layout import groups_of

CLIPPED = RowGate("silu", 1.5, 1.702, interleaved=True)


# Rows of each expert, an upper bound of their sum, inner size, rank, multiprocessors. With 132 of these the rows of few
# experts are divided into ranges, some of which are empty.
@pytest.mark.parametrize(
    ("sizes", "most", "size", "rank", "processors", "gate"),
    [
        ((300, 0, 1, 128, 190), 800, 264, 16, 1, RowGate("silu")),  # unequal, with tiles that no expert needs
        ((300, 0, 1, 128, 190), 619, 136, 5, 132, CLIPPED),
        ((0, 0, 400, 0), 400, 128, 16, 132, RowGate("gelu_tanh")),  # one expert has all rows
        ((65, 64, 63), 192, 72, 8, 4, RowGate("silu", 0.75, 1.0)),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_forward_and_backward_are_those_of_plain_jax(sizes, most, size, rank, processors, gate, dtype, monkeypatch):
    """Empty rows are not read, and their results are zero."""
    groups = groups_of(jnp.asarray(sizes, jnp.int32), most)
    keys = jax.random.split(jax.random.key(0), 5)
    inside = (jnp.arange(groups.tile_rows) < groups.tile_sizes[:, None]).reshape(-1, 1)
    drawn = zip(keys, (2 * size, size, rank))
    gate_up, dgated, dinner = (jax.random.normal(key, (groups.rows, n)).astype(dtype) for key, n in drawn)
    weights = jax.random.uniform(keys[3], (groups.rows,))
    a = jax.random.normal(keys[4], (len(sizes), rank, size)).astype(dtype)
    unread = [jnp.where(inside, array, jnp.nan) for array in (gate_up, dgated, dinner)]
    padded = jnp.pad(unread[2], ((0, 0), (0, 64 - rank)), constant_values=jnp.nan)
    unweighted = jnp.where(inside[:, 0], weights, jnp.nan)
    monkeypatch.setattr(targets, "multiprocessors", lambda: processors)
    with interpreted((9, 0)), gpu_kernel.interpreted():
        assert gated_thin.refusal(gate_up, rank, gate) is None
        rows, inner = gated_thin.gated_rows_thin(unread[0], unweighted, a, groups, gate)
        found = gated_thin.gated_rows_thin_backward(unread[0], unweighted, unread[1], padded, rank, groups, gate)
    dgate_up, dweights, da = found
    assert rows.dtype == inner.dtype == dgate_up.dtype == dtype and dweights.dtype == da.dtype == jnp.float32
    assert inner.shape == (groups.rows, 64) and da.shape == a.shape
    for array in (rows, inner, dweights[:, None]):
        assert not jnp.where(inside, 0, array).any()
    with_an_expert = jnp.repeat(groups.tile_expert < len(sizes), groups.tile_rows)[:, None]
    assert not jnp.where(inside | ~with_an_expert, 0, dgate_up).any()
    wide = (jnp.where(inside, array, 0).astype(jnp.float32) for array in (gate_up, dgated, dinner))
    (gate_up, dgated, dinner), weights = wide, jnp.where(inside[:, 0], weights, 0)
    want = gated_rows(gate_up, weights, gate)
    step = jnp.finfo(dtype).eps
    np.testing.assert_allclose(np.float32(rows), want, rtol=step, atol=1e-5)
    got = np.float32(jnp.where(inside, dgate_up, 0))
    rounded = jnp.where(inside, rows, 0).astype(jnp.float32)  # what the thin products multiply
    thin = reference.thin(rounded, a.astype(jnp.float32), groups, 2)
    np.testing.assert_allclose(np.float32(inner[:, :rank]), thin, rtol=2 * step, atol=5e-3)
    assert not inner[:, rank:].any()
    _, want, dwanted = gated_rows_backward(gate_up, weights, dgated, gate)
    np.testing.assert_allclose(got, want, rtol=step, atol=1e-5)
    np.testing.assert_allclose(dweights, dwanted, rtol=1e-3, atol=1e-3)
    want = reference.contract_rows(dinner, rounded, groups, jnp.float32)
    np.testing.assert_allclose(da, want, rtol=1e-3, atol=2e-3)
