"""The gated delta rule and the short convolution: every implementation against the definition, token by token, at every
place of a border, forward and backward."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.pallas import compat
from jaxtune.pallas.attention import packed_layout
from jaxtune.pallas.delta_rule import (
    delta_rule_chunk,
    delta_rule_state,
    delta_rule_step,
    gated_delta_rule,
    short_convolution,
    short_convolution_step,
)
from jaxtune.pallas.delta_rule.chunked import CHUNK, unit_lower_inverse

# For a derivative through a scan of many steps. The tests compile with XLA's older code generator (tests/conftest.py),
# which copies the values of all steps for each of them: 225 s in place of 1.1 s with the newer one, over 1,024 tokens.
LONG_SCAN = {"xla_backend_extra_options": ""}

OTHERS = ["chunked"]  # in float32
KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 16


def rows(*rows: tuple[int, ...]) -> np.ndarray:
    """int32[B, T] of rows of documents of these lengths; a negative length is padding."""
    ids = [[np.full(abs(n), number if n > 0 else 0) for number, n in enumerate(row, 1)] for row in rows]
    return np.stack([np.concatenate(row) for row in ids]).astype(np.int32)


CASES = {
    "one token": rows((1,), (-1,)),
    "less than a chunk": rows((23,), (1, 2, 20), (-3, 20)),
    "one more than a chunk": rows((CHUNK + 1,), (CHUNK, 1), (1,) * (CHUNK + 1)),
    "four chunks": rows(
        (256,),
        (CHUNK, CHUNK, 2 * CHUNK),
        (CHUNK - 1, CHUNK + 2, CHUNK - 1, CHUNK),
        (CHUNK + 1, CHUNK - 2, CHUNK + 1, CHUNK),
        (5, 20, 1, 100, 3, 127),
        (1,) * 256,
        (10, -3, 60, -59, 68, -56),
        (-70, 40, -146),
    ),
}


def draw(count: int, length: int, dtype=jnp.float32, seed: int = 0, dims=(KEY_DIM, VALUE_DIM)):
    """query, key, value, decay, beta; some tokens forget nearly all, and some keys are alike."""
    keys = jax.random.split(jax.random.key(seed), 6)
    query = jax.random.normal(keys[0], (count, length, KEY_HEADS, dims[0]))
    key = jax.random.normal(keys[1], (count, length, KEY_HEADS, dims[0])) + 1.0
    value = jax.random.normal(keys[2], (count, length, HEADS, dims[1]))
    decay = -jnp.exp(2.0 * jax.random.normal(keys[3], (count, length, HEADS)) - 2.0)
    decay = jnp.where(jax.random.uniform(keys[5], decay.shape) < 0.03, -300.0, decay)
    beta = jax.nn.sigmoid(2.0 * jax.random.normal(keys[4], (count, length, HEADS)))
    return *(x.astype(dtype) for x in (query, key, value)), decay, beta


@functools.partial(jax.jit, static_argnums=0, compiler_options=LONG_SCAN)
def value_and_gradients(name, arrays, ids):
    layout = packed_layout(ids.shape, ids)

    def total(arrays):
        out = gated_delta_rule(*arrays, layout, implementation=name)
        probe = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return (out.astype(jnp.float32) * probe).sum(), out

    return jax.value_and_grad(total, has_aux=True)(arrays)


def close(got, want, share):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(one, other, atol=share * max(1.0, np.abs(other).max()), rtol=0)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.gpu
def test_is_the_definition(name, case):
    ids = CASES[case]
    arrays = draw(*ids.shape)
    got, want = (value_and_gradients(each, arrays, ids) for each in (name, "reference"))
    close(got[0][1], want[0][1], 2e-5)
    close(got[1], want[1], 2e-5)
    padding = ids == 0
    for array in (got[0][1], *got[1]):
        assert not np.asarray(array)[padding].any()


@pytest.mark.full
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.gpu
def test_long_rows_run_in_groups_and_give_the_same_bits_again(name):
    """4,096 tokens in documents of all lengths; beside another row, so that there are several groups of chunks."""
    lengths = np.random.default_rng(0).integers(1, 700, 64)
    lengths = lengths[: np.searchsorted(np.cumsum(lengths), 4096)]
    row = (*lengths, 4096 - lengths.sum())
    ids = rows(tuple(map(int, row)), (4096,))
    arrays = draw(*ids.shape)
    got = value_and_gradients(name, arrays, ids)
    want = value_and_gradients("reference", arrays, ids)
    close(got[0][1], want[0][1], 2e-5)
    close(got[1], want[1], 1e-4)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(value_and_gradients(name, arrays, ids)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.gpu
def test_a_packed_document_is_the_document_alone(name):
    """Whatever is before and after it, and wherever in a chunk it begins; nothing of the others is in its gradients."""
    places = ((0, 30), (63, 5), (64, 65), (100, 90))
    packed = rows(*(tuple(n for n in (begin, size, 200 - begin - size) if n) for begin, size in places))
    inside = np.zeros(packed.shape, bool)
    for row, (begin, size) in enumerate(places):
        inside[row, begin : begin + size] = True
    arrays = draw(*packed.shape)
    alone = [np.zeros_like(x) for x in arrays]
    for one, x in zip(alone, arrays, strict=True):
        for row, (begin, size) in enumerate(places):
            one[row, :size] = x[row, begin : begin + size]
    first = np.arange(200) < np.array(places)[:, 1:]

    @jax.jit
    def run(arrays, ids, counted):
        def total(arrays):
            out = gated_delta_rule(*arrays, packed_layout(ids.shape, ids), implementation=name)
            return (out**2).sum(where=counted[..., None, None]), out

        return jax.value_and_grad(total, has_aux=True)(arrays)

    (_, got), grads = run(arrays, packed, inside)
    (_, want), want_grads = run(alone, first.astype(np.int32), first)
    close([x[inside] for x in (got, *grads)], [x[first] for x in (want, *want_grads)], 1e-5)
    assert not any(np.asarray(x)[~inside].any() for x in grads)


# Triton's kernels are run here on a GPU, and by Triton's interpreter in tests/parity.
KERNELS = ["triton"] if compat.triton_refusal() is None else []
NARROW = [
    ("chunked", jnp.bfloat16, (8, 16), "four chunks"),
    *itertools.product(KERNELS, [jnp.bfloat16, jnp.float16], [(128, 128)], CASES),
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "dtype", "dims", "case"), NARROW)
@pytest.mark.gpu
def test_sixteen_bits(name, dtype, dims, case):
    """Against the definition in float32, as far as rounding factors of products lets it be."""
    ids = CASES[case]
    arrays = draw(*ids.shape, dtype=dtype, dims=dims)
    got = value_and_gradients(name, arrays, ids)
    want = value_and_gradients("reference", [x.astype(jnp.float32) for x in arrays], ids)
    for one, other, like in zip((got[0][1], *got[1]), (want[0][1], *want[1]), (arrays[2], *arrays), strict=True):
        assert one.dtype == like.dtype
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        # 1e-8: the decay of a document's only token has no effect, and its gradient is a difference of equal sums.
        assert np.linalg.norm(one - other) <= 2 * jnp.finfo(dtype).eps * np.linalg.norm(other) + 1e-8
        assert not one[ids == 0].any()
    again = value_and_gradients(name, arrays, ids)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
def test_keys_that_are_all_alike_do_not_grow_in_the_inverse():
    """1 + lower of ones: its inverse has ones and minus ones, and its powers have 10^17."""
    lower = jnp.tril(jnp.ones((CHUNK, CHUNK)), -1)
    inverse = unit_lower_inverse(lower, jax.lax.Precision.HIGHEST)
    np.testing.assert_allclose(inverse, np.eye(CHUNK) - np.eye(CHUNK, k=-1), atol=1e-6)


@pytest.mark.gpu
def test_steps_continue_what_a_row_has_written():
    lengths, length = np.array([3, 70, 0]), 90
    arrays = draw(3, length)
    want = gated_delta_rule(*arrays, packed_layout((3, length)))
    state = jax.jit(delta_rule_state)(*arrays[1:], lengths)
    assert not np.asarray(state[2]).any()
    step = jax.jit(delta_rule_step)
    for number in range(5):
        at = lengths + number
        one = [np.asarray(x)[np.arange(3), at][:, None] for x in arrays]
        out, state = step(*one, state)
        np.testing.assert_allclose(out[:, 0], np.asarray(want)[np.arange(3), at], atol=1e-5)
    # And the same tokens as one chunk.
    places = np.asarray(lengths)[:, None] + np.arange(5)
    some = [np.asarray(x)[np.arange(3)[:, None], places] for x in arrays]
    out, after = delta_rule_chunk(*some, delta_rule_state(*arrays[1:], lengths))
    np.testing.assert_allclose(out, np.asarray(want)[np.arange(3)[:, None], places], atol=1e-5)
    np.testing.assert_allclose(after, state, atol=1e-5)


@pytest.mark.parametrize("taps", [1, 4])
@pytest.mark.gpu
def test_the_convolution_sees_its_own_document_only(taps):
    """Against a loop in numpy; the gradients by finite differences of it."""
    ids = rows((1, 1, 2, 3, 5, -2, 4), (-1, 9, 8))
    keys = jax.random.split(jax.random.key(0), 3)
    x, probe = (jax.random.normal(key, (*ids.shape, 3)) for key in keys[:2])
    weight = jax.random.normal(keys[2], (3, taps))

    def total(x, weight):
        return (short_convolution(x, weight, packed_layout(ids.shape, ids)) * probe).sum()

    def plainly(x, weight):
        out = np.zeros(x.shape)
        for row, t in zip(*np.nonzero(ids)):
            for back in range(taps):
                if t - back < 0 or ids[row, t - back] != ids[row, t]:
                    break
                out[row, t] += weight[:, taps - 1 - back] * x[row, t - back]
        return out / (1 + np.exp(-out)) * (ids > 0)[..., None]

    layout = packed_layout(ids.shape, ids)
    wide = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    np.testing.assert_allclose(short_convolution(x, weight, layout), plainly(*wide), atol=1e-6)
    for argument, gradient in enumerate(jax.grad(total, (0, 1))(x, weight)):
        want = np.zeros(gradient.shape)
        for place in np.ndindex(*gradient.shape):
            sides = []
            for move in (1e-5, -1e-5):
                moved = [each.copy() for each in wide]
                moved[argument][place] += move
                sides.append((plainly(*moved) * np.asarray(probe)).sum())
            want[place] = (sides[0] - sides[1]) / 2e-5
        np.testing.assert_allclose(gradient, want, atol=1e-4)


@pytest.mark.gpu
def test_the_convolution_goes_on_by_steps():
    x, weight = jax.random.normal(jax.random.key(0), (2, 9, 3)), jax.random.normal(jax.random.key(1), (3, 4))
    want, window = short_convolution(x, weight, packed_layout((2, 9))), jnp.zeros((2, 3, 3))
    for t in range(9):
        out, window = short_convolution_step(x[:, t : t + 1], weight, window)
        np.testing.assert_allclose(out, want[:, t : t + 1], atol=1e-6)
