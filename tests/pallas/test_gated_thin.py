"""An MLP's activation with the thin products of its down projection's adapter: which calls the kernels refuse, and that
gated_matmul, which calls them, is quant_matmul of the activation. The kernels run in Triton's interpreter
(tests/parity/test_triton_gated_thin.py)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.pallas import dispatch, gpu_kernel, targets
from jaxtune.pallas.formats import FP8, NF4
from jaxtune.pallas.formats.fp8 import ROW, TILE
from jaxtune.pallas.gated import (
    ACTIVATIONS,
    gated_thin,
    gated_thin_backward,
    reference,
    thin,
    thin_of_gated,
    thin_triton,
)
from jaxtune.pallas.quant_matmul import LoraWeights, fp8_product, gated_matmul, gated_mlp, low_rank, quant_matmul


@pytest.fixture
def hopper(monkeypatch):
    """Kernels are chosen as on a GPU of Hopper's kind."""
    monkeypatch.setattr("jaxtune.pallas.compat._has_jax_triton", lambda: True)
    with targets.compile_for((9, 0)):
        yield


def shape(tokens: int, size: int, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((tokens, size), dtype)


@pytest.mark.parametrize(
    ("gate", "rank", "activation", "reason"),
    [
        (shape(4096, 1024), 32, "silu", None),
        (shape(4096, 1024, jnp.float16), 1, "gelu_tanh", None),
        (shape(4096, 1024, jnp.float32), 16, "silu", "dtype float32"),
        (shape(4096, 1024), 16, "gelu", "activation gelu"),
        (shape(4096, 1028), 16, "silu", "1028 columns, no multiple of 8"),
        (shape(4096, 1024), 33, "silu", "rank 33, more than 32"),
    ],
)
def test_what_the_kernels_refuse(gate, rank, activation, reason, hopper):
    assert thin_triton.refusal(gate, rank, activation) == reason


@pytest.mark.parametrize(("tokens", "size", "name"), [(2048, 512, "triton"), (2047, 512, ""), (2048, 504, "")])
def test_small_calls_are_left_to_plain_jax(tokens, size, name, hopper, monkeypatch):
    """They are not said to be refused."""
    monkeypatch.setattr(thin_triton, "gated_thin", lambda *given: (given[0],) * (1 + (given[4] == "gated")))
    monkeypatch.setattr(thin_triton, "gated_thin_backward", lambda gate, up, dgated, thin, *_: (gate, up, thin))
    gate, a = jnp.ones((tokens, size), jnp.bfloat16), jnp.ones((4, size))
    jax.eval_shape(lambda gate, a: gated_thin(gate, gate, a, "silu"), gate, a)
    jax.eval_shape(lambda gate, a: thin_of_gated(gate, gate, a, "silu"), gate, a)
    jax.eval_shape(lambda gate: gated_thin_backward(gate, gate, gate, gate[:, :4], "silu"), gate)
    for op in ("gated_thin", "thin_of_gated", "gated_thin_backward"):
        assert dispatch.record[op] == (name or "reference", {})


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.gpu
def test_the_results_are_those_of_plain_jax(dtype, activation):
    gate, up, dgated = (jax.random.normal(jax.random.key(k), (40, 24)).astype(dtype) for k in range(3))
    dinner, a = (
        jax.random.normal(jax.random.key(3), (40, 5)).astype(dtype),
        jax.random.normal(jax.random.key(4), (5, 24)),
    )
    gated, inner = gated_thin(gate, up, a, activation)
    np.testing.assert_array_equal(inner, thin_of_gated(gate, up, a, activation))
    want, pullback = jax.vjp(lambda gate, up: ACTIVATIONS[activation](gate) * up, gate, up)
    np.testing.assert_array_equal(gated, want)
    product = np.asarray(gated, np.float64) @ np.asarray(a.astype(dtype), np.float64).T
    np.testing.assert_allclose(np.float64(inner), product, rtol=jnp.finfo(dtype).eps, atol=1e-5)
    dgate, dup, da = gated_thin_backward(gate, up, dgated, dinner, activation)
    for got, exact in zip((dgate, dup), pullback(dgated), strict=True):
        np.testing.assert_array_equal(got, exact)
    assert inner.dtype == dgate.dtype == dtype and da.dtype == jnp.float32
    np.testing.assert_allclose(
        da, np.asarray(dinner, np.float64).T @ np.asarray(gated, np.float64), rtol=1e-5, atol=1e-5
    )


WEIGHTS = {
    "array": lambda weight: weight,
    "NF4": NF4.encode,
    "FP8": lambda weight: FP8.encode(weight, ROW),
    "FP8 in blocks": lambda weight: FP8.encode(weight, TILE),
}


def drawn(dtype=jnp.float32):
    """(gate, up, a, b, bias, the weight before it is stored)."""
    shapes = (2, 6, 256), (2, 6, 256), (3, 256), (128, 3), (128,), (128, 256)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    gate, up, a, b, bias, weight = (jax.random.normal(key, each) for key, each in zip(keys, shapes, strict=True))
    return gate.astype(dtype), up.astype(dtype), a, b, bias, weight.astype(dtype)


@pytest.mark.full
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("fp8", [True, False])
def test_gated_matmul_is_quant_matmul_of_the_activation(kind, fp8):
    """Of a bias too, and of the weight, where it is an array: outputs and gradients."""
    gate, up, a, b, bias, weight = drawn()
    weight = WEIGHTS[kind](weight)

    def total(written_out, gate, up, a, b, bias, weight):
        lora = LoraWeights(a, b, scale=0.5)
        if written_out:
            [out] = quant_matmul(jax.nn.silu(gate) * up, [weight], [lora], [bias], fp8=fp8)
        else:
            out = gated_matmul(gate, up, weight, lora, bias, activation="silu", fp8=fp8)
        return jnp.square(out).sum(), out

    of = (0, 1, 2, 3, 4, 5)[: 6 if kind == "array" else 5]
    given = gate, up, a, b, bias, weight
    got, want = (
        jax.jit(jax.grad(lambda *given, way=way: total(way, *given), of, has_aux=True))(*given) for way in (False, True)
    )
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype and np.linalg.norm(one - other) <= 1e-6 * np.linalg.norm(other) > 0


def drawn_mlp():
    """(x, a pair (a, b) for each of gate, up and down, their biases), and their weights in FP8 with blocks."""
    shapes = [(2, 6, 144)]
    shapes += [(3, 144), (192, 3), (3, 144), (192, 3), (3, 192), (130, 3), (192,), (192,), (130,)]
    shapes += [(192, 144), (192, 144), (130, 192)]
    drawn = [jax.random.normal(jax.random.key(k), each) for k, each in enumerate(shapes)]
    return (drawn[0], list(zip(drawn[1:7:2], drawn[2:7:2])), drawn[7:10]), [FP8.encode(w, TILE) for w in drawn[10:]]


def test_gated_mlp_has_the_gradients_of_both_products(compiled_in_full):
    given, weights = drawn_mlp()

    def total(joined, x, pairs, biases):
        loras = [LoraWeights(*pair, scale=scale) for pair, scale in zip(pairs, (0.5, 1.0, 2.0), strict=True)]
        gate, up = quant_matmul(x, weights[:2], loras[:2], biases[:2], fp8=True)
        if joined:
            gate, up = jax.lax.stop_gradient((gate, up))
            out = gated_mlp(x, gate, up, weights, loras, biases, activation="silu")
        else:
            out = gated_matmul(gate, up, weights[2], loras[2], biases[2], activation="silu", fp8=True)
        return jnp.square(out).sum(), out

    got, want = (
        jax.jit(jax.grad(lambda *given, way=way: total(way, *given), (0, 1, 2), has_aux=True))(*given)
        for way in (True, False)
    )
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype and np.linalg.norm(one - other) <= 1e-6 * np.linalg.norm(other) > 0


@pytest.mark.full
@pytest.mark.parametrize("wrong", ["weights", "row_scale", "gate"])
def test_what_gated_mlp_cannot_compute_is_refused(wrong):
    (x, pairs, _), weights = drawn_mlp()
    loras = [LoraWeights(*pair) for pair in pairs]
    gate = x[..., :1] * jnp.ones(192)
    if wrong == "weights":
        weights[1] = FP8.encode(weights[1].decode(jnp.float32), ROW)
    elif wrong == "row_scale":
        loras[1] = LoraWeights(*pairs[1], row_scale=jnp.ones(192))
    else:
        gate = gate.astype(jnp.bfloat16)
    with pytest.raises((TypeError, ValueError), match="gated_mlp: "):
        gated_mlp(x, gate, gate, weights, loras, activation="silu")


def test_gated_matmul_through_the_kernel_of_the_activation_s_backward():
    """In bfloat16, whose roundings the two make at other places."""
    gate, up, a, b, _, weight = drawn(jnp.bfloat16)

    def total(gate, up, a, b):
        out = gated_matmul(gate, up, weight, LoraWeights(a, b), activation="silu")
        return jnp.square(out.astype(jnp.float32)).sum()

    with gpu_kernel.interpreted():
        got = jax.grad(total, (0, 1, 2, 3))(gate, up, a, b)
    assert dispatch.record["gated_backward"] == ("mosaic", {})
    for one, other in zip(got, jax.grad(total, (0, 1, 2, 3))(gate, up, a, b), strict=True):
        one, other = np.float32(one), np.float32(other)
        assert np.linalg.norm(one - other) <= 0.01 * np.linalg.norm(other) > 0


def rounded_gradients(gate, up, dgated, dinner, inners, bs, activation, shape=None):
    """thin_triton.rounded_gradients in plain JAX."""
    found = reference.gated_thin_backward(gate, up, dgated, dinner, activation)
    *gradients, da = jax.lax.optimization_barrier(found)
    pairs = [reference_pair(*each) for each in zip(gradients, bs, inners, strict=True)]
    thins, dbs = zip(*pairs, strict=True)
    coded = fp8_product.side_by_side(gradients, None, True, "reference")
    return coded, jnp.concatenate(thins, axis=1), da, list(dbs)


def reference_pair(dout, b, inner):
    b = b.astype(dout.dtype)
    return reference.thin_product(dout, b, (1, 0), dout.dtype), reference.thin_product(dout, inner, (0, 0), jnp.float32)


@pytest.mark.parametrize("scales", [(0.5, 1.0, 2.0), (0.5, 0.5, 2.0)])
@pytest.mark.parametrize("with_biases", [False, True])
def test_gated_mlp_takes_what_the_kernel_has_rounded(scales, with_biases, monkeypatch, compiled_in_full):
    """Where no bias needs the gradients themselves; its results are those without the kernel. The adapters' ranks
    differ."""
    (x, pairs, biases), weights = drawn_mlp()
    pairs[1] = pairs[1][0][:2], pairs[1][1][:, :2]
    biases = biases if with_biases else [None] * 3
    gate, up = (jax.random.normal(jax.random.key(k), (2, 6, 192)) for k in (20, 21))
    calls = []

    def total(x, pairs):
        loras = [LoraWeights(*pair, scale=scale) for pair, scale in zip(pairs, scales, strict=True)]
        return jnp.square(gated_mlp(x, gate, up, weights, loras, biases, activation="silu")).sum()

    def run(*given):
        calls.append(len(given))
        return rounded_gradients(*given)

    want = jax.jit(jax.grad(total, (0, 1)))(x, pairs)
    rounds = fp8_product._first_gradients  # not what the forward rounds
    monkeypatch.setattr(fp8_product, "_rounds_gated", lambda op, first, *others: first is rounds and others[3])
    monkeypatch.setattr(thin, "rounded_gradients", run)
    got = jax.jit(jax.grad(lambda *given: total(*given), (0, 1)))(x, pairs)
    assert len(calls) == (0 if with_biases else 1)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype and np.linalg.norm(one - other) <= 1e-6 * np.linalg.norm(other) > 0


@pytest.mark.parametrize("check", ["_first_gated", "_first_gradients"])
def test_the_checks_of_what_is_rounded_compare_with_e4m3(check, monkeypatch, compiled_in_full):
    """XLA leaves out a conversion to e4m3 and back in one program. What the kernels compute is that of plain JAX here;
    numbers that are not rounded would differ by a fiftieth."""

    def forward(gate, up, a, activation, result):
        x, inner = reference.gated_thin(*(each.astype(jnp.float32) for each in (gate, up, a)), activation)
        return *fp8_product.rounded(jax.lax.optimization_barrier(x.astype(gate.dtype)), True), inner

    found = []
    monkeypatch.setattr(thin_triton, "gated_thin", forward)
    monkeypatch.setattr(thin_triton, "gated_thin_backward", reference.gated_thin_backward)
    monkeypatch.setattr(thin_triton, "rounded_gradients", rounded_gradients)
    monkeypatch.setattr(dispatch, "first_use", lambda op, name, call, compare: found.append(compare()))
    getattr(fp8_product, check)(jnp.dtype(jnp.bfloat16), 16, "silu")
    [(got, want)] = found
    place = 0 if check == "_first_gated" else -1
    np.testing.assert_array_equal(got[place], want[place])
    for one, other in zip(got, want, strict=True):
        one, other = np.float32(one), np.float32(other)
        assert np.linalg.norm(one - other) <= 0.01 * np.linalg.norm(other)


def test_a_run_that_is_given_low_rank_inputs_does_not_compute_them(monkeypatch):
    gate, up, a, b, _, weight = drawn()

    def run():
        return gated_matmul(gate, up, weight, LoraWeights(a, b), activation="silu")

    with low_rank.collected() as made:
        out = run()
    assert [jnp.shape(each) for each in made] == [(12, 3)]
    monkeypatch.setattr(thin, "reference", None)
    with low_rank.collected(tuple(made)):
        again = run()
    np.testing.assert_array_equal(out, again)
