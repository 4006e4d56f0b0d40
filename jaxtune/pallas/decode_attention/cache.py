"""The key/value cache that decode_attention reads: its layout and capacity (`cache_capacity`), and how prompts
(`cache_of`) and new tokens (`written`) are put into it.

A cache of keys, and one of values, is an array [rows, kv_heads, capacity, D]. The keys of one head of one row are
contiguous, so that a kernel reads them as one piece. The token at position p of its row is at index p % capacity. In a
layer with a sliding window the cache can therefore be shorter than the text: it is a ring, in which a new token
replaces one that no later token sees. The row's length determines where the ring begins; attention does not depend on
the order of keys.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtune.pallas.arguments import INTEGERS, Arguments
from jaxtune.pallas.meshes import on_any_mesh

CAPACITY_STEP = 128  # a multiple of the number of keys in every kernel's tile


def cache_capacity(tokens: int, window: int | None = None) -> int:
    """The capacity of a cache for rows of up to `tokens` tokens, in a layer with this sliding window or None.

    It is the number of tokens, or the window if that is smaller, rounded up to a multiple of CAPACITY_STEP (128), which
    kernels require.

    tokens: those of the prompt and the sampled ones. window: how many tokens a token sees, itself included; None: all.

    >>> cache_capacity(700), cache_capacity(700, window=128)
    (768, 128)

    Raises:
      TypeError, ValueError: an argument that is not a positive integer.
    """
    check = Arguments("cache_capacity")
    check.number("tokens", tokens, whole=True, least=1)
    check.number("window", window, whole=True, least=1, optional=True)
    needed = tokens if window is None else min(tokens, window)
    return -(-needed // CAPACITY_STEP) * CAPACITY_STEP


@on_any_mesh
def cache_of(tokens: jax.Array, lengths: jax.Array, capacity: int) -> jax.Array:
    """Makes a cache from the keys, or the values, of prompts, which have been computed for all of their tokens at once
    (prefill). The token at position p of a row is put at index p % capacity.

    Args:
      tokens: [B, T, kv_heads, D], any dtype; entries past a row's length are ignored, and must be finite.
      lengths: int32[B], tokens of each row, from 0 to T.
      capacity: how many tokens of a row the cache has room for. Of a longer row, the last `capacity` tokens are kept.
    Returns:
      [B, kv_heads, capacity, D] in the dtype of `tokens`. Places without a token hold finite numbers without a meaning.
    Raises:
      TypeError, ValueError: an argument does not fit this description.
    """
    check = Arguments("cache_of")
    check.array("tokens", tokens, "B T kv_heads D", str(tokens.dtype))
    check.array("lengths", lengths, "B", INTEGERS)
    check.number("capacity", capacity, whole=True, least=1)
    length = tokens.shape[1]
    if capacity >= length:
        kept = jnp.pad(tokens, ((0, 0), (0, capacity - length), (0, 0), (0, 0)))
    else:
        last = jnp.asarray(lengths, jnp.int32)[:, None] - 1
        position = last - (last - jnp.arange(capacity, dtype=jnp.int32)) % capacity  # the latest position at each index
        kept = jnp.take_along_axis(tokens, jnp.maximum(position, 0)[..., None, None], axis=1)
    return jnp.swapaxes(kept, 1, 2)


@on_any_mesh
def written(cache: jax.Array, new: jax.Array, positions: jax.Array) -> jax.Array:
    """Writes the key or the value of one new token of each row into the cache, at the index `position % capacity`, and
    returns it: a step of decoding, before decode_attention reads the cache.

    Args:
      cache: [B, kv_heads, capacity, D].
      new: [B, kv_heads, D], the keys, or the values, of the new tokens, in the cache's dtype.
      positions: int32[B], position of each new token, which is the number of tokens before it. Rows with a negative
        position are not changed.
    Returns:
      the cache; it is not copied if the old one is donated or not read again.
    Raises:
      TypeError, ValueError: an argument does not fit this description.
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
