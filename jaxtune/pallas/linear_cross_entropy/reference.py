"""linear_cross_entropy in jnp: a loop over chunks of the row length, so that rows stay divided over a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def _chunk(hidden, head, targets, weights, soft_cap, logit_scale, head_gradient, gradients):
    """(loss, dhidden, dhead) of one chunk [B, t, ...]; dhead is fp32."""
    precision = jax.lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    logits = jnp.einsum("btd,vd->btv", hidden, head, preferred_element_type=jnp.float32, precision=precision)
    if logit_scale != 1.0:
        logits = logits * logit_scale
    slope = logit_scale
    if soft_cap is not None:
        capped = jnp.tanh(logits / soft_cap)
        logits, slope = capped * soft_cap, logit_scale * (1.0 - capped * capped)
    lse = jax.nn.logsumexp(logits, axis=-1)
    hit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    loss = (weights * (lse - hit)).sum()
    if not gradients:
        return loss, None, None
    chosen = jnp.arange(head.shape[0], dtype=targets.dtype) == targets[..., None]
    dlogits = (jnp.exp(logits - lse[..., None]) - chosen) * weights[..., None] * slope
    dlogits = dlogits.astype(hidden.dtype)
    dhidden = jnp.einsum("btv,vd->btd", dlogits, head, precision=precision)
    dhead = None
    if head_gradient:
        dhead = jnp.einsum("btv,btd->vd", dlogits, hidden, preferred_element_type=jnp.float32, precision=precision)
    return loss, dhidden, dhead


def forward(hidden, head, targets, weights, *, soft_cap, logit_scale, head_gradient, chunk_length, gradients):
    """(loss, dhidden in hidden's dtype or None, dhead in head's dtype or None); see api.linear_cross_entropy."""
    rows, length, dim = hidden.shape
    cast = head.astype(hidden.dtype)
    options = (soft_cap, logit_scale, head_gradient, gradients)
    if chunk_length >= length:
        loss, dhidden, dhead = _chunk(hidden, cast, targets, weights, *options)
        return loss, dhidden, None if dhead is None else dhead.astype(head.dtype)
    count = -(-length // chunk_length)
    pad = ((0, 0), (0, count * chunk_length - length))
    hidden, targets, weights = jnp.pad(hidden, (*pad, (0, 0))), jnp.pad(targets, pad), jnp.pad(weights, pad)

    def one(carry, index):
        loss, dhead = carry
        at = index * chunk_length
        h, t, w = (jax.lax.dynamic_slice_in_dim(a, at, chunk_length, 1) for a in (hidden, targets, weights))
        part, dh, dw = _chunk(h, cast, t, w, *options)
        return (loss + part, None if dhead is None else dhead + dw), dh

    dhead = jnp.zeros(head.shape, jnp.float32) if gradients and head_gradient else None
    (loss, dhead), dhidden = jax.lax.scan(one, (jnp.float32(0), dhead), jnp.arange(count))
    if dhidden is not None:
        dhidden = jnp.moveaxis(dhidden, 0, 1).reshape(rows, -1, dim)[:, :length]
    return loss, dhidden, None if dhead is None else dhead.astype(head.dtype)
