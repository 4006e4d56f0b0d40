"""The two thin products of an adapter's backward: which calls the kernel refuses, which are left to plain JAX, and that
quant_matmul's gradients come from them. The kernel runs in Triton's interpreter
(tests/parity/test_triton_thin_pair.py)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.pallas import dispatch
from jaxtune.pallas.quant_matmul import LoraWeights, quant_matmul
from jaxtune.pallas.thin_pair import thin_pair, triton


def shapes(tokens: int, out: int, rank: int, dtype=jnp.bfloat16):
    dout, inner = (jax.ShapeDtypeStruct((tokens, size), dtype) for size in (out, rank))
    return dout, jax.ShapeDtypeStruct((out, rank), jnp.float32), inner


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.gpu
def test_both_products_have_float32_sums(dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    dout, inner = (jax.random.normal(key, (40, size)).astype(dtype) for key, size in zip(keys, (24, 5)))
    b = jax.random.normal(keys[2], (24, 5))
    dinner, db = thin_pair(dout, b, inner)
    assert dinner.dtype == dtype and db.dtype == jnp.float32
    dout, b, inner = (np.asarray(array, np.float64) for array in (dout, b.astype(dtype), inner))
    np.testing.assert_allclose(np.float64(dinner), dout @ b, rtol=jnp.finfo(dtype).eps, atol=1e-5)
    np.testing.assert_allclose(db, dout.T @ inner, rtol=1e-5, atol=1e-5)


@pytest.fixture
def hopper(monkeypatch):
    """Kernels are chosen as on a GPU of Hopper's kind."""
    monkeypatch.setattr("jaxtune.pallas.compat._has_jax_triton", lambda: True)
    with dispatch.compile_for((9, 0)):
        yield


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (shapes(4096, 1024, 32), None),
        (shapes(4096, 1024, 16, jnp.float32), "dtype float32"),
        (shapes(4096, 1028, 16), "an output of 1028 numbers, no multiple of 8"),
        (shapes(4096, 1024, 33), "rank 33, more than 32"),
    ],
)
def test_what_the_kernel_refuses(given, reason, hopper):
    assert triton.refusal(*given[:2]) == reason


def test_without_a_gpu_it_is_refused():
    arrays = (jnp.zeros(array.shape, array.dtype) for array in shapes(64, 512, 8))
    with pytest.raises(ValueError, match="thin_pair: implementation 'triton' cannot serve .*no NVIDIA GPU"):
        thin_pair(*arrays, implementation="triton")


@pytest.mark.parametrize(
    ("tokens", "out", "rank", "by_kernel"),
    [(2048, 512, 32, True), (2047, 512, 32, False), (2048, 504, 32, False)],
)
def test_small_calls_are_left_to_plain_jax(tokens, out, rank, by_kernel, hopper, monkeypatch):
    """They are not said to be refused."""
    monkeypatch.setattr(triton, "thin_pair", lambda dout, inner, b: (inner, b))
    jax.eval_shape(lambda *arrays: thin_pair(*arrays), *shapes(tokens, out, rank))
    assert dispatch.record["thin_pair"] == ("triton" if by_kernel else "reference", {})


def test_the_gradients_of_adapters_come_from_it(hopper, monkeypatch):
    """Scaled, and with B in its own dtype."""
    x, weight, a = jnp.ones((2048, 16), jnp.bfloat16), jnp.ones((512, 16), jnp.bfloat16), jnp.ones((4, 16))
    monkeypatch.setattr(triton, "thin_pair", lambda dout, inner, b: (2 * jnp.ones_like(inner), 3 * jnp.ones_like(b)))

    def total(a, b):
        [out] = quant_matmul(x, [weight], [LoraWeights(a, b, scale=0.5)], implementation="reference")
        return out.astype(jnp.float32).sum()

    da, db = jax.grad(total, (0, 1))(a, jnp.ones((512, 4)))
    assert (db == 3).all() and (da == 2048 * 2 * 0.5).all()
