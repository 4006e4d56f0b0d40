"""linear_cross_entropy against whole logits: value, gradients, chunks; and that whole logits never exist."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.pallas import targets
from jaxtune.pallas.linear_cross_entropy import (
    chunk_length,
    fills_up,
    linear_cross_entropy,
    linear_log_probs,
    linear_token_losses,
    reference,
)

ROWS, LENGTH, DIM, VOCAB = 2, 13, 16, 50


def operands(dtype=jnp.float32, seed=0):
    draw = np.random.default_rng(seed)
    hidden = jnp.asarray(draw.standard_normal((ROWS, LENGTH, DIM)), dtype)
    head = jnp.asarray(draw.standard_normal((VOCAB, DIM)), dtype)
    targets = jnp.asarray(draw.integers(0, VOCAB, (ROWS, LENGTH)), jnp.int32)
    weights = jnp.asarray(draw.choice([0.0, 1.0, 0.25], (ROWS, LENGTH)), jnp.float32)
    return hidden, head, targets, weights


def dense(hidden, head, targets, weights, soft_cap=None, logit_scale=1.0, label_smoothing=0.0, z_loss=0.0):
    """float64 (loss sum, dhidden, dhead), from whole logits."""
    hidden, head, weights = (np.asarray(a, np.float64) for a in (hidden, head, weights))
    raw = logit_scale * hidden @ head.T
    logits = raw if soft_cap is None else soft_cap * np.tanh(raw / soft_cap)
    exponential = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities = exponential / exponential.sum(-1, keepdims=True)
    hit = np.eye(head.shape[0])[np.asarray(targets)] * (1 - label_smoothing) + label_smoothing / head.shape[0]
    lse = logits.max(-1) + np.log(exponential.sum(-1))
    loss = (weights * (-(hit * np.log(probabilities)).sum(-1) + z_loss * lse**2)).sum()
    dlogits = (probabilities * (1 + 2 * z_loss * lse[..., None]) - hit) * weights[..., None] * logit_scale
    if soft_cap is not None:
        dlogits = dlogits * (1 - np.tanh(raw / soft_cap) ** 2)
    return loss, dlogits @ head, np.einsum("btv,btd->vd", dlogits, hidden)


def value_and_gradients(arguments, dloss=1.0, **options):
    """(loss sum, count, dhidden, dhead), the loss scaled by dloss on the way back."""

    def scaled(hidden, head):
        loss, count = linear_cross_entropy(hidden, head, *arguments[2:], **options)
        return dloss * loss, (loss, count)

    gradients, (loss, count) = jax.grad(scaled, (0, 1), has_aux=True)(*arguments[:2])
    return loss, count, *gradients


OPTIONS = [
    {},
    dict(soft_cap=2.0),
    dict(logit_scale=0.3),
    dict(soft_cap=1.5, logit_scale=2.0),
    dict(label_smoothing=0.1),
    dict(z_loss=1e-2),
    dict(soft_cap=3.0, logit_scale=0.5, label_smoothing=0.3, z_loss=1e-3),
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chunk_tokens", [None, 1, 10, 2 * LENGTH])
@pytest.mark.parametrize("dtype, error", [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])  # 16 bits: the head is filled up
@pytest.mark.gpu
def test_value_and_gradients(options, chunk_tokens, dtype, error):
    arguments = operands(dtype)
    loss, count, dhidden, dhead = value_and_gradients(arguments, chunk_tokens=chunk_tokens, **options)
    want_loss, want_dhidden, want_dhead = dense(*arguments, **options)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    assert float(count) == float(arguments[3].sum())
    assert (dhidden.dtype, dhead.dtype) == (dtype, dtype)
    np.testing.assert_allclose(dhidden.astype(jnp.float32), want_dhidden, rtol=error, atol=error)
    np.testing.assert_allclose(dhead.astype(jnp.float32), want_dhead, rtol=error, atol=error)
    only_value, _ = linear_cross_entropy(*arguments, chunk_tokens=chunk_tokens, **options)
    np.testing.assert_allclose(only_value, loss, rtol=1e-7)


def test_gradients_follow_the_cotangent():
    arguments = operands()
    one, scaled = value_and_gradients(arguments), value_and_gradients(arguments, dloss=4096.0)
    assert one[0] == scaled[0]
    for plain, big in zip(one[2:], scaled[2:], strict=True):
        np.testing.assert_array_equal(4096.0 * plain, big)  # a power of two: no rounding


@pytest.mark.gpu
def test_hidden_gradients_do_not_depend_on_the_chunk():
    arguments = operands()
    whole = value_and_gradients(arguments)
    for chunk_tokens in (2, 6, 18):
        chunked = value_and_gradients(arguments, chunk_tokens=chunk_tokens)
        np.testing.assert_allclose(chunked[0], whole[0], rtol=2e-7)  # one sum over the same terms
        np.testing.assert_allclose(chunked[2], whole[2], rtol=1e-6, atol=1e-7)


def test_a_token_of_weight_zero_has_no_part():
    hidden, head, targets, weights = operands()
    off = np.asarray(weights) == 0
    assert off.any()
    changed = jnp.where(off[..., None], 100.0, hidden), head, jnp.where(off, 0, targets), weights
    for chunk_tokens in (None, 4):
        one = value_and_gradients((hidden, head, targets, weights), chunk_tokens=chunk_tokens)
        other = value_and_gradients(changed, chunk_tokens=chunk_tokens)
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)
        assert not np.asarray(one[2])[off].any()


def test_no_target_at_all():
    hidden, head, targets, weights = operands()
    for value in value_and_gradients((hidden, head, targets, jnp.zeros_like(weights))):
        assert not np.asarray(value).any()


@pytest.mark.gpu
def test_huge_logits_stay_finite():
    hidden, head, targets, weights = operands()
    loss, _, dhidden, dhead = value_and_gradients((hidden * 1e4, head, targets, weights))
    logits = 1e4 * np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T
    hit = np.take_along_axis(logits, np.asarray(targets)[..., None], -1)[..., 0]
    np.testing.assert_allclose(loss, (weights * (logits.max(-1) - hit)).sum(), rtol=1e-5)
    assert all(np.isfinite(a).all() for a in (dhidden, dhead))


@pytest.mark.gpu
def test_a_frozen_head_gets_no_gradient_and_none_is_computed():
    arguments = operands()
    loss, _, dhidden, dhead = value_and_gradients(arguments, head_gradient=False, chunk_tokens=6)
    reference = value_and_gradients(arguments, chunk_tokens=6)
    assert loss == reference[0]
    np.testing.assert_array_equal(dhidden, reference[2])
    assert not np.asarray(dhead).any()

    def gradient(hidden, head_gradient):
        return jax.grad(lambda h: linear_cross_entropy(h, *arguments[1:], head_gradient=head_gradient)[0])(hidden)

    frozen, trained = (str(jax.make_jaxpr(lambda h, g=g: gradient(h, g))(arguments[0])) for g in (False, True))
    product = f"f32[{VOCAB},{DIM}] = dot_general"
    assert product in trained and product not in frozen


@pytest.mark.parametrize(("rows", "length", "tokens"), [(1, 2048, 1081), (4, 2048, 1081), (8, 2048, 1081), (3, 7, 12)])
def test_chunks_of_a_row_are_alike(rows, length, tokens):
    """No row of logits is computed that no token has, but for what does not divide."""
    one = chunk_length(rows, length, tokens)
    count = -(-length // max(1, tokens // rows))
    assert rows * one <= tokens and -(-length // one) == count and count * one - length < count


@pytest.mark.gpu
def test_bf16_softmax_is_fp32():
    """Operands in bf16, products in fp32: the loss is as exact as fp32, gradients round once to bf16."""
    arguments = operands(jnp.bfloat16)
    loss, _, dhidden, dhead = value_and_gradients(arguments, chunk_tokens=6)
    want_loss, want_dhidden, want_dhead = dense(*arguments)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    assert dhidden.dtype == dhead.dtype == jnp.bfloat16
    for got, want in ((dhidden, want_dhidden), (dhead, want_dhead)):
        assert np.abs(np.asarray(got, np.float64) - want).max() < 2 * 2**-8 * np.abs(want).max()


def test_a_head_in_fp32_under_bf16_hidden_keeps_its_gradient_in_fp32():
    hidden, head, targets, weights = operands()
    low = hidden.astype(jnp.bfloat16)
    dhead = value_and_gradients((low, head, targets, weights))[3]
    want = dense(low, head.astype(jnp.bfloat16), targets, weights)[2]
    assert dhead.dtype == jnp.float32
    assert np.abs(np.asarray(dhead) - want).max() < 2 * 2**-8 * np.abs(want).max()


@pytest.mark.parametrize("head_gradient", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("chunk_tokens", [None, 10])
@pytest.mark.gpu
def test_losses_of_tokens_have_gradients_for_any_shares(head_gradient, chunk_tokens):
    """Each token's loss, and gradients where a loss takes each token times another number."""
    hidden, head, targets, weights = operands()
    shares = jnp.asarray(np.random.default_rng(1).standard_normal((ROWS, LENGTH)), jnp.float32)
    options = dict(soft_cap=2.0, head_gradient=head_gradient, chunk_tokens=chunk_tokens)

    def shared(hidden, head):
        losses = linear_token_losses(hidden, head, targets, weights, **options)
        return (shares * losses).sum(), losses

    (total, losses), (dhidden, dhead) = jax.value_and_grad(shared, (0, 1), has_aux=True)(hidden, head)
    want, want_dhidden, want_dhead = dense(hidden, head, targets, weights * shares, soft_cap=2.0)
    assert losses.shape == (ROWS, LENGTH) and losses.dtype == jnp.float32
    loss, _ = linear_cross_entropy(hidden, head, targets, weights, **options)
    np.testing.assert_allclose(losses.sum(), loss, rtol=1e-6)
    np.testing.assert_allclose(total, want, rtol=1e-5)
    np.testing.assert_allclose(dhidden, want_dhidden, atol=2e-5)
    np.testing.assert_allclose(dhead, want_dhead if head_gradient else np.zeros_like(dhead), atol=2e-5)


