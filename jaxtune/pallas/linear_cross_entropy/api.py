"""Losses and log-probabilities of next tokens from hidden states and a vocabulary head, with derivatives. The logits of
one chunk of tokens exist at a time.
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
    """float32[], the sum of weights * losses."""
    # One sum over all tokens, so that it does not depend on the chunks.
    return (weights * reference.forward(hidden, head, targets, weights, **dict(static), gradients=False).losses).sum()


def _loss_fwd(hidden, head, targets, weights, static):
    """Residuals are the gradients of hidden and head (None if frozen) and the unweighted losses float32[B, T]."""
    losses, _, dhidden, dhead = reference.forward(hidden, head, targets, weights, **dict(static), gradients=True)
    return (weights * losses).sum(), (dhidden, dhead, losses)


def _loss_bwd(static, residuals, dloss):
    *gradients, losses = residuals
    dhidden, dhead = jax.tree.map(
        lambda gradient: (gradient.astype(jnp.float32) * dloss).astype(gradient.dtype), gradients
    )
    return dhidden, dhead, None, losses * dloss


_loss.defvjp(_loss_fwd, _loss_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _token_losses(hidden, head, targets, weights, static):
    """float32[B, T], the weighted losses. static: the options of `_checked`."""
    return weights * reference.forward(hidden, head, targets, weights, **dict(static), gradients=False).losses


def _token_losses_fwd(hidden, head, targets, weights, static):
    """With a frozen head, residuals are each token's gradient and loss; else the arguments."""
    if dict(static)[
        "head_gradient"
    ]:  # the head's gradient is a sum over tokens whose factors are known in the backward only
        return _token_losses(hidden, head, targets, weights, static), (hidden, head, targets, weights)
    losses, _, dhidden, _ = reference.forward(hidden, head, targets, weights, **dict(static), gradients=True)
    return weights * losses, (dhidden, losses)


def _token_losses_bwd(static, residuals, dlosses):
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
    """(log-probabilities, entropies in nats), float32[B, T] each; a gradient of the entropies is ignored."""
    unit_weights = jnp.ones(targets.shape, jnp.float32)
    results = reference.forward(hidden, head, targets, unit_weights, **dict(static), gradients=False, entropies=True)
    return -results.losses, results.entropies


def _log_probs_fwd(hidden, head, targets, static):
    """Residuals as in `_token_losses_fwd`, of the negative log-probabilities."""
    # The factors of the tokens in the head's gradient are known in the backward only.
    if dict(static)["head_gradient"]:
        return _log_probs(hidden, head, targets, static), (hidden, head, targets)
    unit_weights = jnp.ones(targets.shape, jnp.float32)
    results = reference.forward(hidden, head, targets, unit_weights, **dict(static), gradients=True, entropies=True)
    return (-results.losses, results.entropies), (results.dhidden,)


def _log_probs_bwd(static, residuals, gradients):
    """Gradients of hidden and head (None if frozen); `gradients` are those of log-probabilities and entropies."""
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
    """`_log_probs` with a derivative of both results, which costs more."""
    return _log_probs(hidden, head, targets, static)


def _log_probs_and_entropies_bwd(static, residuals, gradients):
    """The logits are computed again, as a token's gradient has a term for each incoming gradient."""
    (hidden, head, targets), (dlogps, dentropies) = residuals, gradients
    options = dict(gradients=True, entropies=True, entropy_weights=dentropies)
    results = reference.forward(hidden, head, targets, -dlogps, **dict(static), **options)
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
    """(sum of weights * losses, sum of weights), float32[] each: cross-entropy of the next token, without stored logits
    [B, T, V]. Differentiable in hidden, head and weights; the forward then computes the gradients.

    Logits are hidden head^T * logit_scale, then soft_cap * tanh(logits / soft_cap); softmax arithmetic is fp32. A
    token's loss is lse - (1 - e) logits[target] - e mean(logits) + z_loss lse^2, lse = logsumexp(logits), e =
    label_smoothing as in torch's cross_entropy; the last term is PaLM's z-loss (arXiv 2204.02311).

      hidden: [B, T, D] bfloat16, float16 or float32, finite everywhere.
      head: [V, D], cast to hidden's dtype.
      targets: int[B, T] in [0, V), also where the weight is 0.
      weights: float[B, T]; 0 where a target does not count.
      soft_cap: above 0, or None. label_smoothing: in [0, 1). z_loss: at least 0.
      head_gradient: False for a frozen head, whose gradient then comes back as zero.
      chunk_tokens: tokens that have logits at a time, at most, but at least one of each row; None: 2^27 logits, about
        0.8 GB with their 16-bit gradient. It changes only the order of sums of the head's gradient.

    Raises TypeError or ValueError for wrong arguments; flags and contents of arrays are not checked.
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
    """float32[B, T], the weighted loss of each token, for objectives that are not their sum. Formula and errors are
    those of linear_cross_entropy; with weights of 1 and neither label smoothing nor z-loss, the losses are negative
    log-probabilities.

    Differentiable in hidden, head and weights. With a frozen head the forward computes hidden's gradient; with a
    trained one the backward computes the logits once more.

      hidden: [B, T, D]. head: [V, D], cast to hidden's dtype. targets: int[B, T] in [0, V). weights: float[B, T].
      soft_cap, logit_scale: logits are soft_cap * tanh(logit_scale * hidden head^T / soft_cap); None: no cap.
      label_smoothing: in [0, 1). z_loss: factor of the squared log-normaliser. head_gradient: False for a frozen head.
      chunk_tokens: most tokens that have logits at a time; None: 2^27 logits.
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
    """(log-probability of each target, entropy of each distribution), float32[B, T] each in nats, under softmax(logits
    / temperature): the distribution of a sampler without filters such as top-p. Errors are those of
    linear_cross_entropy.

      hidden: [B, T, D], finite. head: [V, D], cast to hidden's dtype. targets: int[B, T] in [0, V), at padding, too.
      temperature: above 0; divides the logits after scale and soft cap.
      soft_cap, logit_scale: logits are soft_cap * tanh(logit_scale * hidden head^T / soft_cap); None: no cap.
      entropy_gradient: True: the entropies are differentiable, and the backward computes the logits once more. False:
      their gradient is zero, and with a frozen head logits are computed only once.
      head_gradient: False for a frozen head. chunk_tokens: most tokens with logits at a time; None: 2^27 logits.
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
    """Checks a public function's arguments; returns the keyword arguments of reference.forward as a hashable tuple of
    pairs.
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
    """Tokens of each row in a chunk: at least one, at most chunk_tokens over all rows. Of lengths with equally few
    chunks it is the smallest, because the last chunk is padded. length: tokens of a row.

      rows: of the batch. chunk_tokens: at least 1.
    """
    most = max(1, min(length, chunk_tokens // max(1, rows)))
    return -(-length // max(1, -(-length // most)))


def implementations() -> dispatch.Table:
    """There is only one, which refuses nothing."""
    return {"reference": lambda: None}
