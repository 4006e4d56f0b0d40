"""The largest log-probabilities of a model's next-token distributions, and divergences of another model's distributions
from such stored ones.

`linear_top_k` returns the log-probabilities that are stored, and `linear_top_k_divergence` the divergences, for
distillation without a teacher in memory. Whole logits never exist: both functions go over chunks of tokens. A stored
distribution has k tokens with their log-probabilities; all other tokens are one bucket, whose probability is 1 minus
the sum of those. The divergence is that of the two distributions over these k + 1 outcomes: with p_i and q_i the
teacher's and the student's probabilities of token i, and the bucket's 1 - sum p_i and 1 - sum q_i,

- forward, KL(teacher || student): sum p_i log(p_i / q_i), the bucket among the outcomes;
- reverse, KL(student || teacher): sum q_i log(q_i / p_i), the bucket among them;
- Jensen-Shannon: beta KL(teacher || m) + (1 - beta) KL(student || m) with m = beta teacher + (1 - beta) student for
  each outcome, the bucket's too.

Merging outcomes never makes such a divergence larger, so each is, up to the rounding of the teacher's bucket
(LEAST_REST), a lower bound of the divergence over the whole vocabulary, and equals it where k is the size of the
vocabulary. train/program/loss.py calls both functions.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from jaxtune.pallas.arguments import FLOATS, Arguments
from jaxtune.pallas.linear_cross_entropy.divergence import NOTHING, divergence_of, length_of_chunks, summed, within
from jaxtune.pallas.linear_cross_entropy.reference import Results, filled_up, in_chunks, logits_of, through_head
from jaxtune.pallas.meshes import on_any_mesh

# The bucket's smallest probability. The sum of the stored probabilities is rounded to about 1e-7, and a bucket of 0
# would make the reverse divergence infinite.
LEAST_REST = 1e-6


def _largest(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of `logits` float[..., V], the largest first, and their indices on the last axis, [..., k] both, as
    jax.lax.top_k, except that it may choose other ones of equal numbers. linear_top_k calls it. If V is at least 16 k,
    it works in two steps: the last axis is divided into groups of neighbours, and the k groups with the largest maxima
    contain the k largest. On a GPU, jax.lax.top_k sorts everything, and this function sorts 5 % of it for 64 of
    128,256."""
    size = logits.shape[-1]
    width = math.isqrt(size // k)  # of a group; it makes the two sorts shortest
    if width < 4:
        return jax.lax.top_k(logits, k)
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, -size % width)]
    groups = jnp.pad(logits, padding, constant_values=-jnp.inf).reshape(*logits.shape[:-1], -1, width)
    _, best = jax.lax.top_k(groups.max(-1), k)
    candidates = jnp.take_along_axis(groups, best[..., None], axis=-2).reshape(*logits.shape[:-1], k * width)
    values, places = jax.lax.top_k(candidates, k)
    return values, jnp.take_along_axis(best, places // width, axis=-1) * width + places % width


@jax.vmap
@jax.vmap
def _put(row: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    """A copy of `row` with `values` at the indices `ids`; indices beyond the row are left out. It is called with arrays
    of B rows of t tokens, row [B, t, V], ids int[B, t, k] and values [B, t, k], and mapped over both (jax.vmap), so
    that devices which divide the rows need not exchange anything. `_outcomes` takes the stored tokens out of the
    bucket's logits with it, and `_chunk` puts their gradients among those of the bucket's tokens."""
    return row.at[ids].set(values, mode="drop")


def _outcomes(logits, ids, log_probs, size: int):
    """Both distributions over the k stored tokens and the bucket of all others, for `_chunk`.

    Args:
      logits: float32[B, t, V], the student's, after the temperature; V may be more than the vocabulary's size, with
        NOTHING at the end (`within`).
      ids: int32[B, t, k], the stored tokens; -1 in a place without one.
      log_probs: float32[B, t, k], the teacher's log-probabilities of them.
      size: the number of tokens in the vocabulary.
    Returns:
      (log-probabilities of the student's outcomes, float32[B, t, k + 1], the bucket last, NOTHING for an outcome that
        does not exist; the same of the teacher, whose bucket, if it exists, has at least the probability LEAST_REST;
        ids [B, t, k] with V in place of -1; float32[B, t, V], the student's log-probabilities of tokens within the
        bucket, and about NOTHING at the stored tokens; without meaning where there is no bucket. `_chunk` divides the
        bucket's gradient among its tokens by them, and uses them for nothing else)
    """
    there = ids >= 0
    ids = jnp.where(there, ids, logits.shape[-1])
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    others = _put(logits, ids, jnp.full(ids.shape, NOTHING, logits.dtype))
    of_rest = jax.nn.logsumexp(others, axis=-1, keepdims=True)
    listed = jnp.take_along_axis(logits, jnp.minimum(ids, size - 1), axis=-1) - lse
    stored = jnp.where(there, log_probs, NOTHING)
    rest = jnp.log(jnp.maximum(1.0 - jnp.exp(stored).sum(-1, keepdims=True), LEAST_REST))
    is_rest = there.sum(-1, keepdims=True) < size
    student = jnp.concatenate([jnp.where(there, listed, NOTHING), jnp.where(is_rest, of_rest - lse, NOTHING)], -1)
    teacher = jnp.concatenate([stored, jnp.where(is_rest, rest, NOTHING)], -1)
    return student, teacher, ids, others - of_rest


def _chunk(hidden, ids, log_probs, weights, *, head, own, size, beta, temperature, gradients, head_gradient) -> Results:
    """Computes the divergences of one chunk of tokens and, on request, their gradients, as `Results`: `losses` are the
    divergences, and `entropies` are those of the student's distributions over the whole vocabulary.

    Args:
      hidden: [B, t, D], the student's hidden states.
      ids, log_probs: int32 and float32[B, t, k], the teacher's stored tokens, -1 in a place without one.
      weights: float32[B, t], the factors of the divergences in the sum whose gradients are computed.
      head: [V, D] in hidden's dtype, perhaps with rows of zeros at its end (`filled_up`).
      own: (logit scale, soft cap) of the student.
      size: the number of tokens in the vocabulary; the head may have more rows.
      beta, temperature: those of linear_top_k_divergence.
      gradients: True: gradients are computed; False: they are None in the results.
      head_gradient: whether the gradient of the head is computed too; otherwise it is None.
    """
    logits, slope = logits_of(hidden, head, own[0], own[1], temperature)
    logits = within(logits, size)
    all_log_probs = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    entropies = -(jnp.exp(all_log_probs) * all_log_probs).sum(-1)
    student, teacher, ids, others = _outcomes(logits, ids, log_probs, size)
    losses, of_outcomes = divergence_of(student, teacher, beta)
    if not gradients:
        return Results(losses, entropies, None, None)
    # A token of the bucket has its share of the bucket's gradient, its probability among the bucket's tokens.
    dlogits = _put(jnp.exp(others) * of_outcomes[..., -1:], ids, of_outcomes[..., :-1])
    dlogits = dlogits * weights[..., None] * slope
    return Results(losses, entropies, *through_head(dlogits, hidden, head, head_gradient))


def _forward(hidden, head, teacher, weights, *, gradients, chunk_length, **options) -> Results:
    """Computes the divergences of all tokens, chunk by chunk, as `Results`: with the student's entropies and, if
    `gradients` is True, the gradients of the weighted sum of divergences with respect to hidden and head (else None).
    linear_top_k_divergence passes it to `summed` (divergence.py), the sum with a custom derivative.

    hidden [B, T, D], head [V, D], weights float32[B, T] and teacher, (ids, log-probabilities) [B, T, k], are those of
    linear_top_k_divergence. chunk_length: the number of tokens of each row in a chunk. options: the keyword arguments
    own, beta, temperature and head_gradient of `_chunk`.
    """
    cast = filled_up(head.astype(hidden.dtype))
    compute = functools.partial(_chunk, head=cast, size=len(head), gradients=gradients, **options)
    filled = cast if gradients and options["head_gradient"] else None
    return in_chunks(compute, (hidden, *teacher, weights), chunk_length, head, filled, gradients)


@on_any_mesh
def linear_top_k_divergence(
    hidden: jax.Array,
    head: jax.Array,
    teacher_ids: jax.Array,
    teacher_log_probs: jax.Array,
    weights: jax.Array,
    *,
    beta: float = 1.0,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    logit_scale: float = 1.0,
    head_gradient: bool = True,
    chunk_tokens: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The sum of weighted divergences of a student's next-token distributions from stored ones of a teacher, each k
    tokens with their log-probabilities and one bucket of all other tokens, for distillation without a teacher in
    memory. Logits [B, T, V] are not stored; gradients are computed chunk by chunk in the forward. The teacher's arrays
    get none.

    The student's logits are hidden head^T * logit_scale, limited to soft_cap * tanh(logits / soft_cap) and divided by
    the temperature; all softmax arithmetic is fp32. The divergence, in nats, is KL(teacher || student) for a beta of 0,
    KL(student || teacher) for 1, and between them beta KL(teacher || m) + (1 - beta) KL(student || m) with m = beta
    teacher + (1 - beta) student, each over k + 1 outcomes: the stored tokens, and the bucket with 1 minus the sum of
    their probabilities (for the teacher at least LEAST_REST). If the k tokens are the whole vocabulary there is no
    bucket, and the result is that of linear_divergence.

    Args:
      hidden: [B, T, D] bfloat16, float16 or float32, the student's, finite everywhere.
      head: [V, D] of these dtypes, cast to hidden's for the product.
      teacher_ids: int32[B, T, k], distinct tokens of each distribution; -1 in places that are not used.
      teacher_log_probs: float32[B, T, k], in nats, finite, at the temperature.
      weights: float32[B, T] (or 16 bits), the factors of the divergences; 0 where a token does not count.
      beta: from 0 (forward KL) to 1 (reverse KL).
      temperature: above 0; divides the student's logits.
      soft_cap, logit_scale: of the student's logits; a soft_cap of None limits nothing.
      head_gradient: False for a frozen head, whose gradient is then neither computed nor kept.
      chunk_tokens: about the number of tokens, over all rows, whose logits exist at a time; a second array of that
        size, the bucket's logits, exists beside them. None: as many as have 2^26 logits.
    Returns:
      (sum of weights * divergence, float32[]; divergences, float32[B, T], without weights; the entropies of the
        student's distributions over the vocabulary, at the temperature, float32[B, T]). Only the first is
        differentiable, with respect to hidden, head and weights.
    Raises:
      TypeError, ValueError: a class, dtype, shape or number is not as described here; flags and the contents of arrays
        are not checked.
    """
    check = Arguments("linear_top_k_divergence")
    check.array("hidden", hidden, "B T D", FLOATS)
    check.array("head", head, "V D", FLOATS)
    check.array("teacher_ids", teacher_ids, "B T k", ("int32",))
    check.array("teacher_log_probs", teacher_log_probs, "B T k", ("float32",))
    check.array("weights", weights, "B T", FLOATS)
    check.number("beta", beta, least=0)
    if beta > 1:
        raise ValueError(f"linear_top_k_divergence: beta = {beta}: must be from 0 to 1")
    _check_logits(check, len(head), teacher_ids.shape[-1], temperature, soft_cap, logit_scale, chunk_tokens)
    static = (
        ("own", (logit_scale, soft_cap)),
        ("beta", float(beta)),
        ("temperature", temperature),
        ("head_gradient", head_gradient),
        ("chunk_length", length_of_chunks(hidden, len(head), chunk_tokens)),
    )
    return summed(_forward, hidden, head, (teacher_ids, teacher_log_probs), weights.astype(jnp.float32), static)


@on_any_mesh
def linear_top_k(
    hidden: jax.Array,
    head: jax.Array,
    *,
    k: int,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    logit_scale: float = 1.0,
    chunk_tokens: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The k most probable next tokens at each token and their log-probabilities under softmax(logits / temperature), by
    which training with a teacher stores its distributions, once, for linear_top_k_divergence. Logits [B, T, V] are not
    stored, and gradients through the result are zero.

    Args:
      hidden: [B, T, D] bfloat16, float16 or float32.
      head: [V, D] of these dtypes, cast to hidden's for the product.
      k: from 1 to V.
      temperature: above 0; the logits, after scale and soft cap, are divided by it.
      soft_cap: limits the logits, after they are scaled, to soft_cap * tanh(logits / soft_cap); None: no limit.
      logit_scale: multiplies the logits.
      chunk_tokens: about the number of tokens, over all rows, whose logits exist at a time; None: as many as have 2^26
        logits.
    Returns:
      (token ids int32[B, T, k], the most probable first; their log-probabilities in nats, float32[B, T, k])
    Raises:
      TypeError, ValueError: a class, dtype, shape or number is not as described here; flags and the contents of arrays
        are not checked.
    """
    check = Arguments("linear_top_k")
    check.array("hidden", hidden, "B T D", FLOATS)
    check.array("head", head, "V D", FLOATS)
    size = len(head)
    _check_logits(check, size, k, temperature, soft_cap, logit_scale, chunk_tokens)
    rows, length, width = hidden.shape
    each = length_of_chunks(hidden, size, chunk_tokens)
    count = -(-length // each)
    cast = filled_up(jax.lax.stop_gradient(head).astype(hidden.dtype))

    def one(chunk: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits, _ = logits_of(chunk, cast, logit_scale, soft_cap, temperature)
        logits = within(logits, size)
        values, ids = _largest(logits, k)
        return ids.astype(jnp.int32), values - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    padded = jnp.pad(jax.lax.stop_gradient(hidden), ((0, 0), (0, count * each - length), (0, 0)))
    chunks = jnp.moveaxis(padded.reshape(rows, count, each, width), 1, 0)
    ids, log_probs = (jnp.moveaxis(found, 0, 1).reshape(rows, -1, k) for found in jax.lax.map(one, chunks))
    return ids[:, :length], log_probs[:, :length]


def _check_logits(check: Arguments, size: int, k: int, temperature, soft_cap, logit_scale, chunk_tokens) -> None:
    """Checks arguments that linear_top_k and linear_top_k_divergence share. It raises TypeError or ValueError by
    `check`, the checker of the call, if k is not from 1 to `size`, the number of tokens in the vocabulary, or if
    temperature, soft_cap (or None), logit_scale or chunk_tokens (or None) is not as these functions describe it."""
    check.number("k", k, whole=True, least=1)
    if k > size:
        raise ValueError(f"{check.op}: k = {k}: the vocabulary has only {size:,} tokens")
    check.number("temperature", temperature, above=0)
    check.number("soft_cap", soft_cap, above=0, optional=True)
    check.number("logit_scale", logit_scale)
    check.number("chunk_tokens", chunk_tokens, whole=True, least=1, optional=True)
