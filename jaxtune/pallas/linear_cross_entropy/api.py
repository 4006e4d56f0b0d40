"""Losses and log-probabilities of next tokens from hidden states and a vocabulary head, without storing all logits: the
public functions, with their derivatives. The logits of a chunk of tokens exist at a time.

`linear_cross_entropy` returns the sum of the tokens' losses, and `linear_token_losses` the loss of each token;
`linear_log_probs` returns log-probabilities and entropies. `chunk_length` says how many tokens of each row are in a
chunk, also to the memory planner, and `implementations` is for `jaxtune info --kernels`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch
from jaxtune.pallas.arguments import FLOATS, INTEGERS, Arguments
from jaxtune.pallas.linear_cross_entropy import reference
from jaxtune.pallas.meshes import on_any_mesh

CHUNK_LOGITS = 1 << 27  # the number of logits that exist at a time by default


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _loss(hidden, head, targets, weights, static):
    """The sum of weights * losses over all tokens, float32[]: hidden [B, T, D], head [V, D], targets int32[B, T],
    weights float32[B, T]. It has a custom derivative whose forward rule computes the gradients, because the logits
    exist only there. static: the options of the loss, a hashable tuple of pairs (keyword, value) from `_checked`."""
    # One sum over all tokens, so that it does not depend on the chunks.
    return (weights * reference.forward(hidden, head, targets, weights, **dict(static), gradients=False).losses).sum()


def _loss_fwd(hidden, head, targets, weights, static):
    """The forward rule of `_loss`, whose arguments it has (hidden, head, targets, weights, static): (loss, residuals).
    The residuals are (dhidden, dhead, losses): the gradients of the loss with respect to hidden and head (dhead is None
    if the head is frozen), and float32[B, T], the losses of the tokens without their weights, which are the gradient of
    the weights. So the backward computes no logits."""
    losses, _, dhidden, dhead = reference.forward(hidden, head, targets, weights, **dict(static), gradients=True)
    return (weights * losses).sum(), (dhidden, dhead, losses)


def _loss_bwd(static, residuals, dloss):
    """The backward rule of `_loss`: (gradients of hidden, of head, None for the targets, of weights). Each is what
    `_loss_fwd` stored in `residuals`, times dloss float32[], the incoming gradient of the sum; that of a frozen head is
    None. static is not used."""
    *gradients, losses = residuals
    dhidden, dhead = jax.tree.map(lambda each: (each.astype(jnp.float32) * dloss).astype(each.dtype), gradients)
    return dhidden, dhead, None, losses * dloss


_loss.defvjp(_loss_fwd, _loss_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _token_losses(hidden, head, targets, weights, static):
    """The weighted loss of each token, float32[B, T], with a custom derivative: hidden [B, T, D], head [V, D], targets
    int32[B, T], weights float32[B, T]. static: the options of the loss, a hashable tuple of pairs (keyword, value) from
    `_checked`."""
    return weights * reference.forward(hidden, head, targets, weights, **dict(static), gradients=False).losses


def _token_losses_fwd(hidden, head, targets, weights, static):
    """The forward rule of `_token_losses`, whose arguments it has (hidden, head, targets, weights, static): (weighted
    losses float32[B, T], residuals). The residuals depend on whether the head trains (head_gradient in static).

    If the head is frozen, the residuals are the gradient of each token's weighted loss with respect to its own hidden
    state, [B, T, D], which the backward only multiplies by the token's incoming gradient, and the losses without their
    weights. If the head trains, the residuals are the arguments (hidden, head, targets, weights), and the backward
    computes the logits again: the head's gradient is a sum over tokens, in which each token has its incoming gradient
    as a factor, and these are not known yet.
    """
    if dict(static)[
        "head_gradient"
    ]:  # the head's gradient is a sum over tokens whose factors are known in the backward only
        return _token_losses(hidden, head, targets, weights, static), (hidden, head, targets, weights)
    losses, _, dhidden, _ = reference.forward(hidden, head, targets, weights, **dict(static), gradients=True)
    return weights * losses, (dhidden, losses)


def _token_losses_bwd(static, residuals, dlosses):
    """The backward rule of `_token_losses`: (gradients of hidden, of head, None for the targets, of weights). static:
    the options; residuals: those of `_token_losses_fwd`; dlosses: float32[B, T], the incoming gradients of the weighted
    losses. The weights' gradient is the losses without weights times these. If the head is frozen, the head's gradient
    is None, and that of hidden is the stored one times each token's incoming gradient. If the head trains, the logits
    are computed again, because the factor of each token in the head's gradient is known only here."""
    if dict(static)["head_gradient"]:
        hidden, head, targets, weights = residuals
        shares = weights * dlosses
        losses, _, dhidden, dhead = reference.forward(hidden, head, targets, shares, **dict(static), gradients=True)
        return dhidden, dhead, None, losses * dlosses
    dhidden, losses = residuals
    return (dhidden.astype(jnp.float32) * dlosses[..., None]).astype(dhidden.dtype), None, None, losses * dlosses


