"""normed_matmul, quant_matmul of an RMS norm: that it is what the two operations compute, and which calls its kernel
runs. The kernel runs in Triton's interpreter (tests/parity/test_triton_fp8_normed.py)."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.pallas import dispatch, targets
from jaxtune.pallas.formats import FP8, NF4
from jaxtune.pallas.formats.fp8 import ROW, TILE
from jaxtune.pallas.normed_heads import inverse_rms, normed
from jaxtune.pallas.quant_matmul import LoraWeights, fp8_normed, fp8_product, low_rank, normed_matmul, quant_matmul

SIZE, OUTS = 512, (128, 64)


@pytest.fixture
def hopper(monkeypatch):
    """Kernels are chosen as on a GPU of Hopper's kind."""
    monkeypatch.setattr("jaxtune.pallas.compat._has_jax_triton", lambda: True)
    with targets.compile_for((9, 0)):
        yield


@pytest.fixture
def stand_in(monkeypatch):
    """The operation runs its kernel, for which plain JAX stands in, with the kernel's roundings: to e4m3 alone."""

    def in_plain_jax(x, factors, a, eps, blocks):
        wide = normed(x.astype(jnp.float32), factors.astype(jnp.float32), eps, 0.0, True)
        inner = None if a is None else jnp.dot(wide, a.T, precision="highest").astype(x.dtype)
        return *fp8_product.rounded(wide, blocks), inverse_rms(x, eps), inner

    monkeypatch.setattr(fp8_normed, "normed", in_plain_jax)
    monkeypatch.setattr(fp8_normed, "refusal", lambda x, rank, blocks: None)
    monkeypatch.setattr("jaxtune.pallas.gated.thin._TOKENS", 1)


def drawn(block=TILE, dtype=jnp.float32):
    """(x, the norm's weight, weights, adapters, biases), of which the second weight has no bias."""
    shapes = (2, 6, SIZE), (SIZE,), *((out, SIZE) for out in OUTS), (3, SIZE), (4, SIZE), (128, 3), (64, 4), (128,)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    x, norm, w, v, a, c, b, d, bias = (jax.random.normal(*each) for each in zip(keys, shapes, strict=True))
    loras = LoraWeights(a, b, scale=0.5), LoraWeights(c, d)
    return x.astype(dtype), 1 + norm / 4, (FP8.encode(w, block), FP8.encode(v, block)), loras, (bias, None)


def plain(x, norm, weights, loras, biases, **rounding):
    return quant_matmul(normed(x, norm, *rounding.values()), weights, loras, biases, fp8=True)


GEMMA = dict(eps=1e-5, offset=1.0, float32=True)
LLAMA = dict(eps=1e-5, offset=0.0, float32=False)


@pytest.mark.parametrize("block", [TILE, ROW])
@pytest.mark.parametrize("rounding", [GEMMA, LLAMA])
@pytest.mark.parametrize("adapted", [True, False])
def test_with_a_kernel_it_is_quant_matmul_of_the_norm(block, rounding, adapted, stand_in):
    x, norm, weights, loras, biases = drawn(block)
    loras = loras if adapted else (None, None)
    outs = normed_matmul(x, norm, weights, loras, biases, **rounding, fp8=True)
    for got, want in zip(outs, plain(x, norm, weights, loras, biases, **rounding), strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        assert np.linalg.norm(got - want) <= 1e-4 * np.linalg.norm(want) > 0


@pytest.mark.parametrize("trained", [True, False])
def test_its_gradients_are_those_of_the_two_operations(trained, stand_in):
    x, norm, weights, loras, biases = drawn()

    def total(run, x, norm, loras, biases):
        outs = run(x, norm, weights, loras, biases)
        return jnp.square(outs[0]).sum() + jnp.sin(outs[1]).sum()

    def run(*given):
        return normed_matmul(*given, **LLAMA, fp8=True)

    of = (0, 1, 2, 3) if trained else (0, 2, 3)
    got = jax.jit(jax.grad(lambda *given: total(run, *given), of))(x, norm, loras, biases)
    want = jax.jit(jax.grad(lambda *given: total(lambda *each: plain(*each, **LLAMA), *given), of))(
        x, norm, loras, biases
    )
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype and np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other) > 0


@pytest.mark.full
def test_an_output_that_nothing_reads_has_no_gradient(stand_in):
    x, norm, weights, loras, biases = drawn()

    def total(run, x):
        return jnp.square(run(x)[0]).sum()

    got = jax.grad(lambda x: total(lambda x: normed_matmul(x, norm, weights, loras, biases, **LLAMA, fp8=True), x))(x)
    want = jax.grad(lambda x: total(lambda x: plain(x, norm, weights, loras, biases, **LLAMA), x))(x)
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want) > 0


