"""linear_top_k and linear_top_k_divergence against whole logits, and that whole logits never exist."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.pallas.linear_cross_entropy import linear_divergence, linear_top_k, linear_top_k_divergence
from tests.pallas.test_linear_divergence import DIM, LENGTH, ROWS, VOCAB, biggest, operands, with_gradients

CASES = {
    "forward": dict(beta=0.0),
    "reverse": dict(beta=1.0),
    "Jensen-Shannon": dict(beta=0.3, temperature=1.3),
    "a soft cap": dict(beta=0.3, soft_cap=3.0, logit_scale=0.5),
}


def stored(k: int, temperature: float = 1.0):
    _, _, teacher_hidden, teacher_head, _ = operands()
    return linear_top_k(teacher_hidden, teacher_head, k=k, temperature=temperature, chunk_tokens=10)


def merged(own, others, ids, beta: float):
    """The divergence of one pair of distributions float[V] over the tokens `ids` and the bucket of all others."""
    rest = np.setdiff1d(np.arange(len(own)), ids)
    outcomes = [*([token] for token in ids), *([rest] if rest.size else [])]
    q, p = (jnp.stack([each[jnp.asarray(outcome)].sum() for outcome in outcomes]) for each in (own, others))
    m = beta * p + (1.0 - beta) * q

    def kl(one, other):
        return (one * jnp.log(one / other)).sum()

    return kl(p, q) if beta == 0 else kl(q, p) if beta == 1 else beta * kl(p, m) + (1.0 - beta) * kl(q, m)


@pytest.mark.parametrize("chunk_tokens", [None, 10])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.gpu
def test_with_the_whole_vocabulary_it_is_the_divergence_of_both_models(name, chunk_tokens):
    options = CASES[name]
    hidden, head, teacher_hidden, teacher_head, weights = operands()
    ids, log_probs = stored(VOCAB, options.get("temperature", 1.0))
    function = functools.partial(linear_top_k_divergence, chunk_tokens=chunk_tokens, **options)
    got, gradients = with_gradients(lambda h, w, s: function(h, w, ids, log_probs, s), (hidden, head, weights))
    whole = functools.partial(linear_divergence, **options)
    want, expected = with_gradients(
        lambda h, w, s: whole(h, w, teacher_hidden, teacher_head, s), (hidden, head, weights)
    )
    for one, other in zip((*got, *gradients), (*want, *expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("beta", [0.0, 1.0, 0.3])
@pytest.mark.gpu
def test_tokens_that_are_not_stored_are_one_outcome(beta):
    hidden, head, teacher_hidden, teacher_head, weights = operands()
    flat = 3.0  # a temperature at which buckets are not so small that rounding of the stored sum shows
    ids, log_probs = stored(7, flat)
    ids = np.array(ids)
    ids[0, 0, 5:] = -1  # a distribution with fewer tokens than the others
    others = jax.nn.softmax(jnp.einsum("btd,vd->btv", teacher_hidden, teacher_head, precision="highest") / flat)

    def fused(hidden, head, weights):
        return linear_top_k_divergence(
            hidden, head, jnp.asarray(ids), log_probs, weights, beta=beta, temperature=flat, chunk_tokens=10
        )

    def dense(hidden, head, weights):
        own = jax.nn.softmax(jnp.einsum("btd,vd->btv", hidden, head, precision="highest") / flat)
        losses = jnp.stack(
            [
                jnp.stack([merged(own[b, t], others[b, t], ids[b, t][ids[b, t] >= 0], beta) for t in range(LENGTH)])
                for b in range(ROWS)
            ]
        )
        return (weights * losses).sum(), losses

    (got, losses, _), gradients = with_gradients(fused, (hidden, head, weights))
    (want, expected), wanted = with_gradients(dense, (hidden, head, weights))
    for one, other in zip((got, losses, *gradients), (want, expected, *wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
    arguments = (hidden, head, teacher_hidden, teacher_head, weights)
    whole = linear_divergence(*arguments, beta=beta, temperature=flat)[1]
    assert (losses <= whole + 1e-5).all() and float((whole - losses).max()) > 0.01  # a lower bound


@pytest.mark.parametrize("vocab, k", [(1000, 3), (997, 8), (64, 4), (50, 50)])
@pytest.mark.gpu
def test_the_largest_are_found_in_groups(vocab, k):
    """997 is filled up in 16 bits and in the last group, of which no token may be found."""
    for dtype in (jnp.float32, jnp.bfloat16):
        hidden, head, *_ = operands(dtype, vocab=vocab)
        ids, log_probs = linear_top_k(-hidden, head, k=k, chunk_tokens=10)
        logits = jnp.einsum("btd,vd->btv", -hidden, head, precision="highest", preferred_element_type=jnp.float32)
        want, expected = jax.lax.top_k(jax.nn.log_softmax(logits), k)
        np.testing.assert_allclose(log_probs, want, rtol=1e-4, atol=1e-4)
        if dtype == jnp.float32:  # in 16 bits logits may be equal
            np.testing.assert_array_equal(ids, expected)
        assert int(ids.max()) < vocab and (np.diff(np.sort(ids, -1)) > 0).all()


def test_a_case_by_hand():
    """The student's probabilities are 1/2, 1/4, 1/8, 1/8; the teacher's first two 3/4 and 1/8, and 1/8 for the rest."""
    head = jnp.log(jnp.asarray([[1 / 2], [1 / 4], [1 / 8], [1 / 8]], jnp.float32))
    ids, log_probs = jnp.asarray([[[0, 1]]], jnp.int32), jnp.log(jnp.asarray([[[3 / 4, 1 / 8]]], jnp.float32))

    def found(beta):
        one = jnp.ones((1, 1, 1))
        return float(linear_top_k_divergence(one, head, ids, log_probs, jnp.ones((1, 1)), beta=beta)[0])

    log = np.log
    assert found(0.0) == pytest.approx(3 / 4 * log(3 / 2) + 1 / 8 * log(1 / 2) + 1 / 8 * log(1 / 2), rel=1e-5)
    assert found(1.0) == pytest.approx(1 / 2 * log(2 / 3) + 1 / 4 * log(2) + 1 / 4 * log(2), rel=1e-5)
    teacher, student = np.array([3 / 4, 1 / 8, 1 / 8]), np.array([1 / 2, 1 / 4, 1 / 4])
    middle = (teacher + student) / 2
    expected = ((teacher * log(teacher / middle)).sum() + (student * log(student / middle)).sum()) / 2
    assert found(0.5) == pytest.approx(expected, rel=1e-5)


def test_a_bucket_without_probability_stays_finite():
    hidden, head, _, _, weights = operands()
    ids, log_probs = jnp.zeros((ROWS, LENGTH, 1), jnp.int32), jnp.zeros((ROWS, LENGTH, 1))  # all on token 0
    for beta in (0.0, 1.0, 0.5):
        results, gradients = with_gradients(
            lambda h, w: linear_top_k_divergence(h, w, ids, log_probs, weights, beta=beta),  # noqa: B023
            (hidden, head),
        )
        assert all(np.isfinite(each).all() for each in (*results, *gradients))


def test_heads_that_are_filled_up_add_no_token():
    arguments = operands(jnp.bfloat16)  # filled up to 56 rows
    hidden, head, _, _, weights = arguments
    ids, log_probs = linear_top_k(hidden, head, k=VOCAB)
    assert int(ids.max()) == VOCAB - 1
    np.testing.assert_allclose(np.exp(log_probs).sum(-1), 1.0, rtol=1e-5)
    losses = linear_top_k_divergence(hidden, head, ids, log_probs, weights)[1]
    np.testing.assert_allclose(losses, 0.0, atol=1e-5)  # of the model from itself


def test_logits_of_all_tokens_do_not_exist():
    rows, length, vocab, chunk, k = 2, 64, 4096, 16, 8
    shapes = [(rows, length, DIM), (vocab, DIM), (rows, length, k), (rows, length, k), (rows, length)]
    dtypes = [jnp.float32, jnp.float32, jnp.int32, jnp.float32, jnp.float32]
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    step = jax.value_and_grad(lambda *a: linear_top_k_divergence(*a, beta=0.5, chunk_tokens=chunk)[0], (0, 1))
    assert biggest(jax.make_jaxpr(step)(*arrays).jaxpr) <= chunk * vocab
    find = functools.partial(linear_top_k, k=k, chunk_tokens=chunk)
    assert biggest(jax.make_jaxpr(find)(*arrays[:2]).jaxpr) <= chunk * (vocab + 32)  # with the filling of a group


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(beta=1.5), "beta"),
        (dict(temperature=0.0), "temperature"),
        (dict(teacher_ids=jnp.zeros((ROWS, LENGTH, VOCAB + 1), jnp.int32)), "k"),
    ],
)
def test_what_cannot_be_is_named(change, message):
    hidden, head, _, _, weights = operands()
    ids, log_probs = jnp.zeros((ROWS, LENGTH, 3), jnp.int32), jnp.zeros((ROWS, LENGTH, 3))
    given = dict(hidden=hidden, head=head, teacher_ids=ids, teacher_log_probs=log_probs, weights=weights)
    with pytest.raises(ValueError, match=message):
        linear_top_k_divergence(**(given | change))
    with pytest.raises(ValueError, match="linear_top_k: k = 51: the vocabulary has only 50 tokens"):
        linear_top_k(hidden, head, k=VOCAB + 1)
