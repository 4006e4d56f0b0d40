"""quant_matmul in plain jnp: vendor GEMMs through XLA. fp32 accumulation; fp32 operands are multiplied in full fp32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def _dot(x, weight):
    """x [..., in] times weight [out, in] -> [..., out] in x's dtype."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight.astype(x.dtype), contract, precision=precision)


def dropout(x, rate, key):
    """Inverted dropout: zero with probability `rate`, the rest scaled by 1 / (1 - rate)."""
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


def matmul(x, weights, loras, biases, dropout_rate, dropout_key):
    """See api.quant_matmul."""
    outputs = [_dot(x, weight) for weight in weights]
    adapted = [i for i, lora in enumerate(loras) if lora is not None]
    if adapted:
        source = x if dropout_key is None or dropout_rate == 0.0 else dropout(x, dropout_rate, dropout_key)
        # One thin product for all A's that share x: it is bound by reading x.
        inner = _dot(source, jnp.concatenate([loras[i].a.astype(x.dtype) for i in adapted], axis=0))
        at = 0
        for i in adapted:
            lora = loras[i]
            rank = lora.a.shape[0]
            part = inner[..., at : at + rank]
            at += rank
            part = part if lora.scale == 1.0 else (part * lora.scale).astype(x.dtype)
            outputs[i] = outputs[i] + _dot(part, lora.b)
            if lora.row_scale is not None:
                outputs[i] = (outputs[i] * lora.row_scale).astype(x.dtype)
    return tuple(
        out if bias is None else out + bias.astype(out.dtype) for out, bias in zip(outputs, biases, strict=True)
    )
