"""Divergences between the next-token distributions of two models, from their hidden states and heads, for one chunk of
tokens at a time.

It is the generalised Jensen-Shannon divergence of arXiv 2306.13649 with TRL's `beta`: 0 is the forward KL(teacher ||
student), 1 the reverse, and between them beta KL(teacher || m) + (1 - beta) KL(student || m) with m = beta teacher + (1
- beta) student.
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


def masked_beyond(logits: jax.Array, size: int) -> jax.Array:
    """Logits [..., n] with NOTHING from index `size`, the vocabulary's, on: there are rows that fill up a head."""
    return logits if logits.shape[-1] == size else jnp.where(jnp.arange(logits.shape[-1]) < size, logits, NOTHING)


def length_of_chunks(hidden: jax.Array, vocab_size: int, chunk_tokens: int | None) -> int:
    """Tokens of each row in a chunk of at most chunk_tokens of all rows. None: as many as have CHUNK_LOGITS logits in
    two arrays, of two models, or of the student and its bucket. hidden: [B, T, D], only its shape is read.

      vocab_size: logits of a token.
    """
    rows, length, _ = hidden.shape
    return chunk_length(rows, length, chunk_tokens or max(1, CHUNK_LOGITS // 2 // vocab_size))


def divergence_of(log_student: jax.Array, log_teacher: jax.Array, beta: float) -> tuple[jax.Array, jax.Array]:
    """(divergences in nats float32[...], gradients float32[..., V] by the student's logits, whose log-softmax is
    log_student).

      log_student, log_teacher: float32[..., V], finite (NOTHING for a probability of 0).
      beta: 0: KL(teacher || student); 1: KL(student || teacher); between: of their mixture (module's docstring).
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
    student_divergence = (student * gap).sum(-1)
    value = beta * (teacher * (log_teacher - mixture)).sum(-1) + (1.0 - beta) * student_divergence
    return value, (1.0 - beta) * student * (gap - student_divergence[..., None])


def _chunk(
    hidden, teacher_hidden, weights, *, heads, own, others, size, beta, temperature, gradients, head_gradient
) -> Results:
    """Results of one chunk: divergences, and the student's entropies.

    heads: (student's [V, D], teacher's [V, E]) in the dtypes of their hidden states; size: tokens of the vocabulary.
    own, others: (logit scale, soft cap) of student and teacher.
    weights: float32[B, t], multiply the gradients alone; divergences come unweighted.
    """
    head, teacher_head = heads
    logits, slope = logits_of(hidden, head, own[0], own[1], temperature)
    teacher_logits, _ = logits_of(teacher_hidden, teacher_head, others[0], others[1], temperature)

    def log_probs(logits):
        logits = masked_beyond(logits, size)
        return logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    width = max(len(head), len(teacher_head))  # heads of two dtypes may be filled up differently
    log_student, log_teacher = (
        log_probs(
            jnp.pad(model_logits, ((0, 0), (0, 0), (0, width - model_logits.shape[-1])))
            if model_logits.shape[-1] < width
            else model_logits
        )
        for model_logits in (logits, teacher_logits)
    )
    losses, dlogits = divergence_of(log_student, log_teacher, beta)
    entropies = -(jnp.exp(log_student) * log_student).sum(-1)
    if not gradients:
        return Results(losses, entropies, None, None)
    dlogits = dlogits[..., : len(head)] * weights[..., None] * slope
    return Results(losses, entropies, *through_head(dlogits, hidden, head, head_gradient))


def _forward(hidden, head, teacher, weights, *, gradients, chunk_length, **options) -> Results:
    """Results of all tokens, chunk by chunk. teacher: (hidden [B, T, E], head [V, E])."""
    teacher_hidden, teacher_head = teacher
    heads = filled_up(head.astype(hidden.dtype)), filled_up(teacher_head.astype(teacher_hidden.dtype))
    compute = functools.partial(_chunk, heads=heads, size=len(head), gradients=gradients, **options)
    padded_head = heads[0] if gradients and options["head_gradient"] else None
    return in_chunks(compute, (hidden, teacher_hidden, weights), chunk_length, head, padded_head, gradients)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5))
def summed(forward, hidden, head, teacher, weights, static):
    """(sum of weights * divergences float32[], divergences float32[B, T], student's entropies float32[B, T]). The first
    has a custom derivative in hidden, head and weights, whose forward rule computes the gradients; gradients of the
    others are ignored.

      forward: as `_forward`.
      teacher: arrays without a gradient.
      static: options of `forward` as a hashable tuple of pairs.
      hidden, head, weights: [B, T, D], [V, D], float[B, T].
    """
    results = forward(hidden, head, teacher, weights, gradients=False, **dict(static))
    return (weights * results.losses).sum(), results.losses, results.entropies


def _summed_fwd(forward, hidden, head, teacher, weights, static):
    """Residuals are the gradients of hidden, head (None if frozen) and weights."""
    results = forward(hidden, head, teacher, weights, gradients=True, **dict(static))
    sums = (weights * results.losses).sum(), results.losses, results.entropies
    return sums, (results.dhidden, results.dhead, results.losses)


def _summed_bwd(forward, static, residuals, gradients):
    *saved_gradients, losses = residuals
    scale = gradients[0]
    dhidden, dhead = jax.tree.map(
        lambda gradient: (gradient.astype(jnp.float32) * scale).astype(gradient.dtype), saved_gradients
    )
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
    """Weighted divergences between a student's and a teacher's next-token distributions, without stored logits [B, T,
    V].

    Returns (sum of weights * divergence float32[], unweighted divergences float32[B, T] in nats, the student's
    entropies float32[B, T]). Only the first is differentiable, in hidden, head and weights; the forward computes its
    gradients.

    Each model's logits are hidden head^T * logit_scale, then soft_cap * tanh(logits / soft_cap), divided by the
    temperature; softmax arithmetic is fp32. The divergence is not multiplied by the squared temperature.

      hidden: [B, T, D] bfloat16, float16 or float32, finite everywhere; head: [V, D], cast to hidden's dtype.
      teacher_hidden: [B, T, E]; teacher_head: [V, E]. Neither gets a gradient.
      weights: float[B, T]; 0 where a token does not count.
      beta: 0: KL(teacher || student); 1: KL(student || teacher); between them as in the module's docstring.
      soft_cap, teacher_soft_cap: above 0, or None.
      head_gradient: False for a frozen head.
      chunk_tokens: tokens that have logits of both models at a time, at most, but at least one of each row; None: 2^26
        logits of each model.
      temperature: divides both models' logits. logit_scale, teacher_logit_scale: factors of the logits.
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
