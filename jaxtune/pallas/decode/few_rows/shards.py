"""Columns in shards of devices, as they exchange them: [..., shards, N, columns of a shard]."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def unsharded(x):
    """[..., N, columns]"""
    *lead, shards, rows, columns = x.shape
    return jnp.swapaxes(x, -3, -2).reshape(*lead, rows, shards * columns)


def unsharded_heads(x, kv_heads: int, dim: int):
    """[splits, N, width], queries, keys and values side by side, of shards with those of kv_heads / shards each."""
    splits, shards, rows, width = x.shape
    heads, keys = width // dim, kv_heads // shards
    kinds = jnp.split(x.reshape(splits, shards, rows, heads, dim), (heads - 2 * keys, heads - keys), axis=3)
    return jnp.concatenate([unsharded(kind.reshape(splits, shards, rows, -1)) for kind in kinds], axis=-1)


def whole_shape(x, axes: int) -> jax.ShapeDtypeStruct:
    """Of `unsharded(x)`, if x has more than `axes`; of x."""
    return jax.eval_shape(unsharded, x) if x.ndim > axes else jax.ShapeDtypeStruct(x.shape, x.dtype)
