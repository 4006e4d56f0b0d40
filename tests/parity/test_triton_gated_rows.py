"""The Triton kernel of `gated_rows_backward` in Triton's interpreter, against plain JAX. In float16: the interpreter
does not round to bfloat16 as a GPU does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton_interpreter import interpreted

from jaxtune.pallas import dispatch
from jaxtune.pallas.gated import RowGate, gated_rows_backward

GATES = [
    RowGate("silu"),
    RowGate("gelu_tanh"),
    RowGate("silu", 1.5, 1.702, interleaved=True),
    RowGate("silu", 2.0, 1.0),
    RowGate("gelu_tanh", interleaved=True),
]


# Neither rows nor columns are a multiple of a tile, or both are.
@pytest.mark.parametrize(("rows", "size"), [(19, 300), (8, 256), (3, 40)])
@pytest.mark.parametrize("gate", GATES, ids=str)
def test_the_kernel_is_plain_jax(rows, size, gate):
    keys = jax.random.split(jax.random.key(0), 3)
    gate_up = (2 * jax.random.normal(keys[0], (rows, 2 * size))).astype(jnp.float16)
    gate_up = gate_up.at[:, :6].set(gate.limit or 0.0).at[:, 6:9].set(-(gate.limit or 0.0))  # at the limits
    dgated = jax.random.normal(keys[1], (rows, size)).astype(jnp.float16)
    weights = jax.random.uniform(keys[2], (rows,)).at[0].set(0.0)  # an empty row
    with interpreted():
        got = gated_rows_backward(gate_up, weights, dgated, gate, implementation="triton")
    assert dispatch.record["gated_rows_backward"] == ("triton", {})
    want = gated_rows_backward(*(array.astype(jnp.float32) for array in (gate_up, weights, dgated)), gate)
    for one, other, dtype in zip(got, map(np.asarray, want), (jnp.float16, jnp.float16, jnp.float32), strict=True):
        assert one.dtype == dtype and one.shape == other.shape
        atol = 1e-5 * np.abs(other).max()
        np.testing.assert_allclose(np.float32(one), other, rtol=2**-10 if dtype == jnp.float16 else 1e-5, atol=atol)