def test_low_rank_inputs_are_those_that_quant_matmul_takes(stand_in):
    """A backward multiplies the normed x by quant_matmul, with the low-rank inputs that the forward kept."""
    x, norm, weights, loras, biases = drawn()
    with low_rank.collected() as made:
        normed_matmul(x, norm, weights, loras, biases, **LLAMA, fp8=True)
    with low_rank.collected() as wanted:
        plain(x, norm, weights, loras, biases, **LLAMA)
    [[inner, of_rows]] = made
    assert [inner.shape] == [each.shape for each in wanted] == [(12, 7)]
    np.testing.assert_allclose(inner, wanted[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(of_rows, inverse_rms(x, LLAMA["eps"]).reshape(12, 1), rtol=1e-6)
    doubled = (low_rank.OfNormed(2 * inner, of_rows),)
    with low_rank.collected(doubled):
        ours = normed_matmul(x, norm, weights, loras, biases, **LLAMA, fp8=True)
    with low_rank.collected(doubled):
        theirs = plain(x, norm, weights, loras, biases, **LLAMA)
    for one, other in zip(ours, theirs, strict=True):
        assert np.linalg.norm(one - other) <= 1e-4 * np.linalg.norm(other)
    with low_rank.collected() as none:
        normed_matmul(x, norm, weights, (None, None), biases, **LLAMA, fp8=True)
    assert none == []


def test_a_differentiated_run_makes_the_same_low_rank_inputs(stand_in):
    """Also where it is given those of an earlier run, which it returns."""
    x, norm, weights, loras, biases = drawn()

    def run(x, given=None):
        with low_rank.collected(given) as made:
            outs = normed_matmul(x, norm, weights, loras, biases, **LLAMA, fp8=True)
        return outs, tuple(made)

    made = run(x)[1]
    again = jax.vjp(run, x, has_aux=True)[2]
    assert jax.tree.structure(again) == jax.tree.structure(made)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(made), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    given = jax.tree.map(lambda each: 2 * each, made)
    for one, other in zip(
        jax.tree.leaves(jax.vjp(lambda x: run(x, given), x, has_aux=True)[2]), jax.tree.leaves(given), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_without_a_kernel_it_is_the_two_operations_bit_for_bit():
    x, norm, weights, loras, biases = drawn(dtype=jnp.bfloat16)
    outs = normed_matmul(x, norm, weights, loras, biases, **LLAMA, fp8=True)
    for got, want in zip(outs, plain(x, norm, weights, loras, biases, **LLAMA), strict=True):
        np.testing.assert_array_equal(got, want)


def shape(rows: int, size: int, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((rows, size), dtype)


@pytest.mark.parametrize(
    ("x", "rank", "blocks", "reason"),
    [
        (shape(4096, 1024), 64, True, None),
        (shape(4096, 1024), 0, False, None),
        (shape(4096, 1024, jnp.float16), 16, True, "dtype float16"),
        (shape(4096, 1088), 16, True, "rows of 1088 numbers, no multiple of 128"),
        (shape(4096, 1088), 16, False, None),
        (shape(4096, 1056), 16, False, "rows of 1056 numbers, no multiple of 64"),
        (shape(4096, 16512), 16, True, "rows of 16512 numbers, more than 8192"),
        (shape(4096, 1024), 65, True, "rank 65, more than 64"),
    ],
)
def test_what_the_kernel_refuses(x, rank, blocks, reason, hopper):
    assert fp8_normed.refusal(x, rank, blocks) == reason


def test_an_older_gpu_has_no_e4m3(monkeypatch):
    monkeypatch.setattr("jaxtune.pallas.compat._has_jax_triton", lambda: True)
    with targets.compile_for((8, 6)):
        assert fp8_normed.refusal(shape(4096, 1024), 16, True) == "FP8 needs compute capability 8.9, this GPU has 8.6"


@pytest.mark.parametrize(
    ("rows", "blocks", "fp8", "runs"),
    [
        (2048, (TILE, TILE), True, True),
        (2048, (ROW, ROW), True, True),
        (2048, (TILE, ROW), True, False),
        (2048, (TILE, None), True, False),
        (2048, (TILE, TILE), False, False),
        (2047, (TILE, TILE), True, False),
    ],
)
def test_which_calls_the_kernel_runs(rows, blocks, fp8, runs, hopper, monkeypatch):
    """Weights that are decoded need the normed x, and scales of two kinds two roundings of it."""
    ran = []

    def called(x, factors, a, eps, blocks):
        ran.append(a.shape)
        scales = jnp.ones((len(x), x.shape[1] // 128 if blocks else 1))
        return x.astype(jnp.float8_e4m3fn), scales, jnp.ones((len(x), 1)), jnp.ones((len(x), len(a)), x.dtype)

    module = importlib.import_module("jaxtune.pallas.quant_matmul.normed_matmul")
    monkeypatch.setattr(fp8_normed, "normed", called)
    monkeypatch.setattr(module, "_plain", lambda x, norm, weights, *_: (jnp.zeros((rows, 128)),) * 2)

    def run(x, norm, w, v, a, b, d):
        weights = [NF4.encode(w) if block is None else FP8.encode(w, block) for w, block in zip((w, v), blocks)]
        return normed_matmul(x, norm, weights, (LoraWeights(a, b), LoraWeights(a, d)), (None, None), fp8=fp8)

    each = [(rows, SIZE), (SIZE,), (128, SIZE), (128, SIZE), (4, SIZE), (128, 4), (128, 4)]
    found = jax.eval_shape(run, *(jax.ShapeDtypeStruct(each, jnp.bfloat16) for each in each))
    assert [out.shape for out in found] == [(rows, 128)] * 2
    assert ran == ([(8, SIZE)] if runs else [])


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 16, 48])
@pytest.mark.parametrize("block", [TILE, ROW])
def test_the_check_at_first_use_knows_right_from_wrong(rank, block, stand_in, monkeypatch):
    found, right = [], fp8_normed.normed
    monkeypatch.setattr(dispatch, "first_use", lambda *case: found.append(dispatch._difference(case[-1])))

    def of_other_factors(x, factors, *others):
        return right(x, factors * 1.05, *others)

    def of_other_rows(*given):
        codes, scales, of_rows, inner = right(*given)
        return codes, scales, of_rows * 1.05, inner

    for run in (right, of_other_factors, of_other_rows):
        monkeypatch.setattr(fp8_normed, "normed", run)
        jax.clear_caches()
        fp8_product.normed_refusal(shape(4096, SIZE), rank, block == TILE)
    assert found[0] is None and "in result 0" in found[1] and "in result 1" in found[2]
