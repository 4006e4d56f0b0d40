"""Losses, log-probabilities and entropies of next tokens in jnp, with their gradients, for the functions of api.py, and
the parts of this computation that divergence.py and top_k.py use too. A loop goes over chunks, each of the same few
neighbouring tokens of every row, so that the logits of one chunk exist at a time; rows stay divided over the devices of
a mesh.

`forward` computes all of that, as Results. `fills_up` and `filled_up` pad the head, `logits_of` computes the logits of
a chunk, and `through_head` the gradients of hidden states and head from those of their products, both with the
precision that `precision_of` returns; `in_chunks` is the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch

_MULTIPLE = 8


def fills_up(vocab_size: int, dtype: jnp.dtype) -> bool:
    """Whether `filled_up` copies a head of `vocab_size` rows in this dtype in order to append rows of zeros: True if
    the dtype has 16 bits and vocab_size is not a multiple of 8. XLA pads every dimension of a 16-bit product on a GPU
    to such a multiple, and would otherwise copy the head for every chunk. The memory planner calls it too, to count the
    bytes of the copy."""
    return vocab_size % _MULTIPLE != 0 and jnp.dtype(dtype).itemsize == 2


def filled_up(head: jax.Array) -> jax.Array:
    """Pads the head [V, D] with rows of zeros, so that their number is a multiple of 8, if its dtype has 16 bits and V
    is not such a multiple; any other head is returned unchanged. XLA pads every 16-bit product to such a multiple, and
    would otherwise copy the head for every chunk of tokens. Losses call it at their start, and a sampler once for all
    its steps."""
    return jnp.pad(head, ((0, -len(head) % _MULTIPLE), (0, 0))) if fills_up(len(head), head.dtype) else head


class Results(NamedTuple):
    """What `_chunk` computes of a chunk of t tokens of each row, and `forward` of all T tokens: losses, entropies and
    gradients. The shapes below are those of a chunk. In divergence.py and top_k.py, `_chunk` and `_forward` return it
    too, and the losses are divergences."""

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
    """The precision of products with the head: for hidden states in float32 one that is as exact as float32, so that
    the loss does not have TF32's rounding, else the default. `logits_of` and `through_head` call it.

    On Hopper, products in float32 are the sum of three products in TF32, of the numbers' leading bits and of the bits
    that TF32 leaves out: 122 TFLOP/s where products by float32 instructions reach 52, with errors of 1.6e-7 and 4.1e-7
    (a head of Llama-3.1-8B; README.md). Elsewhere they are by float32 instructions: consumer cards multiply TF32 no
    faster than float32."""
    if hidden.dtype != jnp.float32:
        return jax.lax.Precision.DEFAULT
    hopper = dispatch.compute_capability() == (9, 0)
    return jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if hopper else jax.lax.Precision.HIGHEST


def logits_of(hidden, head, logit_scale, soft_cap, temperature) -> tuple[jax.Array, jax.Array | float]:
    """The logits of one chunk of tokens, and the derivative of each logit with respect to its product of hidden state
    and head, by which gradients with respect to logits are multiplied. The functions `_chunk` of this file, of
    divergence.py and of top_k.py begin with it, and linear_top_k calls it.

    Args:
      hidden: [B, t, D], the hidden states after the final norm.
      head: [V, D] in hidden's dtype.
      logit_scale: multiplies the product.
      soft_cap: limits the logits after that, to soft_cap * tanh(logits / soft_cap); None: no limit.
      temperature: divides them after that.
    Returns:
      (logits float32[B, t, V]; the derivative, a float or, with a soft cap, float32[B, t, V])
    """
    logits = jnp.einsum("btd,vd->btv", hidden, head, preferred_element_type=jnp.float32, precision=precision_of(hidden))
    if logit_scale != 1.0:
        logits = logits * logit_scale
    slope = logit_scale
    if soft_cap is not None:
        capped = jnp.tanh(logits / soft_cap)
        logits, slope = capped * soft_cap, logit_scale * (1.0 - capped * capped)
    if temperature != 1.0:
        logits, slope = logits / temperature, slope / temperature
    return logits, slope


def log_sum_exp(logits: jax.Array) -> jax.Array:
    """Computes log(sum(exp(logits))) over the last axis: logits float32[B, t, V] -> float32[B, t]. `_chunk` calls it.

    On a GPU it reads the logits once, where jax.nn.logsumexp reads them twice, for the maximum and for the sum. The
    reduction has two numbers for each part of a row: m, the largest logit, and the sum of exp(logit - m). Two parts are
    joined by multiplying the sum of the part with the smaller m by exp(smaller m - larger m), and adding the sums."""
    if dispatch.compute_capability() is None:
        return jax.nn.logsumexp(logits, axis=-1)

    def joined(one, other):
        (largest, total), (second, more) = one, other
        scale = jnp.exp(-jnp.abs(largest - second))
        joint = jnp.where(largest >= second, total + more * scale, total * scale + more)
        return jnp.maximum(largest, second), joint

    # A finite number, because the difference of two infinite ones is none; logits of padding are -inf.
    start = jnp.float32(jnp.finfo(jnp.float32).min), jnp.float32(0)
    largest, total = jax.lax.reduce((logits, jnp.ones_like(logits)), start, joined, (logits.ndim - 1,))
    return largest + jnp.log(total)


def through_head(dlogits: jax.Array, hidden: jax.Array, head: jax.Array, head_gradient: bool):
    """The gradients of one chunk with respect to its hidden states and to the head, from those with respect to the
    products of the two. The functions `_chunk` of this file, of divergence.py and of top_k.py end with it.

    Args:
      dlogits: float32[B, t, V], the gradients with respect to the products; they are rounded to hidden's dtype.
      hidden: [B, t, D]; head: [V, D], in hidden's dtype.
      head_gradient: whether the head's gradient is computed.
    Returns:
      ([B, t, D] in hidden's dtype; float32[V, D], or None without head_gradient)
    """
    dlogits, precision = dlogits.astype(hidden.dtype), precision_of(hidden)
    dhidden = jnp.einsum("btv,vd->btd", dlogits, head, precision=precision)
    if not head_gradient:
        return dhidden, None
    of_head = jnp.einsum("btv,btd->vd", dlogits, hidden, preferred_element_type=jnp.float32, precision=precision)
    return dhidden, of_head


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
    """Computes the losses of one chunk of tokens and, on request, their entropies and gradients, as `Results`.

    Args:
      hidden: [B, t, D], the hidden states after the final norm.
      head: [V, D] in hidden's dtype, perhaps with rows of zeros at its end.
      targets: int[B, t], the token after each token.
      weights: float32[B, t], the factors of the losses in the sum whose gradients are computed.
      entropy_weights: float32[B, t], the factors of the entropies in the sum whose gradients are computed, or None if
        the entropies have no gradient. They count only with `entropies`, and z_loss must be 0: otherwise the entropies'
        gradient is wrong, without an error.
      gradients: whether the gradients are computed; otherwise dhidden and dhead are None.
      entropies: whether the entropies are computed; otherwise they are None.
      size: the number of tokens in the vocabulary; `head` may have more rows.
      logit_scale: multiplies the logits.
      soft_cap: limits them after that, to soft_cap * tanh(logits / soft_cap); None: no limit.
      temperature: divides them after that.
      label_smoothing: the share of the target's probability that is spread evenly over the vocabulary.
      z_loss: the factor of the squared log-sum-exp of the logits, which is added to the loss.
      head_gradient: whether dhead is computed, if gradients are.
    """
    logits, slope = logits_of(hidden, head, logit_scale, soft_cap, temperature)
    real = None if len(head) == size else jnp.arange(len(head)) < size
    if real is not None:
        logits = jnp.where(real, logits, -jnp.inf)
    lse = log_sum_exp(logits)
    hit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    if label_smoothing:
        hit = (1.0 - label_smoothing) * hit + label_smoothing * logits.mean(-1, where=real)
    losses = lse - hit + z_loss * lse * lse if z_loss else lse - hit
    found = None
    if entropies:
        logps = logits - lse[..., None]
        found = -jnp.where(logps == -jnp.inf, 0.0, jnp.exp(logps) * logps).sum(-1)
    if not gradients:
        return Results(losses, found, None, None)
    chosen = (jnp.arange(len(head), dtype=targets.dtype) == targets[..., None]).astype(jnp.float32)
    wanted = chosen * (1.0 - label_smoothing) + label_smoothing / size if label_smoothing else chosen
    probabilities = jnp.exp(logits - lse[..., None])
    if z_loss:
        probabilities = probabilities * (1.0 + 2.0 * z_loss * lse[..., None])
    dlogits = (probabilities - wanted) * weights[..., None]
    if found is not None and entropy_weights is not None:
        slopes = jnp.where(logps == -jnp.inf, 0.0, probabilities * (logps + found[..., None]))
        dlogits = dlogits - entropy_weights[..., None] * slopes
    dlogits = dlogits * slope
    # Behind the vocabulary the gradients multiply zeros, and those of the head are cut off.
    return Results(losses, found, *through_head(dlogits, hidden, head, head_gradient))


def forward(
    hidden, head, targets, weights, *, chunk_length, gradients, entropies=False, entropy_weights=None, **options
) -> Results:
    """Computes the losses of all tokens and, on request, their entropies and gradients, as `Results`, chunk by chunk,
    so that the logits of one chunk exist at a time. All losses and log-probabilities of api.py, and their gradients,
    are computed with it.

    Args:
      hidden: [B, T, D]; head: [V, D]; targets: int[B, T]; weights: float32[B, T], the factors of the losses in the sum
        whose gradients are computed.
      chunk_length: the number of tokens of each row whose logits exist at a time.
      gradients: whether dhidden and dhead are computed, those of sum(weights * losses + entropy_weights * entropies).
        Otherwise both are None. dhead is also None if the option head_gradient is False.
      entropies: whether the entropies are computed; otherwise they are None.
      entropy_weights: float32[B, T], the factors of the entropies in that sum; None: they have no gradient. They count
        only with `entropies`, and z_loss must be 0, as linear_log_probs passes it; this is not checked.
      options: logit_scale, soft_cap (or None) and temperature of the logits; label_smoothing and z_loss of the losses;
        head_gradient, whether dhead is computed.
    """
    size = len(head)
    cast = filled_up(head.astype(hidden.dtype))
    options |= dict(size=size, gradients=gradients, entropies=entropies)

    def one(h, *others) -> Results:
        return _chunk(h, cast, *others, **options)

    arrays = (hidden, targets, weights, entropy_weights)
    filled = cast if gradients and options["head_gradient"] else None
    return in_chunks(one, arrays, chunk_length, head, filled, gradients)


def in_chunks(
    compute: Callable[..., Results],
    arrays: tuple,
    chunk_length: int,
    head: jax.Array,
    filled: jax.Array | None,
    gradients: bool,
) -> Results:
    """Computes the results of all tokens, chunk by chunk, and puts those of the chunks into one `Results` for all
    tokens. A chunk is the same chunk_length neighbouring tokens of each of the B rows. `forward` and the functions
    `_forward` of divergence.py and top_k.py call it.

    Args:
      compute: the function of one chunk: it takes the chunk's slice [B, t, ...] of each of `arrays`, and returns its
        Results.
      arrays: the arguments of `compute` for all tokens: arrays [B, T] or [B, T, n]. The first is the hidden states; any
        other may be None, which `compute` gets as it is. Zeros are appended to fill the last chunk, and the results of
        these tokens are left out.
      chunk_length: t, the number of tokens of each row in a chunk. If it is T or more, `compute` is called once, with
        `arrays` as they are.
      head: [V, D], whose dtype and number of rows the head's gradient gets.
      filled: the head as `compute` uses it (`filled_up`). The chunks' gradients of the head are added in this shape, in
        float32 and in the order of the chunks. None if `compute` returns no gradient of the head.
      gradients: whether `compute` returns the gradient of the hidden states. Each chunk's gradient is written over its
        hidden states, so that the gradient needs no memory of its own.
    """
    rows, length = arrays[0].shape[:2]
    if chunk_length >= length:
        return _cut(compute(*arrays), head)
    count = -(-length // chunk_length)

    def padded(array):
        return jnp.pad(array, ((0, 0), (0, count * chunk_length - length), (0, 0))[: array.ndim])

    hidden, *others = jax.tree.map(padded, arrays)

    def one(so_far, index):
        dhead, hidden = so_far
        at = index * chunk_length
        cut = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, at, chunk_length, 1), [hidden, *others])
        results = compute(*cut)
        if results.dhidden is not None:  # over the chunk's hidden states, which nothing reads any more
            hidden = jax.lax.dynamic_update_slice_in_dim(hidden, results.dhidden, at, 1)
        dhead = None if dhead is None else dhead + results.dhead
        return (dhead, hidden), results._replace(dhidden=None, dhead=None)

    def whole(chunks):  # [count, B, t] -> [B, T]
        return jnp.moveaxis(chunks, 0, 1).reshape(rows, -1)[:, :length]

    dhead = None if filled is None else jnp.zeros(filled.shape, jnp.float32)
    (dhead, hidden), results = jax.lax.scan(one, (dhead, hidden), jnp.arange(count))
    dhidden = hidden[:, :length] if gradients else None
    return _cut(jax.tree.map(whole, results)._replace(dhidden=dhidden, dhead=dhead), head)


def _cut(results: Results, head: jax.Array) -> Results:
    """The results with the head's gradient, if there is one, cut to the V rows of `head` and cast to its dtype. It was
    computed in float32, and has more rows if `filled_up` appended rows of zeros to the head."""
    return results._replace(dhead=None if results.dhead is None else results.dhead[: len(head)].astype(head.dtype))
