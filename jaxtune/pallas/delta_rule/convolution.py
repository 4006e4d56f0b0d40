"""The short causal convolution of each channel along a row, restarted with each document, and silu of it, in plain jnp:
of whole rows (`forward`), and of the next token in generation (`step`).

out[t] = silu(sum over j of weight[k - 1 - j] x[t - j]), over those j for which t - j is a token of t's document.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


@jax.checkpoint
def forward(x, weight, layout):
    """Returns silu of the causal convolution of each channel of x [B, T, C] along its document, [B, T, C] in x's dtype,
    0 at padding. weight [C, k]: the last column multiplies the token itself, the first the token k - 1 before it.
    layout: the document bounds, which the convolution does not cross. The derivative stores x and weight and recomputes
    the float32 sums, which are twice as large as a 16-bit x. short_convolution calls this."""
    length, taps = x.shape[1], weight.shape[1]
    index = jnp.arange(length)
    total = jnp.zeros(x.shape, jnp.float32)
    for back in range(min(taps, length)):
        inside = index - back >= layout.doc_start
        earlier = jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, :length].astype(jnp.float32)
        total = total + jnp.where(inside[..., None], earlier, 0.0) * weight[:, taps - 1 - back].astype(jnp.float32)
    return jnp.where((index < layout.doc_end)[..., None], jax.nn.silu(total), 0.0).astype(x.dtype)


def step(x, weight, window):
    """Returns (out [B, 1, C] in x's dtype, silu of the convolution; the next window [B, k - 1, C]) for one more token x
    [B, 1, C] of each row in generation. weight [C, k]: the last column multiplies the token itself. window [B, k - 1,
    C]: the k - 1 tokens before it, in order, 0 where there were none; the next one ends with x. short_convolution_step
    calls this."""
    seen = jnp.concatenate([window, x], axis=1)
    total = (seen.astype(jnp.float32) * weight.T.astype(jnp.float32)).sum(1, keepdims=True)
    return jax.nn.silu(total).astype(x.dtype), seen[:, 1:]
