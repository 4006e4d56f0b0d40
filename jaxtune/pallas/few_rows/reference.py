"""The operations of a decoding step in plain jnp, which define their results. api.py describes the arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtune.pallas.decode_attention.cache import written
from jaxtune.pallas.gated import ACTIVATIONS


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [N, in] times the transpose of a weight [out, in]: [N, out] in x's dtype; float32 is multiplied in full
    float32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jnp.einsum("ni,oi->no", x, weight, precision=precision, preferred_element_type=x.dtype)


def products(x, weights):
    """The products x [N, in] weight^T of all weights [out_i, in] side by side, as one partial sum: [1, N, sum of
    out_i]."""
    return jnp.concatenate([_product(x, weight) for weight in weights], axis=-1)[None]


def gated_product(x, gate, up, activation):
    """activation(x gate^T) * (x up^T), [N, out] in x's dtype: x is [N, in], gate and up are [out, in], activation is a
    key of ACTIVATIONS."""
    return ACTIVATIONS[activation](_product(x, gate)) * _product(x, up)


def _sum(parts, dtype):
    """The sum of partial sums (parts, [splits, ...]) over the splits in ascending order, rounded to dtype."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.astype(dtype)


def _normed(x, weight, eps, offset, float32):
    """The RMS norm of x over its last axis, with its `weight`, in x's dtype, rounded as models.norm.RMSNorm does. eps
    is added to the mean square and offset to the weight; float32: the product with the weight is rounded only once
    (offset has an effect only then)."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if float32:
        return (wide * (offset + weight.astype(jnp.float32))).astype(x.dtype)
    return wide.astype(x.dtype) * weight.astype(x.dtype)


def added_norm(x, parts, weight, *, eps, offset, float32):
    """(x plus the sum of parts, the RMS norm of that), both [N, hidden] in x's dtype: x is the residual stream, parts
    [splits, N, hidden] are a product's partial sums; weight [hidden], eps, offset and float32 are the norm's, as
    `_normed` takes them."""
    added = x + _sum(parts, x.dtype)
    return added, _normed(added, weight, eps, offset, float32)


def placed(parts, keys, values, positions, table, norms, *, eps, offset, float32):
    """(query [N, heads, D], keys, values): the heads of one new token a row, normed and rotated, with keys and values
    written into the caches.

    Args:
      parts: [splits, N, (heads + 2 kv_heads) D], the partial sums of query, key and value side by side.
      keys, values: the caches, [N, kv_heads, capacity, D].
      positions: int32[N]; a negative one is not written.
      table: (cos, sin), float32[N, D / 2]; None: no rotation.
      norms: the weights [D] of the query's and the key's norm; None: no norms.
      eps, offset, float32: of these norms, as `_normed` takes them.
    """
    kv_heads, dim, rows = keys.shape[1], keys.shape[3], parts.shape[1]
    heads = parts.shape[2] // dim - 2 * kv_heads
    each = _sum(parts, keys.dtype).reshape(rows, -1, dim)
    query, key, value = jnp.split(each, (heads, heads + kv_heads), axis=1)
    if norms is not None:
        query, key = (
            _normed(array, weight, eps, offset, float32) for array, weight in zip((query, key), norms, strict=True)
        )
    if table is not None:
        cos, sin = (part[:, None, :] for part in table)

        def rotated(array):
            low, high = jnp.split(array.astype(jnp.float32), 2, axis=-1)
            return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(array.dtype)

        query, key = rotated(query), rotated(key)
    return query, written(keys, key, positions), written(values, value, positions)
