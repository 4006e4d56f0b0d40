"""The public function."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch
from jaxtune.pallas.linear_cross_entropy import reference


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _loss(hidden, head, targets, weights, static):
    return reference.forward(hidden, head, targets, weights, **dict(static), gradients=False)[0]


def _loss_fwd(hidden, head, targets, weights, static):
    loss, dhidden, dhead = reference.forward(hidden, head, targets, weights, **dict(static), gradients=True)
    return loss, (dhidden, dhead)


def _loss_bwd(static, residuals, dloss):
    dhidden, dhead = residuals
    dhidden = (dhidden.astype(jnp.float32) * dloss).astype(dhidden.dtype)
    return dhidden, None if dhead is None else dhead * dloss.astype(dhead.dtype), None, None


_loss.defvjp(_loss_fwd, _loss_bwd)


def linear_cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    soft_cap: float | None = None,
    logit_scale: float = 1.0,
    head_gradient: bool = True,
    chunk_tokens: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sum of weighted token losses; [B, T, V] logits never exist, gradients are computed chunk by chunk in the forward.

    logits = hidden head^T * logit_scale, then soft_cap * tanh(logits / soft_cap); all softmax arithmetic is fp32.

    Args:
      hidden: [B, T, D]; head: [V, D], cast to hidden's dtype for the product.
      targets: int32[B, T] in [0, V); weights: float32[B, T], 0 where a target does not count.
      head_gradient: False for a frozen head: its gradient is neither computed nor kept (it comes back as zero).
      chunk_tokens: tokens whose logits exist at a time; the default keeps them near 1 GB. Results do not depend on it
        beyond the order of fp32 sums.
    Returns:
      (loss_sum, count): float32 scalars, sum of weights * nll and sum of weights.
    """
    rows, length, _ = hidden.shape
    if chunk_tokens is None:
        chunk_tokens = max(1, (1 << 28) // head.shape[0])
    static = (
        ("soft_cap", soft_cap),
        ("logit_scale", logit_scale),
        ("head_gradient", head_gradient),
        ("chunk_length", max(1, min(length, chunk_tokens // rows))),
    )
    weights = weights.astype(jnp.float32)
    return _loss(hidden, head, targets, weights, static), weights.sum()


def implementations() -> dispatch.Table:
    """The implementations in the order in which they are tried; there is one, for every call."""
    return {"reference": lambda: None}
