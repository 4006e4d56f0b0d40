"""The gated activation's backward: the kernel's body under Pallas' GPU interpreter against JAX's own derivative."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.pallas import dispatch, gpu_kernel, targets
from jaxtune.pallas.gated import ACTIVATIONS, api, gated_backward, mosaic, reference


def arrays(shape, dtype=jnp.bfloat16, size=3.0):
    return tuple((size * jax.random.normal(jax.random.key(i), shape)).astype(dtype) for i in range(3))


def wide(values):
    return [np.asarray(value, np.float32) for value in values]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.gpu
def test_the_reference_is_the_derivative(activation):
    gate, up, dgated = arrays((4, 6), jnp.float32)
    gated, dgate, dup = gated_backward(gate, up, dgated, activation)
    np.testing.assert_allclose(gated, ACTIVATIONS[activation](gate) * up, rtol=1e-6)
    np.testing.assert_allclose(dup, dgated * ACTIVATIONS[activation](gate), rtol=1e-6)
    step = 1e-2
    slope = (ACTIVATIONS[activation](gate + step) - ACTIVATIONS[activation](gate - step)) / (2 * step)
    np.testing.assert_allclose(dgate, dgated * up * slope, atol=2e-3)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(2, 4, mosaic.CHUNK), (7, mosaic.CHUNK), (16, 64)])
@pytest.mark.gpu
def test_the_kernel_is_the_reference(shape, activation):
    given = arrays(shape)
    with gpu_kernel.interpreted():
        got = jax.jit(lambda *each: gated_backward(*each, activation, implementation="mosaic"))(*given)
    for one, other in zip(got, reference.gated_backward(*map(jnp.float32, given), activation), strict=True):
        assert one.dtype == jnp.bfloat16 and one.shape == shape
        other = np.asarray(other)
        # Half a unit in bfloat16's last place, and float32's own errors, which count where results cancel.
        assert (np.abs(np.float32(one) - other) <= np.abs(other) * 2**-8 + 1e-5 * np.abs(other).max()).all()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.gpu
def test_large_and_small_arguments(activation):
    """Where the exponential is infinite or nothing, and where the activation is a straight line."""
    gate = jnp.tile(jnp.array([0.0, -0.0, 1e-30, -1e-8, 20.0, -20.0, 90.0, -90.0, 3e4, -3e4]), 1024).astype(
        jnp.bfloat16
    )
    up, dgated = jnp.full_like(gate, 2.0), jnp.full_like(gate, 3.0)
    with gpu_kernel.interpreted():
        got = gated_backward(gate, up, dgated, activation, implementation="mosaic")
    for one, other in zip(wide(got), wide(reference.gated_backward(*map(jnp.float32, (gate, up, dgated)), activation))):
        np.testing.assert_allclose(one, other, rtol=2**-8, atol=1e-6)


def test_what_the_kernel_leaves_to_the_reference():
    def refused(*call):
        return api.implementations(*call)["mosaic"]()

    size = 8 * mosaic.CHUNK
    assert refused(jnp.bfloat16, size, "silu") == "needs a Hopper GPU (compute capability 9.0)"
    with targets.compile_for((8, 0)):
        assert refused(jnp.bfloat16, size, "silu") == "needs a Hopper GPU (compute capability 9.0)"
    with targets.compile_for((9, 0)):
        assert refused(jnp.bfloat16, size, "silu") is None
        assert refused(jnp.bfloat16, size, "gelu") == "activation gelu: Mosaic has no erf"
        assert refused(jnp.float16, size, "silu") == "dtype float16"
        assert refused(jnp.bfloat16, 2**32, "silu") == "4294967296 elements: their numbers have 32 bits"
        assert refused(jnp.bfloat16, 2**32 - mosaic.CHUNK, "silu") is None
        assert refused(jnp.bfloat16, size + 8, "silu") == f"{size + 8} elements, no multiple of {mosaic.CHUNK}"


def test_the_check_at_first_use_passes_a_right_kernel_and_stops_a_wrong_one(monkeypatch):
    found = []
    monkeypatch.setattr(dispatch, "first_use", lambda *call: found.append(dispatch._difference(call[-1])))
    kernel = mosaic.gated_backward
    with gpu_kernel.interpreted():
        api._first_use("silu")
        monkeypatch.setattr(mosaic, "gated_backward", lambda *each: kernel(*each)[::-1])
        api._first_use("silu")
    assert found[0] is None and "differs from the reference" in found[1]
