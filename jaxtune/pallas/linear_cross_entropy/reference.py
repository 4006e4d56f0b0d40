"""Losses, log-probabilities and entropies of next tokens in jnp, with their gradients. A loop goes over chunks, the
same few neighbouring tokens of every row, so that rows stay divided over the devices of a mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtune.pallas import one_order, targets

_MULTIPLE = 8


def fills_up(vocab_size: int, dtype: jnp.dtype) -> bool:
    """Whether `filled_up` copies a head of `vocab_size` rows in this dtype. XLA pads every dimension of a 16-bit
    product on a GPU to a multiple of 8, and would otherwise copy the head for every chunk.
    """
    return vocab_size % _MULTIPLE != 0 and jnp.dtype(dtype).itemsize == 2


def filled_up(head: jax.Array) -> jax.Array:
    """The head [V, D] with rows of zeros up to a multiple of 8, if `fills_up`."""
    return jnp.pad(head, ((0, -len(head) % _MULTIPLE), (0, 0))) if fills_up(len(head), head.dtype) else head


class Results(NamedTuple):
    """Losses, entropies and gradients of a chunk of t tokens of each row, or of all T."""

    # float32[B, t], without the weights.
    losses: jax.Array
    # float32[B, t], entropies of the distributions in nats; None where they are not asked for.
    entropies: jax.Array | None
    # [B, t, D] in hidden's dtype: gradient of sum(weights * losses + entropy_weights * entropies); or None.
    dhidden: jax.Array | None
    # the head's gradient of the same sum, or None: [V, D] in the head's dtype for all tokens; for a chunk float32, with
    # as many rows as the head that `filled_up` returned.
    dhead: jax.Array | None


def precision_of(hidden: jax.Array) -> jax.lax.Precision | jax.lax.DotAlgorithmPreset:
    """Precision of products with the head: as exact as float32 for float32, without TF32's rounding; else the default.

    On Hopper a float32 product is the sum of three TF32 products: 122 TFLOP/s against 52 of float32 instructions, with
    errors of 1.6e-7 and 4.1e-7. Consumer cards multiply TF32 no faster than float32.
    """
    if hidden.dtype != jnp.float32:
        return jax.lax.Precision.DEFAULT
    hopper = targets.here() is targets.HOPPER
    return jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if hopper else jax.lax.Precision.HIGHEST


def logits_of(hidden, head, logit_scale, soft_cap, temperature) -> tuple[jax.Array, jax.Array | float]:
    """(logits float32[B, t, V], derivative of each by its product of hidden state and head, a float or float32[B, t,
    V]) of a chunk, hidden [B, t, D].

      head: [V, D] in hidden's dtype.
      logit_scale, soft_cap, temperature: the product times logit_scale, then soft_cap * tanh(logits / soft_cap), then
        divided by the temperature.
    """
    if one_order.is_exact():
        logits = one_order.product(hidden, head)
    else:
        options = dict(preferred_element_type=jnp.float32, precision=precision_of(hidden))
        logits = jnp.einsum("btd,vd->btv", hidden, head, **options)
    if logit_scale != 1.0:
        logits = logits * logit_scale
    slope = logit_scale
    if soft_cap is not None:
        capped = one_order.tanh(logits / soft_cap)
        logits, slope = capped * soft_cap, logit_scale * (1.0 - capped * capped)
    if temperature != 1.0:
        logits = logits / temperature
        slope = slope / temperature
    return logits, slope


def log_sum_exp(logits: jax.Array) -> jax.Array:
    """log(sum(exp(logits))) over the last axis. On a GPU it reads the logits once, where jax.nn.logsumexp reads them
    twice: it reduces pairs (m, sum of exp(logit - m)), and joins two by scaling the sum with the smaller m.
    """
    if targets.here() is None:
        return jax.nn.logsumexp(logits, axis=-1)

    def joined(left, right):
        (largest, total), (second, second_total) = left, right
        scale = jnp.exp(-jnp.abs(largest - second))
        joint = jnp.where(largest >= second, total + second_total * scale, total * scale + second_total)
        return jnp.maximum(largest, second), joint

    # A finite number, because the difference of two infinite ones is none; logits of padding are -inf.
    start = jnp.float32(jnp.finfo(jnp.float32).min), jnp.float32(0)
    largest, total = jax.lax.reduce((logits, jnp.ones_like(logits)), start, joined, (logits.ndim - 1,))
    return largest + jnp.log(total)


def through_head(dlogits: jax.Array, hidden: jax.Array, head: jax.Array, head_gradient: bool):
    """([B, t, D] in hidden's dtype, float32[V, D] or None): gradients of a chunk's hidden states and of the head.

    dlogits: float32[B, t, V], gradients of the products of both, rounded to hidden's dtype.
    head_gradient: False: the second is None.
    """
    dlogits, precision = dlogits.astype(hidden.dtype), precision_of(hidden)
    dhidden = jnp.einsum("btv,vd->btd", dlogits, head, precision=precision)
    if not head_gradient:
        return dhidden, None
    dhead = jnp.einsum("btv,btd->vd", dlogits, hidden, preferred_element_type=jnp.float32, precision=precision)
    return dhidden, dhead


def _exact_losses(logits, targets, temperature: float, size: int) -> tuple[jax.Array, jax.Array]:
    """(losses, log-sum-exp), float32[B, t] each, as the sampler adds up. logits: [B, t, V]; size: as of _chunk."""
    rows = logits.reshape(-1, logits.shape[-1])
    temperatures = jnp.full(len(rows), temperature, jnp.float32)
    log_probs, lse = one_order.log_probabilities(rows, targets.reshape(-1, 1), temperatures, size)
    return -log_probs.reshape(targets.shape), lse.reshape(targets.shape)


def _chunk(
    hidden,
    head,
    targets,
    weights,
    entropy_weights,
    *,
    gradients,
    entropies,
    size,
    soft_cap,
    logit_scale,
    temperature,
    label_smoothing,
    z_loss,
    head_gradient,
) -> Results:
    """Results of one chunk.

    head: [V, D] in hidden's dtype, perhaps with rows of zeros at its end; size: tokens of the vocabulary.
    weights, entropy_weights: float32[B, t], factors in the sum whose gradients are computed.
      With the latter z_loss must be 0, or the gradient is wrong without an error.
    """
    exact_losses = None
    if one_order.is_exact():  # of the logits before the temperature, as the sampler has them
        logits, slope = logits_of(hidden, head, logit_scale, soft_cap, 1.0)
        exact_losses, lse = _exact_losses(logits, targets, temperature, size)
        logits, slope = one_order.tempered(logits, temperature), slope / temperature
    else:
        logits, slope = logits_of(hidden, head, logit_scale, soft_cap, temperature)
    real = None if len(head) == size else jnp.arange(len(head)) < size
    if real is not None:
        logits = jnp.where(real, logits, -jnp.inf)
    if exact_losses is None:
        lse = log_sum_exp(logits)
    target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    if label_smoothing:
        target_logits = (1.0 - label_smoothing) * target_logits + label_smoothing * logits.mean(-1, where=real)
    losses = lse - target_logits + z_loss * lse * lse if z_loss else lse - target_logits
    if exact_losses is not None and not (label_smoothing or z_loss):
        losses = exact_losses
    entropy_values = None
    if entropies:
        logps = logits - lse[..., None]
        entropy_values = -jnp.where(logps == -jnp.inf, 0.0, jnp.exp(logps) * logps).sum(-1)
    if not gradients:
        return Results(losses, entropy_values, None, None)
    one_hot = (jnp.arange(len(head), dtype=targets.dtype) == targets[..., None]).astype(jnp.float32)
    target_probabilities = one_hot * (1.0 - label_smoothing) + label_smoothing / size if label_smoothing else one_hot
    probabilities = jnp.exp(logits - lse[..., None])
    if z_loss:
        probabilities = probabilities * (1.0 + 2.0 * z_loss * lse[..., None])
    dlogits = (probabilities - target_probabilities) * weights[..., None]
    if entropy_values is not None and entropy_weights is not None:
        slopes = jnp.where(logps == -jnp.inf, 0.0, probabilities * (logps + entropy_values[..., None]))
        dlogits = dlogits - entropy_weights[..., None] * slopes
    dlogits = dlogits * slope
    # Behind the vocabulary the gradients multiply zeros, and those of the head are cut off.
    return Results(losses, entropy_values, *through_head(dlogits, hidden, head, head_gradient))


def forward(
    hidden, head, targets, weights, *, chunk_length, gradients, entropies=False, entropy_weights=None, **options
) -> Results:
    """Results of all tokens, chunk by chunk.

    hidden: [B, T, D]; head: [V, D]; targets: int[B, T].
    weights, entropy_weights: float32[B, T], factors in the sum whose gradients are computed; the latter or None.
    chunk_length: tokens of each row whose logits exist at a time.
    gradients: whether dhidden and dhead are computed, of sum(weights * losses + entropy_weights * entropies).
    options: the other keywords of `_chunk`.
    """
    size = len(head)
    cast = filled_up(head.astype(hidden.dtype))
    options |= dict(size=size, gradients=gradients, entropies=entropies)

    def compute(h, *chunk_arrays) -> Results:
        return _chunk(h, cast, *chunk_arrays, **options)

    arrays = (hidden, targets, weights, entropy_weights)
    padded_head = cast if gradients and options["head_gradient"] else None
    return in_chunks(compute, arrays, chunk_length, head, padded_head, gradients)


def in_chunks(
    compute: Callable[..., Results],
    arrays: tuple,
    chunk_length: int,
    head: jax.Array,
    padded_head: jax.Array | None,
    gradients: bool,
) -> Results:
    """Results of all tokens from those of chunks, the same chunk_length neighbouring tokens of each row.

    compute: the Results of a chunk's slice [B, t, ...] of each of `arrays`.
    arrays: [B, T] or [B, T, n], hidden states first; others may be None. Zeros fill up the last chunk.
    chunk_length: from T on `compute` is called once, with `arrays` as they are.
    head: [V, D], gives dtype and rows of the head's gradient.
    padded_head: the head as `compute` uses it, or None without a head's gradient; chunks' gradients are added in
      float32, in order.
    gradients: whether `compute` returns dhidden; it is written over the chunk's hidden states and needs no memory.
    """
    rows, length = arrays[0].shape[:2]
    if chunk_length >= length:
        return _cut(compute(*arrays), head)
    count = -(-length // chunk_length)

    def padded(array):
        return jnp.pad(array, ((0, 0), (0, count * chunk_length - length), (0, 0))[: array.ndim])

    hidden, *other_arrays = jax.tree.map(padded, arrays)

    def run_chunk(so_far, index):
        dhead, hidden = so_far
        offset = index * chunk_length
        chunk_arrays = jax.tree.map(
            lambda a: jax.lax.dynamic_slice_in_dim(a, offset, chunk_length, 1), [hidden, *other_arrays]
        )
        results = compute(*chunk_arrays)
        if results.dhidden is not None:  # over the chunk's hidden states, which nothing reads any more
            hidden = jax.lax.dynamic_update_slice_in_dim(hidden, results.dhidden, offset, 1)
        dhead = None if dhead is None else dhead + results.dhead
        return (dhead, hidden), results._replace(dhidden=None, dhead=None)

    def joined(chunks):  # [count, B, t] -> [B, T]
        return jnp.moveaxis(chunks, 0, 1).reshape(rows, -1)[:, :length]

    dhead = None if padded_head is None else jnp.zeros(padded_head.shape, jnp.float32)
    (dhead, hidden), results = jax.lax.scan(run_chunk, (dhead, hidden), jnp.arange(count))
    dhidden = hidden[:, :length] if gradients else None
    return _cut(jax.tree.map(joined, results)._replace(dhidden=dhidden, dhead=dhead), head)


def _cut(results: Results, head: jax.Array) -> Results:
    """The results with the head's gradient cut to the V rows of `head` and cast to its dtype."""
    return results._replace(dhead=None if results.dhead is None else results.dhead[: len(head)].astype(head.dtype))
