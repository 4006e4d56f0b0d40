"""The largest log-probabilities of a model's next-token distributions, and divergences from such stored ones:
distillation without a teacher in memory. Whole logits never exist.

A stored distribution has k tokens with log-probabilities; all other tokens are one bucket, with 1 minus the sum of
those. Divergences are over these k + 1 outcomes, with p_i and q_i of teacher and student:

- forward, KL(teacher || student): sum p_i log(p_i / q_i).
- reverse, KL(student || teacher): sum q_i log(q_i / p_i).
- Jensen-Shannon: beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student.

Merging outcomes never makes such a divergence larger: each is, up to the rounding of the teacher's bucket (LEAST_REST),
a lower bound of that over the whole vocabulary, and equals it where k is the vocabulary's size.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from jaxtune.pallas.arguments import FLOATS, Arguments
from jaxtune.pallas.linear_cross_entropy.divergence import (
    NOTHING,
    divergence_of,
    length_of_chunks,
    masked_beyond,
    summed,
)
from jaxtune.pallas.linear_cross_entropy.reference import Results, filled_up, in_chunks, logits_of, through_head
from jaxtune.pallas.meshes import on_any_mesh

# The bucket's smallest probability. The sum of the stored probabilities is rounded to about 1e-7, and a bucket of 0
# would make the reverse divergence infinite.
LEAST_REST = 1e-6


def _largest(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """jax.lax.top_k, but for the choice among equal numbers; from V = 16 k on it sorts only the k best groups."""
    size = logits.shape[-1]
    width = math.isqrt(size // k)  # of a group; it makes the two sorts shortest
    if width < 4:
        return jax.lax.top_k(logits, k)
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, -size % width)]
    groups = jnp.pad(logits, padding, constant_values=-jnp.inf).reshape(*logits.shape[:-1], -1, width)
    _, best_groups = jax.lax.top_k(groups.max(-1), k)
    candidates = jnp.take_along_axis(groups, best_groups[..., None], axis=-2).reshape(*logits.shape[:-1], k * width)
    values, positions = jax.lax.top_k(candidates, k)
    return values, jnp.take_along_axis(best_groups, positions // width, axis=-1) * width + positions % width


@jax.vmap
@jax.vmap
def _put(row: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    """A copy of `row` with `values` at `ids`, without indices beyond the row."""
    return row.at[ids].set(values, mode="drop")


def _outcomes(logits, ids, log_probs, size: int):
    """Both distributions over the k stored tokens and the bucket.

    Returns (student's log-probabilities float32[B, t, k + 1], bucket last, NOTHING for an outcome that does not exist;
    the teacher's; ids with V in place of -1; float32[B, t, V], the student's log-probabilities within the bucket).

      logits: float32[B, t, V], the student's after the temperature, NOTHING beyond `size`.
      ids: int32[B, t, k], -1 where unused. log_probs: float32[B, t, k], the teacher's.
    """
    is_stored = ids >= 0
    ids = jnp.where(is_stored, ids, logits.shape[-1])
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    bucket_logits = _put(logits, ids, jnp.full(ids.shape, NOTHING, logits.dtype))
    bucket_lse = jax.nn.logsumexp(bucket_logits, axis=-1, keepdims=True)
    listed = jnp.take_along_axis(logits, jnp.minimum(ids, size - 1), axis=-1) - lse
    stored = jnp.where(is_stored, log_probs, NOTHING)
    log_bucket = jnp.log(jnp.maximum(1.0 - jnp.exp(stored).sum(-1, keepdims=True), LEAST_REST))
    has_bucket = is_stored.sum(-1, keepdims=True) < size
    student = jnp.concatenate(
        [jnp.where(is_stored, listed, NOTHING), jnp.where(has_bucket, bucket_lse - lse, NOTHING)], -1
    )
    teacher = jnp.concatenate([stored, jnp.where(has_bucket, log_bucket, NOTHING)], -1)
    return student, teacher, ids, bucket_logits - bucket_lse


def _chunk(hidden, ids, log_probs, weights, *, head, own, size, beta, temperature, gradients, head_gradient) -> Results:
    """Results of one chunk: divergences, and entropies of the student over the whole vocabulary.

    ids, log_probs: int32 and float32[B, t, k], the teacher's.
    weights: float32[B, t], factors in the sum whose gradients are computed.
    head: [V, D] in hidden's dtype, perhaps with rows of zeros at its end; size: tokens of the vocabulary.
    """
    logits, slope = logits_of(hidden, head, own[0], own[1], temperature)
    logits = masked_beyond(logits, size)
    all_log_probs = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    entropies = -(jnp.exp(all_log_probs) * all_log_probs).sum(-1)
    student, teacher, ids, bucket_log_probs = _outcomes(logits, ids, log_probs, size)
    losses, doutcomes = divergence_of(student, teacher, beta)
    if not gradients:
        return Results(losses, entropies, None, None)
    # A token of the bucket has its share of the bucket's gradient, its probability among the bucket's tokens.
    dlogits = _put(jnp.exp(bucket_log_probs) * doutcomes[..., -1:], ids, doutcomes[..., :-1])
    dlogits = dlogits * weights[..., None] * slope
    return Results(losses, entropies, *through_head(dlogits, hidden, head, head_gradient))


def _forward(hidden, head, teacher, weights, *, gradients, chunk_length, **options) -> Results:
    """Results of all tokens, chunk by chunk. teacher: (ids, log-probabilities) [B, T, k]."""
    cast = filled_up(head.astype(hidden.dtype))
    compute = functools.partial(_chunk, head=cast, size=len(head), gradients=gradients, **options)
    padded_head = cast if gradients and options["head_gradient"] else None
    return in_chunks(compute, (hidden, *teacher, weights), chunk_length, head, padded_head, gradients)


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
    """Weighted divergences of a student's next-token distributions from a teacher's stored ones, without stored logits.

    Returns (sum of weights * divergence float32[], unweighted divergences float32[B, T] in nats, the student's
    entropies over the vocabulary at the temperature float32[B, T]). Only the first is differentiable, in hidden, head
    and weights; the forward computes its gradients. Logits and divergence are those of linear_divergence, over k + 1
    outcomes: the stored tokens, and the bucket of all others (the teacher's has at least LEAST_REST).

      hidden: [B, T, D]. head: [V, D]. weights: float[B, T], 0 where a token does not count.
      teacher_ids: int32[B, T, k], distinct; -1 where unused.
      teacher_log_probs: float32[B, T, k], in nats, finite, at the temperature.
      beta: 0: KL(teacher || student), 1: KL(student || teacher). temperature: divides the student's logits.
      soft_cap: s * tanh(logits / s), or None. logit_scale: factor. head_gradient: False for a frozen head.
      chunk_tokens: most tokens with logits at a time, and with a second array of that size, the bucket's.
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
    """(ids int32[B, T, k], the most probable first; their log-probabilities float32[B, T, k] in nats) under
    softmax(logits / temperature), as linear_top_k_divergence takes them. Logits are not stored; gradients are zero.
    Errors are those of linear_log_probs; k is from 1 to V.

      hidden: [B, T, D]. head: [V, D]. soft_cap: s * tanh(logits / s), or None. logit_scale: factor before it.
      chunk_tokens: about how many tokens of all rows have logits at a time; None: 2^26 logits.
    """
    check = Arguments("linear_top_k")
    check.array("hidden", hidden, "B T D", FLOATS)
    check.array("head", head, "V D", FLOATS)
    size = len(head)
    _check_logits(check, size, k, temperature, soft_cap, logit_scale, chunk_tokens)
    rows, length, width = hidden.shape
    chunk_size = length_of_chunks(hidden, size, chunk_tokens)
    count = -(-length // chunk_size)
    cast = filled_up(jax.lax.stop_gradient(head).astype(hidden.dtype))

    def top_of_chunk(chunk: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits, _ = logits_of(chunk, cast, logit_scale, soft_cap, temperature)
        logits = masked_beyond(logits, size)
        values, ids = _largest(logits, k)
        return ids.astype(jnp.int32), values - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    padded = jnp.pad(jax.lax.stop_gradient(hidden), ((0, 0), (0, count * chunk_size - length), (0, 0)))
    chunks = jnp.moveaxis(padded.reshape(rows, count, chunk_size, width), 1, 0)
    ids, log_probs = (
        jnp.moveaxis(chunk_results, 0, 1).reshape(rows, -1, k) for chunk_results in jax.lax.map(top_of_chunk, chunks)
    )
    return ids[:, :length], log_probs[:, :length]


def _check_logits(check: Arguments, size: int, k: int, temperature, soft_cap, logit_scale, chunk_tokens) -> None:
    check.number("k", k, whole=True, least=1)
    if k > size:
        raise ValueError(f"{check.op}: k = {k}: the vocabulary has only {size:,} tokens")
    check.number("temperature", temperature, above=0)
    check.number("soft_cap", soft_cap, above=0, optional=True)
    check.number("logit_scale", logit_scale)
    check.number("chunk_tokens", chunk_tokens, whole=True, least=1, optional=True)
