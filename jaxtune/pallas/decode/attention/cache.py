"""The key/value cache of decode_attention: [rows, kv_heads, capacity, D] of keys, and the same of values.

The token at position p is at index p % capacity: with a sliding window the cache may be a ring.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtune.pallas.arguments import INTEGERS, Arguments
from jaxtune.pallas.meshes import on_any_mesh

CAPACITY_STEP = 128  # a multiple of the number of keys in every kernel's tile
_LARGEST = 448.0  # of e4m3


def as_cached(numbers: jax.Array, dtype) -> jax.Array:
    """Keys or values in a cache's dtype, at most e4m3's largest number."""
    if dtype != jnp.float8_e4m3fn:
        return numbers.astype(dtype)
    return jnp.clip(numbers, -_LARGEST, _LARGEST).astype(dtype)


def cache_capacity(tokens: int, window: int | None = None) -> int:
    """Capacity for rows of up to `tokens` tokens, prompt and sampled: that, or the window if smaller, rounded up to a
    multiple of 128, as kernels require.

    >>> cache_capacity(700), cache_capacity(700, window=128)
    (768, 128)
    """
    check = Arguments("cache_capacity")
    check.number("tokens", tokens, whole=True, least=1)
    check.number("window", window, whole=True, least=1, optional=True)
    live_tokens = tokens if window is None else min(tokens, window)
    return -(-live_tokens // CAPACITY_STEP) * CAPACITY_STEP


@on_any_mesh
def cache_of(tokens: jax.Array, lengths: jax.Array, capacity: int) -> jax.Array:
    """The cache [B, kv_heads, capacity, D] of prompts after a prefill.

    tokens: [B, T, kv_heads, D], keys or values; entries past a row's length are ignored and must be finite.
    lengths: int32[B], from 0 to T; of a row longer than `capacity` the last `capacity` tokens stay.
    """
    check = Arguments("cache_of")
    check.array("tokens", tokens, "B T kv_heads D", str(tokens.dtype))
    check.array("lengths", lengths, "B", INTEGERS)
    check.number("capacity", capacity, whole=True, least=1)
    length = tokens.shape[1]
    if capacity >= length:
        cached_tokens = jnp.pad(tokens, ((0, 0), (0, capacity - length), (0, 0), (0, 0)))
    else:
        last = jnp.asarray(lengths, jnp.int32)[:, None] - 1
        position = last - (last - jnp.arange(capacity, dtype=jnp.int32)) % capacity  # the latest position at each index
        cached_tokens = jnp.take_along_axis(tokens, jnp.maximum(position, 0)[..., None, None], axis=1)
    return jnp.swapaxes(cached_tokens, 1, 2)


@on_any_mesh
def written(cache: jax.Array, new: jax.Array, positions: jax.Array) -> jax.Array:
    """The cache [B, kv_heads, capacity, D] with the key or value of one new token of each row, in place if it can be.

    new: [B, kv_heads, D] in the cache's dtype.
    positions: int32[B], the tokens before each new one; rows with a negative position do not change.
    """
    check = Arguments("written")
    check.array("cache", cache, "B kv_heads capacity D", str(cache.dtype))
    check.array("new", new, "B kv_heads D", cache.dtype)
    check.array("positions", positions, "B", INTEGERS)
    rows, capacity = cache.shape[0], cache.shape[2]
    positions = jnp.asarray(positions, jnp.int32)
    if rows == 1:  # one kernel, where XLA makes three of a scatter with one row
        index = positions[0] % capacity
        before = jax.lax.dynamic_slice_in_dim(cache, index, 1, axis=2)
        token = jnp.where(positions[0] < 0, before, new[:, :, None])
        return jax.lax.dynamic_update_slice_in_dim(cache, token, index, axis=2)
    index = jnp.where(positions < 0, capacity, positions % capacity)
    return cache.at[jnp.arange(rows), :, index].set(new, mode="drop", unique_indices=True)