_token_losses.defvjp(_token_losses_fwd, _token_losses_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _log_probs(hidden, head, targets, static):
    """(log-probabilities of the targets, entropies in nats), float32[B, T] each, with a custom derivative of the first;
    a gradient of the entropies is ignored. hidden: [B, T, D]; head: [V, D]; targets: int32[B, T]. static: the options
    of linear_log_probs, a hashable tuple of pairs (keyword, value) from `_checked`."""
    ones = jnp.ones(targets.shape, jnp.float32)
    results = reference.forward(hidden, head, targets, ones, **dict(static), gradients=False, entropies=True)
    return -results.losses, results.entropies


def _log_probs_fwd(hidden, head, targets, static):
    """The forward rule of `_log_probs`, whose arguments it has (hidden, head, targets, static): ((log-probabilities,
    entropies), residuals). The residuals depend on whether the head trains (head_gradient in static).

    If the head is frozen, the residual is the gradient of each token's loss (its negative log-probability) with
    respect to its hidden state, [B, T, D], which the backward only multiplies by the token's negated incoming
    gradient. If the head trains, the residuals are the arguments (hidden, head, targets), and the backward computes
    the logits again: the head's gradient is a sum over tokens, in which each token has its incoming gradient as a
    factor, and these are not known yet.
    """
    # The factors of the tokens in the head's gradient are known in the backward only.
    if dict(static)["head_gradient"]:
        return _log_probs(hidden, head, targets, static), (hidden, head, targets)
    ones = jnp.ones(targets.shape, jnp.float32)
    results = reference.forward(hidden, head, targets, ones, **dict(static), gradients=True, entropies=True)
    return (-results.losses, results.entropies), (results.dhidden,)


def _log_probs_bwd(static, residuals, gradients):
    """The backward rule of `_log_probs`: (gradients of hidden, of head, None for the targets). static: the options;
    residuals: those of `_log_probs_fwd`; gradients: the pair of the incoming gradients of log-probabilities and
    entropies, float32[B, T] each, of which the second is ignored. If the head is frozen, the head's gradient is None,
    and that of hidden is the stored one times each token's negated incoming gradient. If the head trains, the logits
    are computed again."""
    dlogps, _ = gradients
    if dict(static)["head_gradient"]:
        hidden, head, targets = residuals
        results = reference.forward(hidden, head, targets, -dlogps, **dict(static), gradients=True)
        return results.dhidden, results.dhead, None
    [dhidden] = residuals
    return (dhidden.astype(jnp.float32) * -dlogps[..., None]).astype(dhidden.dtype), None, None


_log_probs.defvjp(_log_probs_fwd, _log_probs_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _log_probs_and_entropies(hidden, head, targets, static):
    """(log-probabilities of the targets, entropies in nats), float32[B, T] each, with a custom derivative of both; that
    of `_log_probs`, which costs less, ignores the entropies. linear_log_probs uses it if its entropy_gradient is True.
    The residuals are hidden, head and targets. hidden: [B, T, D]; head: [V, D]; targets: int32[B, T]. static: the
    options of linear_log_probs, a hashable tuple of pairs (keyword, value) from `_checked`."""
    return _log_probs(hidden, head, targets, static)


def _log_probs_and_entropies_bwd(static, residuals, gradients):
    """The backward rule of `_log_probs_and_entropies`: (gradients of hidden, of head or None if the head is frozen,
    None for the targets). residuals: (hidden, head, targets); static: the options. `gradients` is the pair of the
    incoming gradients of log-probabilities and entropies, float32[B, T] each. The logits are computed again, also for a
    frozen head: a token's gradient is a sum of two terms, one for each incoming gradient, and these are known only
    here."""
    (hidden, head, targets), (dlogps, dentropies) = residuals, gradients
    more = dict(gradients=True, entropies=True, entropy_weights=dentropies)
    results = reference.forward(hidden, head, targets, -dlogps, **dict(static), **more)
    return results.dhidden, results.dhead, None


_log_probs_and_entropies.defvjp(
    lambda hidden, head, targets, static: (_log_probs(hidden, head, targets, static), (hidden, head, targets)),
    _log_probs_and_entropies_bwd,
)


@on_any_mesh
def linear_cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    soft_cap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    head_gradient: bool = True,
    chunk_tokens: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The sum of the weighted losses of all tokens, cross-entropy of the next token, from hidden states and the
    vocabulary head. Logits [B, T, V] are never stored: a loop goes over chunks of tokens, and, where the derivative is
    wanted, computes the gradients in the forward too. Differentiable with respect to hidden, head and weights.
    Supervised fine-tuning and the evaluation of the loss call it.

    logits = hidden head^T * logit_scale, then soft_cap * tanh(logits / soft_cap); all softmax arithmetic is fp32. The
    loss of a token is lse - (1 - e) logits[target] - e mean(logits) + z_loss lse^2, with lse = logsumexp(logits) and e
    = label_smoothing as in torch's cross_entropy; the last term is the z-loss of PaLM (arXiv 2204.02311).

    Args:
      hidden: [B, T, D] bfloat16, float16 or float32, finite everywhere.
      head: [V, D] of these dtypes, cast to hidden's for the product.
      targets: int[B, T] in [0, V), the next token of each token, also where the weight is 0.
      weights: float32[B, T] (or 16 bits), the factors of the losses; 0 where a target does not count.
      soft_cap, logit_scale, label_smoothing, z_loss: as in the formulas; a soft_cap of None leaves the tanh out, and
        another is above 0; label_smoothing is at least 0 and below 1; z_loss is at least 0.
      head_gradient: False for a frozen head: its gradient is neither computed nor kept (it comes back as zero).
      chunk_tokens: how many tokens have logits at a time, at most, but at least one of each row; by default the logits
        and their 16-bit gradient take about 0.8 GB. The loss does not depend on it, nor does hidden's gradient; the
        head's only in the order of fp32 sums.
    Returns:
      (loss_sum, count): float32 scalars, the sum of weights * loss and the sum of weights.
    Raises:
      TypeError, ValueError: a class, dtype, shape or number is not as described here; flags and the contents of arrays
        are not checked.
    """
    options = (soft_cap, logit_scale, label_smoothing, z_loss, head_gradient, chunk_tokens)
    static = _checked("linear_cross_entropy", hidden, head, targets, weights, *options)
    weights = weights.astype(jnp.float32)
    return _loss(hidden, head, targets.astype(jnp.int32), weights, static), weights.sum()


@on_any_mesh
def linear_token_losses(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    soft_cap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    head_gradient: bool = True,
    chunk_tokens: int | None = None,
) -> jax.Array:
    """The weighted loss of each token, float32[B, T], for objectives that are not the sum of the tokens' losses. Logits
    [B, T, V] are never stored.

    The sum over all tokens is the loss of linear_cross_entropy, whose docstring has the formula. With weights of 1, and
    without label smoothing and z-loss, the losses are the negative log-probabilities of the targets. Differentiable
    with respect to hidden, head and weights: with a frozen head, hidden's gradient is computed in the forward; with a
    trained head the backward computes the logits once more. Preference objectives, which combine the losses of a row,
    call it, and so does the scoring of given tokens.

    Args:
      hidden: [B, T, D] bfloat16, float16 or float32, finite everywhere.
      head: [V, D] of these dtypes, cast to hidden's for the product.
      targets: int[B, T] in [0, V), the next token of each token, also where the weight is 0.
      weights: float32[B, T] (or 16 bits), the factors of the losses.
      soft_cap: above 0: limits the logits, after they are scaled, to soft_cap * tanh(logits / soft_cap); None: no
        limit.
      logit_scale: multiplies the logits.
      label_smoothing: the share of the target's probability that is spread evenly over the vocabulary, at least 0 and
        below 1.
      z_loss: the factor, at least 0, of the squared log-sum-exp of the logits, which is added to the loss.
      head_gradient: False for a frozen head: its gradient is neither computed nor kept (it comes back as zero).
      chunk_tokens: how many tokens have logits at a time, at most, but at least one of each row; None: as many as have
        2^27 logits.
    Raises:
      TypeError, ValueError: a class, dtype, shape or number is not as described here; flags and the contents of arrays
        are not checked.
    """
    options = (soft_cap, logit_scale, label_smoothing, z_loss, head_gradient, chunk_tokens)
    static = _checked("linear_token_losses", hidden, head, targets, weights, *options)
    return _token_losses(hidden, head, targets.astype(jnp.int32), weights.astype(jnp.float32), static)


@on_any_mesh
def linear_log_probs(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    logit_scale: float = 1.0,
    entropy_gradient: bool = False,
    head_gradient: bool = True,
    chunk_tokens: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The log-probability of each target, and the entropy of each distribution, under softmax(logits / temperature).
    Logits [B, T, V] are never stored.

    The logits are those of linear_cross_entropy, with soft cap and scale. A sampler that draws at this temperature,
    without filters such as top-p, draws from this distribution, so policy gradients need its log-probabilities.
    Training by rewards (train/objectives/policy.py) gets them from it, through train/program/loss.py.

    Args:
      hidden: [B, T, D] bfloat16, float16 or float32, finite everywhere.
      head: [V, D] of these dtypes, cast to hidden's for the product.
      targets: int[B, T] in [0, V), the tokens whose log-probabilities are wanted, at padding too.
      temperature: above 0; the logits, after scale and soft cap, are divided by it.
      entropy_gradient: True: the entropies are differentiable, and the backward computes the logits once more. False:
        their gradient is zero, and with a frozen head logits are computed only once.
      soft_cap: above 0: limits the logits, after they are scaled, to soft_cap * tanh(logits / soft_cap); None: no
        limit.
      logit_scale: multiplies the logits.
      head_gradient: False for a frozen head: its gradient is neither computed nor kept (it comes back as zero).
      chunk_tokens: how many tokens have logits at a time, at most, but at least one of each row; None: as many as have
        2^27 logits.
    Returns:
      (log_probs, entropies): float32[B, T] each, in nats.
    Raises:
      TypeError, ValueError: a class, dtype, shape or number is not as described here; flags and the contents of arrays
        are not checked.
    """
    options = (soft_cap, logit_scale, 0.0, 0.0, head_gradient, chunk_tokens, temperature)
    static = _checked("linear_log_probs", hidden, head, targets, None, *options)
    if entropy_gradient:
        return _log_probs_and_entropies(hidden, head, targets.astype(jnp.int32), static)
    return _log_probs(hidden, head, targets.astype(jnp.int32), static)


def _checked(
    name,
    hidden,
    head,
    targets,
    weights,
    soft_cap,
    logit_scale,
    label_smoothing,
    z_loss,
    head_gradient,
    chunk_tokens,
    temperature=1.0,
):
    """Checks the arguments of linear_cross_entropy, linear_token_losses or linear_log_probs, and returns the options as
    a tuple of pairs (keyword, value): soft_cap, logit_scale, temperature, label_smoothing, z_loss, head_gradient and
    chunk_length. It is hashable, as a static argument of a custom derivative must be; as a dictionary it is keyword
    arguments of reference.forward, to which the rules add `gradients` and others.

    In place of chunk_tokens (None: as many tokens as have CHUNK_LOGITS logits) the result has chunk_length, the number
    of tokens of each row whose logits exist at a time. name: of the public function, for messages. Of the arrays
    hidden, head, targets and weights only dtypes and shapes are read; weights is None for linear_log_probs, which has
    none. The other arguments are those of the public functions.

    Raises:
      TypeError, ValueError: an array has another dtype or shape, or a number another range, than the public function
        says.
    """
    check = Arguments(name)
    check.array("hidden", hidden, "B T D", FLOATS)
    check.array("head", head, "V D", FLOATS)
    check.array("targets", targets, "B T", INTEGERS)
    if weights is not None:
        check.array("weights", weights, "B T", FLOATS)
    check.number("temperature", temperature, above=0)
    check.number("soft_cap", soft_cap, above=0, optional=True)
    check.number("logit_scale", logit_scale)
    check.number("label_smoothing", label_smoothing, least=0, below=1)
    check.number("z_loss", z_loss, least=0)
    check.number("chunk_tokens", chunk_tokens, whole=True, least=1, optional=True)
    rows, length, _ = hidden.shape
    if chunk_tokens is None:
        chunk_tokens = max(1, CHUNK_LOGITS // head.shape[0])
    return (
        ("soft_cap", soft_cap),
        ("logit_scale", logit_scale),
        ("temperature", temperature),
        ("label_smoothing", label_smoothing),
        ("z_loss", z_loss),
        ("head_gradient", head_gradient),
        ("chunk_length", chunk_length(rows, length, chunk_tokens)),
    )


def chunk_length(rows: int, length: int, chunk_tokens: int) -> int:
    """Chooses how many neighbouring tokens of each row are in a chunk, whose logits exist at a time. All `rows` rows,
    of `length` tokens each, have the same number of tokens in a chunk, at least one, and chunk_tokens in all at most
    (but one a row if there are more rows). Of the lengths that need equally few chunks, it returns the smallest,
    because the last chunk is padded to it. The memory planner calls it too."""
    most = max(1, min(length, chunk_tokens // max(1, rows)))
    return -(-length // max(1, -(-length // most)))


def implementations() -> dispatch.Table:
    """The table of implementations, {name: a function that returns why it refuses the call, or None}. There is one,
    which supports every call, so linear_cross_entropy does not use the table. It exists for `jaxtune info --kernels`,
    which lists the implementations of operations."""
    return {"reference": lambda: None}
