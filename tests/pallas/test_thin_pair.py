"""The two thin products of an adapter's backward: which calls the kernel refuses, which are left to plain JAX, and that
quant_matmul's gradients come from them. The kernel runs in Triton's interpreter
(tests/parity/test_triton_thin_pair.py)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.pallas import dispatch, targets
from jaxtune.pallas.quant_matmul import LoraWeights, quant_matmul
from jaxtune.pallas.thin_pair import reference, thin_pair, thin_pairs, triton


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
    with targets.compile_for((9, 0)):
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


@pytest.mark.parametrize(
    ("tokens", "outs", "ranks", "together"),
    [
        (2048, (576, 192, 192), (16, 16, 16), True),  # query, key and value of SmolLM2-135M
        (2048, (2048, 1024, 1024), (16, 16, 16), True),  # of Qwen3-0.6B
        (2048, (1536, 1536), (32, 32), True),
        (2047, (576, 192, 192), (16, 16, 16), False),
        (2048, (192, 192), (16, 16), False),
        (2048, (4096, 1024, 1024), (16, 16, 16), False),
        (2048, (576, 192), (16, 8), False),
        (2048, (576, 192), (33, 33), False),
        (2048, (576, 196), (16, 16), False),
        (2048, (576,), (16,), False),
    ],
)
def test_outputs_of_a_small_model_are_multiplied_together(tokens, outs, ranks, together, hopper, monkeypatch):
    def by_kernel(douts, inner, bs):
        return inner, [b.astype(jnp.float32) for b in bs]

    monkeypatch.setattr(triton, "thin_pairs", by_kernel)
    douts = [jax.ShapeDtypeStruct((tokens, out), jnp.bfloat16) for out in outs]
    bs = [jax.ShapeDtypeStruct((out, rank), jnp.bfloat16) for out, rank in zip(outs, ranks, strict=True)]
    found = jax.eval_shape(thin_pairs, douts, bs, jax.ShapeDtypeStruct((tokens, sum(ranks)), jnp.bfloat16))
    assert (found is not None) == together
    if together:
        dinner, dbs = found
        assert dinner.shape == (tokens, sum(ranks))
        assert [(db.shape, db.dtype) for db in dbs] == [(b.shape, b.dtype) for b in bs]


@pytest.mark.parametrize("scales", [(0.5, 0.5, 0.5), (0.5, 1.0, 2.0)])
def test_the_gradients_of_adapters_that_share_x_are_those_of_each(scales, hopper, monkeypatch):
    """Of query, key and value, of which keys have no adapter, too."""
    keys = iter(jax.random.split(jax.random.key(0), 16))
    x = jax.random.normal(next(keys), (2048, 16), jnp.bfloat16)
    weights = [jax.random.normal(next(keys), (out, 16), jnp.bfloat16) for out in (576, 192, 64)]
    sides = [
        (jax.random.normal(next(keys), (4, 16)), jax.random.normal(next(keys), (len(weight), 4))) for weight in weights
    ]
    ran = []

    def by_kernel(douts, inner, bs):
        ran.append(len(douts))
        pairs = map(reference.thin_pair, douts, bs, jnp.split(inner, len(bs), axis=1))
        thins, dbs = zip(*pairs, strict=True)
        return jnp.concatenate(thins, axis=1), list(dbs)

    def gradients(sides, adapted):
        loras = [LoraWeights(*side, scale=scale) if has else None for side, scale, has in zip(sides, scales, adapted)]
        outs = quant_matmul(x, weights, loras, implementation="reference")
        return sum(jnp.square(out.astype(jnp.float32)).sum() for out in outs)

    for adapted in ((True, True, True), (True, False, True)):
        with monkeypatch.context() as patch:
            patch.setattr(triton, "thin_pairs", by_kernel)
            patch.setattr(triton, "thin_pair", lambda dout, inner, b: reference.thin_pair(dout, b, inner))
            got = jax.grad(gradients)(sides, adapted)
        with targets.compile_for((7, 0)):
            want = jax.grad(gradients)(sides, adapted)
        jax.tree.map(
            lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-2, atol=2e-2 * np.abs(other).max()),
            got,
            want,
        )
    assert ran == [3, 2]
