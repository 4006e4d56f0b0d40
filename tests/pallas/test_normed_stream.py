"""The norm of the residual stream: plain JAX against the definition, which calls the kernel refuses, and the backward
of a layer whose norms are taken out of its segments. The kernel runs in Triton's interpreter
(tests/parity/test_triton_normed_stream.py)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.pallas import dispatch, targets
from jaxtune.pallas.normed_stream import has_kernel, normed_stream, triton


@pytest.mark.parametrize(("offset", "float32"), [(0.0, False), (0.0, True), (1.0, True)])
@pytest.mark.gpu
def test_rows_are_normed(offset, float32):
    x, weight = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate([(2, 5, 24), (24,)]))
    beside, got = normed_stream(x, weight, eps=0.1, offset=offset, float32=float32)
    wide, factor = np.asarray(x, np.float64), offset + np.asarray(weight, np.float64)
    np.testing.assert_allclose(got, wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 0.1) * factor, atol=2e-6)
    assert (beside == x).all()


@pytest.fixture
def hopper(monkeypatch):
    """Kernels are chosen as on a GPU of Hopper's kind."""
    monkeypatch.setattr("jaxtune.pallas.compat._has_jax_triton", lambda: True)
    with targets.compile_for((9, 0)):
        yield


def test_what_the_kernel_refuses(hopper):
    x, weight = jnp.zeros((2, 520), jnp.bfloat16), jnp.zeros((520,))
    assert triton.refusal(x, weight) is None
    assert triton.refusal(x.astype(jnp.float32), weight) == "dtype float32"
    for size in (516, 8200):
        reason = triton.refusal(jax.ShapeDtypeStruct((2, size), jnp.bfloat16), weight)
        assert reason is not None and f"rows of {size} numbers" in reason


def test_without_a_gpu_it_is_refused():
    x, weight = jnp.zeros((2, 520), jnp.bfloat16), jnp.zeros((520,))
    with pytest.raises(ValueError, match="normed_stream: implementation 'triton' cannot serve .*no NVIDIA GPU"):
        normed_stream(x, weight, implementation="triton")


@pytest.mark.parametrize(("rows", "size", "by_kernel"), [(1024, 512, True), (1023, 512, False), (4096, 256, False)])
def test_small_calls_are_left_to_plain_jax(rows, size, by_kernel, hopper):
    """They are not said to be refused."""
    x, weight = jax.ShapeDtypeStruct((1, rows, size), jnp.bfloat16), jax.ShapeDtypeStruct((size,), jnp.bfloat16)
    assert has_kernel(x, weight) == by_kernel
    assert dispatch.record["normed_stream"] == ("triton" if by_kernel else "reference", {})
