"""Where the backwards of quant_matmul and gated_matmul take what fp8_gradients.rounded_pair returns, and that their
results are then the same. The kernel runs in Triton's interpreter (tests/parity/test_triton_fp8_gradients.py)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.pallas import dispatch, targets
from jaxtune.pallas.formats import FP8
from jaxtune.pallas.formats.fp8 import ROW, TILE
from jaxtune.pallas.quant_matmul import LoraWeights, fp8_gradients, fp8_product, gated_matmul, quant_matmul
from jaxtune.pallas.thin_pair import reference

OUTS, RANKS, SCALES = (256, 128, 128), (3, 2, 3), (0.5, 2.0, 1.0)


def rounded_pair(calls: list, douts, inner, bs, shape):
    """fp8_gradients.rounded_pair in plain JAX; the shapes of its arguments are appended to `calls`."""
    calls.append(([each.shape for each in douts], inner.shape, [each.shape for each in bs]))
    coded = fp8_product.side_by_side(douts, None, True, "reference")
    at = np.cumsum([b.shape[1] for b in bs])[:-1]
    pairs = [reference.thin_pair(*each) for each in zip(douts, bs, jnp.split(inner, at, axis=1), strict=True)]
    thins, dbs = zip(*pairs, strict=True)
    return coded, jnp.concatenate(thins, axis=1), [db.astype(jnp.float32) for db in dbs]


@pytest.fixture
def calls(monkeypatch):
    """Calls of the kernel, in whose place plain JAX runs, for any number of tokens."""
    found: list = []
    monkeypatch.setattr(fp8_gradients, "refusal", lambda *call: None)
    monkeypatch.setattr(fp8_product, "_first_rounding", lambda *call: None)
    monkeypatch.setattr(fp8_gradients, "rounded_pair", lambda *given: rounded_pair(found, *given))
    monkeypatch.setattr(fp8_product.thin, "is_large", lambda *call: True)
    return found


def drawn():
    """(x, a pair (a, b) for each output, biases, the weights before they are stored)."""
    keys = iter(jax.random.split(jax.random.key(0), 20))
    x = jax.random.normal(next(keys), (2, 6, 144))
    pairs = [
        (jax.random.normal(next(keys), (rank, 144)), jax.random.normal(next(keys), (out, rank)))
        for rank, out in zip(RANKS, OUTS, strict=True)
    ]
    biases = [jax.random.normal(next(keys), (out,)) for out in OUTS]
    return x, pairs, biases, [jax.random.normal(next(keys), (out, 144)) for out in OUTS]


def gradients(blocks, without: int | None = None, drops: bool = False, implementation: str | None = None):
    """The gradients of x, of the adapters and of the biases. blocks: of each weight; without: the number of an output
    that has no adapter; drops: whether the adapters' input has dropout."""
    x, pairs, biases, weights = drawn()
    stored = [FP8.encode(weight, block) for weight, block in zip(weights, blocks, strict=True)]
    options = dict(dropout_rate=0.3, dropout_key=jax.random.key(1)) if drops else {}

    def total(x, pairs, biases):
        loras = [
            None if index == without else LoraWeights(*pair, scale=scale)
            for index, (pair, scale) in enumerate(zip(pairs, SCALES, strict=True))
        ]
        outs = quant_matmul(x, stored, loras, biases, fp8=True, implementation=implementation, **options)
        return sum(jnp.square(out).sum() for out in outs)

    return jax.jit(jax.grad(total, (0, 1, 2)))(x, pairs, biases)


def same(got, want) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype and np.linalg.norm(one - other) <= 1e-6 * np.linalg.norm(other)
    assert all(np.linalg.norm(each) > 0 for each in jax.tree.leaves(want)[:1])


@pytest.mark.parametrize("drops", [False, True])
def test_weights_that_share_x_take_what_the_kernel_has_rounded(drops, calls, compiled_in_full, monkeypatch):
    """By one call for all of them, each adapter with its own scale and rank, and with biases too."""
    with monkeypatch.context() as patch:
        patch.setattr(fp8_product.thin, "is_large", lambda *call: False)
        want = gradients([TILE] * 3, drops=drops)
    assert not calls
    got = gradients([TILE] * 3, drops=drops)
    assert calls == [([(12, out) for out in OUTS], (12, sum(RANKS)), list(zip(OUTS, RANKS, strict=True)))]
    assert dispatch.record["gradients_to_fp8"] == ("triton", {})
    same(got, want)


@pytest.mark.parametrize(
    "call",
    [
        {"blocks": [ROW] * 3},
        {"blocks": [TILE, ROW, TILE]},
        {"blocks": [TILE] * 3, "without": 1},
        {"blocks": [TILE] * 3, "implementation": "reference"},
    ],
)
def test_other_calls_are_left_as_they_are(call, calls):
    """Scales of rows, of two kinds, an output without an adapter, and where plain JAX is requested."""
    gradients(**call)
    assert not calls


def test_gated_matmul_takes_them_too(calls, compiled_in_full, monkeypatch):
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(2, 6, 256), (2, 6, 256), (3, 256), (128, 3)]
    given = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False)]
    weight = FP8.encode(jax.random.normal(keys[4], (128, 256)), TILE)

    def run():
        def total(gate, up, a, b):
            lora = LoraWeights(a, b, scale=0.5)
            return jnp.square(gated_matmul(gate, up, weight, lora, activation="silu", fp8=True)).sum()

        return jax.jit(jax.grad(total, (0, 1, 2, 3)))(*given)

    with monkeypatch.context() as patch:
        patch.setattr(fp8_product.thin, "is_large", lambda *call: False)
        want = run()
    assert not calls
    got = run()
    assert calls == [([(12, 128)], (12, 3), [(128, 3)])]
    same(got, want)


@pytest.mark.parametrize(
    ("widths", "ranks", "dtype", "reason"),
    [
        ((1024, 512), (16, 32), jnp.bfloat16, None),
        ((1024, 520), (16, 16), jnp.bfloat16, "an output of 520 numbers, no multiple of 128"),
        ((1024, 512), (16, 33), jnp.bfloat16, "rank 33, more than 32"),
        ((128,) * 5, (16,) * 5, jnp.bfloat16, "5 arrays side by side, more than 4"),
        ((1024,), (16,), jnp.float32, "dtype float32"),
    ],
)
def test_what_the_kernel_refuses(widths, ranks, dtype, reason, monkeypatch):
    monkeypatch.setattr("jaxtune.pallas.compat._has_jax_triton", lambda: True)
    with targets.compile_for((9, 0)):
        assert fp8_gradients.refusal(widths, ranks, dtype) == reason
    with targets.compile_for((8, 0)):
        assert "compute capability 8.9" in str(fp8_gradients.refusal(widths, ranks, dtype))