@pytest.mark.parametrize("head_gradient", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("chunk_tokens", [None, 10])
def test_weights_have_gradients(head_gradient, chunk_tokens):
    """Those of a mean, in whose count they are, too, and of tokens' losses in any shares."""
    hidden, head, targets, weights = operands()
    options = dict(z_loss=1e-2, head_gradient=head_gradient, chunk_tokens=chunk_tokens)
    shares = jnp.asarray(np.random.default_rng(1).standard_normal((ROWS, LENGTH)), jnp.float32)

    def mean(weights):
        total, count = linear_cross_entropy(hidden, head, targets, weights, **options)
        return total / count

    def shared(weights):
        return (shares * linear_token_losses(hidden, head, targets, weights, **options)).sum()

    ones = jnp.ones((1, 1))
    losses = np.array(
        [
            [dense(hidden[b:, t:][:1, :1], head, targets[b:, t:][:1, :1], ones, z_loss=1e-2)[0] for t in range(LENGTH)]
            for b in range(ROWS)
        ]
    )
    value, gradient = jax.value_and_grad(mean)(weights)
    np.testing.assert_allclose(gradient, (losses - value) / weights.sum(), atol=1e-6)
    np.testing.assert_allclose(jax.grad(shared)(weights), shares * losses, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_targets_in_few_bits_are_those_of_a_larger_vocabulary(dtype):
    hidden, _, targets, weights = operands()
    head = jnp.asarray(np.random.default_rng(1).standard_normal((300, DIM)), jnp.float32)
    one = value_and_gradients((hidden, head, targets.astype(dtype), weights))
    for got, want in zip(one, value_and_gradients((hidden, head, targets, weights)), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("rows", "length"), [(0, 3), (2, 0)])
def test_no_tokens_at_all(rows, length):
    arguments = jnp.zeros((rows, length, DIM)), operands()[1], jnp.zeros((rows, length), int), jnp.zeros((rows, length))
    loss, count, dhidden, dhead = value_and_gradients(arguments)
    assert loss == count == 0 and dhidden.shape == (rows, length, DIM) and not np.asarray(dhead).any()


def test_a_head_in_16_bits_takes_the_cotangent_in_32():
    """A factor that float16 does not hold, of gradients that it does, and one that bfloat16 would round."""
    hidden, head, targets, weights = operands(jnp.float16)
    small = hidden / 64, head, targets, weights
    *_, dhead = value_and_gradients(small, dloss=2.0**17)
    _, _, want = dense(*small)
    np.testing.assert_allclose(dhead, 2.0**17 * want, rtol=2e-2, atol=2e-3 * 2.0**17 * np.abs(want).max())
    arguments = operands(jnp.bfloat16)
    one, third = (value_and_gradients(arguments, dloss=dloss)[3] for dloss in (1.0, 1 / 3))
    sizes = [np.abs(np.asarray(dhead, np.float64)).sum() for dhead in (one, third)]
    np.testing.assert_allclose(sizes[1] / sizes[0], 1 / 3, rtol=5e-4)


def whole_log_probs(hidden, head, targets, temperature, soft_cap, logit_scale):
    """(log-probabilities, entropies) from whole logits."""
    logits = jnp.einsum("btd,vd->btv", hidden, head, precision="highest") * logit_scale
    logits = (logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)) / temperature
    logps = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(logps, targets[..., None], -1)[..., 0], -(jnp.exp(logps) * logps).sum(-1)


@pytest.mark.parametrize("temperature, soft_cap, logit_scale", [(1.0, None, 1.0), (0.6, None, 0.5), (1.7, 2.0, 1.5)])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("head_gradient", [False, True])
@pytest.mark.parametrize("chunk_tokens", [None, 10])
@pytest.mark.gpu
def test_log_probs_and_entropies(temperature, soft_cap, logit_scale, entropy_gradient, head_gradient, chunk_tokens):
    hidden, head, targets, factors = operands()
    options = dict(temperature=temperature, soft_cap=soft_cap, logit_scale=logit_scale)

    def loss(function, entropy_gradient, hidden, head):
        logps, entropies = function(hidden, head)
        entropies = entropies if entropy_gradient else jax.lax.stop_gradient(entropies)
        return (factors * logps).sum() + (jnp.cos(jnp.arange(LENGTH)) * entropies).sum(), (logps, entropies)

    def ours(hidden, head):
        more = dict(entropy_gradient=entropy_gradient, head_gradient=head_gradient, chunk_tokens=chunk_tokens)
        return linear_log_probs(hidden, head, targets, **options, **more)

    def whole(hidden, head):
        return whole_log_probs(hidden, head if head_gradient else jax.lax.stop_gradient(head), targets, **options)

    want = jax.value_and_grad(functools.partial(loss, whole, entropy_gradient), (0, 1), has_aux=True)(hidden, head)
    got = jax.value_and_grad(functools.partial(loss, ours, True), (0, 1), has_aux=True)(hidden, head)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_a_vocabulary_that_is_filled_up_changes_no_entropy():
    hidden, head, targets, _ = operands(jnp.bfloat16)
    assert fills_up(len(head), head.dtype)
    logps, entropies = linear_log_probs(hidden, head, targets, entropy_gradient=True)
    want = whole_log_probs(hidden.astype(jnp.float32), head.astype(jnp.float32), targets, 1.0, None, 1.0)
    np.testing.assert_allclose(logps, want[0], atol=2e-2)
    np.testing.assert_allclose(entropies, want[1], atol=2e-2)
    gradient = jax.grad(lambda h: linear_log_probs(h, head, targets, entropy_gradient=True)[1].sum())(hidden)
    assert jnp.isfinite(gradient.astype(jnp.float32)).all()


def test_a_temperature_must_be_above_zero():
    hidden, head, targets, _ = operands()
    with pytest.raises(ValueError, match="temperature"):
        linear_log_probs(hidden, head, targets, temperature=0.0)


def test_the_log_sum_exp_of_one_pass():
    """As GPUs compute it, of large and small logits, with rows that begin with, end with or have only -inf but one."""
    logits = 20 * jax.random.normal(jax.random.key(0), (2, 4, 1000))
    logits = logits.at[..., 990:].set(-jnp.inf).at[0, 0, :300].set(-jnp.inf).at[1, 2, 1:].set(-jnp.inf)
    logits = logits.at[1, 3].add(1e4).at[0, 1].add(-1e4)
    with targets.compile_for((9, 0)):
        got = jax.jit(reference.log_sum_exp)(logits)
    np.testing.assert_allclose(got, jax.nn.logsumexp(logits, axis=-1), rtol=2e-7)
