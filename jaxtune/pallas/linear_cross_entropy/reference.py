"""linear_cross_entropy in jnp: a loop over chunks of the row length, so that rows stay divided over a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_MULTIPLE = 8


def fills_up(vocab_size: int, dtype: jnp.dtype) -> bool:
    """Whether the head is copied once, filled up to a multiple of 8. XLA does so with each size of a product in 16 bits
    on a GPU, and would copy the head for every chunk."""
    return vocab_size % _MULTIPLE != 0 and jnp.dtype(dtype).itemsize == 2


def filled_up(head: jax.Array) -> jax.Array:
    """The head [V, D] with rows of zeros behind the vocabulary, where it is filled up."""
    return jnp.pad(head, ((0, -len(head) % _MULTIPLE), (0, 0))) if fills_up(len(head), head.dtype) else head


def _chunk(
    hidden, head, targets, weights, gradients, *, size, soft_cap, logit_scale, label_smoothing, z_loss, head_gradient
):
    """(losses [B, t], dhidden, dhead) of one chunk [B, t, ...]; losses and dhead are fp32. size: of the vocabulary,
    behind which the head [V, D] is filled up."""
    precision = jax.lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    logits = jnp.einsum("btd,vd->btv", hidden, head, preferred_element_type=jnp.float32, precision=precision)
    if logit_scale != 1.0:
        logits = logits * logit_scale
    slope = logit_scale
    if soft_cap is not None:
        capped = jnp.tanh(logits / soft_cap)
        logits, slope = capped * soft_cap, logit_scale * (1.0 - capped * capped)
    real = None if len(head) == size else jnp.arange(len(head)) < size
    if real is not None:
        logits = jnp.where(real, logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1)
    hit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    if label_smoothing:
        hit = (1.0 - label_smoothing) * hit + label_smoothing * logits.mean(-1, where=real)
    losses = lse - hit + z_loss * lse * lse if z_loss else lse - hit
    if not gradients:
        return losses, None, None
    chosen = (jnp.arange(len(head), dtype=targets.dtype) == targets[..., None]).astype(jnp.float32)
    wanted = chosen * (1.0 - label_smoothing) + label_smoothing / size if label_smoothing else chosen
    probabilities = jnp.exp(logits - lse[..., None])
    if z_loss:
        probabilities = probabilities * (1.0 + 2.0 * z_loss * lse[..., None])
    dlogits = (probabilities - wanted) * weights[..., None] * slope
    dlogits = dlogits.astype(hidden.dtype)  # behind the vocabulary they multiply zeros, and the head's are cut off
    dhidden = jnp.einsum("btv,vd->btd", dlogits, head, precision=precision)
    dhead = None
    if head_gradient:
        dhead = jnp.einsum("btv,btd->vd", dlogits, hidden, preferred_element_type=jnp.float32, precision=precision)
    return losses, dhidden, dhead


def forward(hidden, head, targets, weights, *, chunk_length, gradients, **options):
    """(losses float32[B, T] without their weights, dhidden in hidden's dtype or None, dhead in head's dtype or None):
    gradients of the weighted losses' sum; see api.linear_cross_entropy."""
    rows, length, _ = hidden.shape
    size = len(head)
    cast = filled_up(head.astype(hidden.dtype))
    if chunk_length >= length:
        losses, dhidden, dhead = _chunk(hidden, cast, targets, weights, gradients, size=size, **options)
        return losses, dhidden, None if dhead is None else dhead[:size].astype(head.dtype)
    count = -(-length // chunk_length)
    pad = ((0, 0), (0, count * chunk_length - length))
    hidden, targets, weights = jnp.pad(hidden, (*pad, (0, 0))), jnp.pad(targets, pad), jnp.pad(weights, pad)

    def one(dhead, index):
        at = index * chunk_length
        h, t, w = (jax.lax.dynamic_slice_in_dim(a, at, chunk_length, 1) for a in (hidden, targets, weights))
        losses, dh, dw = _chunk(h, cast, t, w, gradients, size=size, **options)
        return None if dhead is None else dhead + dw, (losses, dh)

    def whole(chunks):  # [count, B, t, ...] -> [B, T, ...]
        chunks = jnp.moveaxis(chunks, 0, 1)
        return chunks.reshape(rows, -1, *chunks.shape[3:])[:, :length]

    dhead = jnp.zeros(cast.shape, jnp.float32) if gradients and options["head_gradient"] else None
    dhead, (losses, dhidden) = jax.lax.scan(one, dhead, jnp.arange(count))
    dhidden = None if dhidden is None else whole(dhidden)
    return whole(losses), dhidden, None if dhead is None else dhead[:size].astype(head.dtype)
