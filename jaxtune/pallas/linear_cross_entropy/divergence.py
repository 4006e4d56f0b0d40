"""Divergences between the next-token distributions of two models, from their hidden states and heads.

Whole logits never exist, of neither model: the forward goes over chunks of tokens, has both models' logits of one chunk
at a time, and computes the student's gradients there. The divergence is the generalised Jensen-Shannon divergence of
arXiv 2306.13649, with TRL's `beta`: 0 is the forward Kullback-Leibler divergence KL(teacher || student), 1 the reverse
one, and between them beta KL(teacher || m) + (1 - beta) KL(student || m) with m = beta teacher + (1 - beta) student.

`linear_divergence` is the public function. top_k.py uses the others, too: `within` masks logits of rows that pad the
head by NOTHING, `length_of_chunks` chooses the size of chunks, `divergence_of` computes divergences from
log-probabilities, and `summed` is the sum with its custom derivative.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas.arguments import FLOATS, Arguments
from jaxtune.pallas.linear_cross_entropy.api import CHUNK_LOGITS, chunk_length
from jaxtune.pallas.linear_cross_entropy.reference import Results, filled_up, in_chunks, logits_of, through_head
from jaxtune.pallas.meshes import on_any_mesh

# The logit of rows that fill up a head, and the log-probability of an outcome that does not exist. Its probability is
# 0, and it is finite, as differences need.
NOTHING = -1e30


def within(logits: jax.Array, size: int) -> jax.Array:
    """The logits [..., n] with those from index `size` on replaced by NOTHING, so that they have probability 0: they
    come from the rows of zeros with which `filled_up` pads a head, or are zeros that were appended to the logits of one
    model because the other's head has more rows. size: the number of tokens in the vocabulary. If n is `size`, the
    logits are returned unchanged. The functions `_chunk` of this file and of top_k.py call it, and
    linear_top_k."""
    return logits if logits.shape[-1] == size else jnp.where(jnp.arange(logits.shape[-1]) < size, logits, NOTHING)


def length_of_chunks(hidden: jax.Array, vocab_size: int, chunk_tokens: int | None) -> int:
    """The number of tokens of each row of `hidden` [B, T, D] in a chunk of at most chunk_tokens tokens of all rows, but
    at least one of each, as `chunk_length` chooses it. A chunk_tokens of None stands for as many tokens as have
    CHUNK_LOGITS logits in two arrays, each with vocab_size logits a token: those of two models here, and in top_k.py
    the student's and a copy of them for the bucket, in which the stored tokens are masked. linear_divergence and the
    functions of top_k.py call it, also linear_top_k, which has no bucket."""
    rows, length, _ = hidden.shape
    return chunk_length(rows, length, chunk_tokens or max(1, CHUNK_LOGITS // 2 // vocab_size))


def divergence_of(log_student: jax.Array, log_teacher: jax.Array, beta: float) -> tuple[jax.Array, jax.Array]:
    """The divergence of each pair of a student's and a teacher's distribution over V outcomes, and its gradient with
    respect to the student's logits (after the temperature), of which log_student is the log-softmax. The outcomes are
    the vocabulary's tokens in this file, and in top_k.py the stored tokens and the bucket of all others. The functions
    `_chunk` of this file and of top_k.py call it.

    Args:
      log_student, log_teacher: float32[..., V], log-probabilities, finite (NOTHING for a probability of 0).
      beta: from 0 to 1, which divergence: 0 is KL(teacher || student), 1 is KL(student || teacher), and between them it
        is beta KL(teacher || m) + (1 - beta) KL(student || m) with m = beta teacher + (1 - beta) student.
    Returns:
      (divergences in nats float32[...], gradients float32[..., V])
    """
    student, teacher = jnp.exp(log_student), jnp.exp(log_teacher)
    if beta == 0:
        return (teacher * (log_teacher - log_student)).sum(-1), student - teacher
    if beta == 1:
        gap = log_student - log_teacher
        value = (student * gap).sum(-1)
        return value, student * (gap - value[..., None])
    mixture = jnp.logaddexp(log_student + np.float32(np.log1p(-beta)), log_teacher + np.float32(np.log(beta)))
    gap = log_student - mixture
    of_student = (student * gap).sum(-1)
    value = beta * (teacher * (log_teacher - mixture)).sum(-1) + (1.0 - beta) * of_student
    return value, (1.0 - beta) * student * (gap - of_student[..., None])


def _chunk(
    hidden, teacher_hidden, weights, *, heads, own, others, size, beta, temperature, gradients, head_gradient
) -> Results:
    """Computes the divergences of one chunk of tokens and, on request, their gradients, as `Results`: `losses` are the
    divergences, and `entropies` are those of the student's distributions.

    Args:
      hidden, teacher_hidden: [B, t, D] and [B, t, E], the hidden states of the student and of the teacher.
      weights: float32[B, t], the factors of the divergences in the sum whose gradients are computed.
      heads: (the student's [V, D], the teacher's [V, E]), each in the dtype of its hidden states, perhaps with rows of
        zeros at its end (`filled_up`).
      own: (logit scale, soft cap) of the student.
      others: (logit scale, soft cap) of the teacher.
      size: the number of tokens in the vocabulary; heads may have more rows.
      beta: which divergence, from 0 (KL(teacher || student)) to 1 (KL(student || teacher)).
      temperature: divides the logits of both models.
      gradients: True: gradients are computed; False: they are None in the results.
      head_gradient: whether the gradient of the student's head is computed too; otherwise it is None.
    """
    head, teacher_head = heads
    logits, slope = logits_of(hidden, head, own[0], own[1], temperature)
    teacher_logits, _ = logits_of(teacher_hidden, teacher_head, others[0], others[1], temperature)

    def log_probs(logits):
        logits = within(logits, size)
        return logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    width = max(len(head), len(teacher_head))  # heads of two dtypes may be filled up differently
    log_student, log_teacher = (
        log_probs(jnp.pad(each, ((0, 0), (0, 0), (0, width - each.shape[-1]))) if each.shape[-1] < width else each)
        for each in (logits, teacher_logits)
    )
    losses, dlogits = divergence_of(log_student, log_teacher, beta)
    entropies = -(jnp.exp(log_student) * log_student).sum(-1)
    if not gradients:
        return Results(losses, entropies, None, None)
    dlogits = dlogits[..., : len(head)] * weights[..., None] * slope
    return Results(losses, entropies, *through_head(dlogits, hidden, head, head_gradient))


def _forward(hidden, head, teacher, weights, *, gradients, chunk_length, **options) -> Results:
    """Computes the divergences of all tokens, chunk by chunk, as `Results`: with the entropies of the student's
    distributions and, if `gradients` is True, the gradients of the weighted sum of divergences with respect to hidden
    and, with head_gradient, head (else None). linear_divergence passes it to `summed`.

    hidden [B, T, D] and head [V, D] are the student's, teacher is (hidden [B, T, E], head [V, E]) of the teacher;
    weights: float32[B, T]. chunk_length: the number of tokens of each row in a chunk. options: own and others, (logit
    scale, soft cap) of the student and of the teacher; beta, temperature and head_gradient.
    """
    teacher_hidden, teacher_head = teacher
    heads = filled_up(head.astype(hidden.dtype)), filled_up(teacher_head.astype(teacher_hidden.dtype))
    compute = functools.partial(_chunk, heads=heads, size=len(head), gradients=gradients, **options)
    filled = heads[0] if gradients and options["head_gradient"] else None
    return in_chunks(compute, (hidden, teacher_hidden, weights), chunk_length, head, filled, gradients)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5))
def summed(forward, hidden, head, teacher, weights, static):
    """(sum of weights * divergences float32[], divergences float32[B, T], entropies of the student float32[B, T]), for
    linear_divergence and linear_top_k_divergence. The first has a custom derivative with respect to hidden, head and
    weights, whose forward rule computes the gradients, because the logits exist only there; gradients of the other two
    are ignored. Distillation reports the entropies; only tests read the second result.

    Args:
      forward: computes the divergences of all tokens as `Results`, as `_forward` does: it takes the next four
        arguments, `gradients` (whether the gradients are computed) and the options.
      hidden: [B, T, D]; head: [V, D]; both are the student's.
      teacher: a tuple of arrays that describe the teacher's distributions. They get no gradient.
      weights: float32[B, T].
      static: the options of `forward` as a hashable tuple of pairs (keyword, value).
    """
    results = forward(hidden, head, teacher, weights, gradients=False, **dict(static))
    return (weights * results.losses).sum(), results.losses, results.entropies


def _summed_fwd(forward, hidden, head, teacher, weights, static):
    """The forward rule of `summed`, whose arguments it has (forward, hidden, head, teacher, weights, static): (the
    three results of `summed`, residuals). The residuals are the gradients of the sum with respect to hidden, head (None
    if it is frozen) and weights; the last are the divergences without weights."""
    results = forward(hidden, head, teacher, weights, gradients=True, **dict(static))
    sums = (weights * results.losses).sum(), results.losses, results.entropies
    return sums, (results.dhidden, results.dhead, results.losses)


def _summed_bwd(forward, static, residuals, gradients):
    """The backward rule of `summed`: (gradients of hidden and head, None for the teacher, that of weights), each the
    gradient that the forward rule saved times the incoming gradient of the sum. residuals: what the forward rule saved.
    gradients: the incoming gradients of the three results, of which only the first, float32[], is used. `forward` and
    `static`, the options, are not used."""
    *own, losses = residuals
    scale = gradients[0]
    dhidden, dhead = jax.tree.map(lambda each: (each.astype(jnp.float32) * scale).astype(each.dtype), own)
    return dhidden, dhead, None, losses * scale


summed.defvjp(_summed_fwd, _summed_bwd)


@on_any_mesh
def linear_divergence(
    hidden: jax.Array,
    head: jax.Array,
    teacher_hidden: jax.Array,
    teacher_head: jax.Array,
    weights: jax.Array,
    *,
    beta: float = 1.0,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    logit_scale: float = 1.0,
    teacher_soft_cap: float | None = None,
    teacher_logit_scale: float = 1.0,
    head_gradient: bool = True,
    chunk_tokens: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The sum of weighted divergences between a student's and a teacher's next-token distributions, for distillation;
    train/sensitivity.py measures with it how much quantisation changes a model. Logits [B, T, V] are stored of neither
    model. Differentiable with respect to hidden, head and weights; the gradients are computed chunk by chunk in the
    forward, and the teacher gets none.

    Each model's logits are hidden head^T * logit_scale, limited to soft_cap * tanh(logits / soft_cap) and divided by
    the temperature; all softmax arithmetic is fp32. The divergence, in nats, is KL(teacher || student) for a beta of 0,
    KL(student || teacher) for 1, and between them beta KL(teacher || m) + (1 - beta) KL(student || m) with m = beta
    teacher + (1 - beta) student. It is not multiplied by the squared temperature.

    Args:
      hidden: [B, T, D] bfloat16, float16 or float32, the student's, finite everywhere.
      head: [V, D] of these dtypes, cast to hidden's for the product.
      teacher_hidden: [B, T, E]; teacher_head: [V, E], with the same V. Both get no gradient.
      weights: float32[B, T] (or 16 bits), the factors of the divergences; 0 where a token does not count.
      beta: from 0 (forward KL) to 1 (reverse KL).
      temperature: above 0.
      soft_cap, logit_scale: of the student's logits; a soft_cap is above 0, or None, which limits nothing.
      teacher_soft_cap, teacher_logit_scale: of the teacher's.
      head_gradient: False for a frozen head of the student, whose gradient is then neither computed nor kept.
      chunk_tokens: how many tokens have logits of both models at a time, at most, but at least one of each row; None:
        as many as have 2^26 logits of each model.
    Returns:
      (sum of weights * divergence, float32[]; divergences, float32[B, T], without weights; the entropies of the
        student's distributions, float32[B, T]). Only the first is differentiable.
    Raises:
      TypeError, ValueError: a class, dtype, shape or number is not as described here; flags and the contents of arrays
        are not checked.
    """
    check = Arguments("linear_divergence")
    check.array("hidden", hidden, "B T D", FLOATS)
    check.array("head", head, "V D", FLOATS)
    check.array("teacher_hidden", teacher_hidden, "B T E", FLOATS)
    check.array("teacher_head", teacher_head, "V E", FLOATS)
    check.array("weights", weights, "B T", FLOATS)
    check.number("beta", beta, least=0)
    if beta > 1:
        raise ValueError(f"linear_divergence: beta = {beta}: must be from 0 to 1")
    check.number("temperature", temperature, above=0)
    for name, cap in (("soft_cap", soft_cap), ("teacher_soft_cap", teacher_soft_cap)):
        check.number(name, cap, above=0, optional=True)
    for name, scale in (("logit_scale", logit_scale), ("teacher_logit_scale", teacher_logit_scale)):
        check.number(name, scale)
    check.number("chunk_tokens", chunk_tokens, whole=True, least=1, optional=True)
    static = (
        ("own", (logit_scale, soft_cap)),
        ("others", (teacher_logit_scale, teacher_soft_cap)),
        ("beta", float(beta)),
        ("temperature", temperature),
        ("head_gradient", head_gradient),
        ("chunk_length", length_of_chunks(hidden, len(head), chunk_tokens)),
    )
    return summed(_forward, hidden, head, (teacher_hidden, teacher_head), weights.astype(jnp.float32), static)
