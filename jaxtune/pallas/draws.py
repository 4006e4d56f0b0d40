"""Random numbers of an array whose rows are divided over devices: each is a hash (threefry2x32) of the key and its
position in the whole array, so any rows can be drawn alone, and again in the backward.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

_CHOICES = 1 << 16  # values of a mask's random number: a hash has 64 bits, enough for four numbers


def uniform(key: jax.Array, shape: tuple[int, int], block: jax.Array | int = 0) -> jax.Array:
    """float32[shape] in [0, 1), multiples of 2^-23, for block `block` of rows of an array of such blocks. With a
    threefry2x32 key, block 0 is jax.random.uniform(key, shape). Raises ValueError for 2^16 columns or more.

      block: 0 or more, such as the device's number.
      shape: of one block. key: typed or uint32[2].
    """
    hash_a, hash_b = _hashes(key, shape, block)
    digits = ((hash_a ^ hash_b) >> 9) | jnp.uint32(0x3F800000)  # as jax.random.uniform: 1 to 2
    return jax.lax.bitcast_convert_type(digits, jnp.float32) - 1.0


def mask(key: jax.Array, shape: tuple[int, int], rate: float, block: jax.Array | int = 0) -> jax.Array:
    """A dropout mask bool[shape], False with the probability `rate`, for block `block` of rows of an array of such
    blocks. Nothing is scaled. Raises ValueError for more than 4 (2^16 - 1) columns.

      rate: rounded to a multiple of 2^-16.
      key: typed or uint32[2]. shape: of one block. block: 0 or more.
    """
    hash_a, hash_b = _hashes(key, (shape[0], -(-shape[1] // 4)), block)
    numbers = (hash_a & 0xFFFF, hash_a >> 16, hash_b & 0xFFFF, hash_b >> 16)
    least = jnp.uint32(round(rate * _CHOICES))
    # The barrier computes hashes once: fused with the mask's reader, a hash would be computed for each of its numbers.
    columns = jax.lax.optimization_barrier([number >= least for number in numbers])
    return jnp.concatenate(columns, 1)[:, : shape[1]]


def _hashes(key: jax.Array, shape: tuple[int, int], block: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """Two uint32[shape], the threefry2x32 hash of each element's number; jax.random.bits(key, shape) is their xor."""
    rows = jnp.asarray(block, jnp.uint32) * jnp.uint32(shape[0]) + jnp.arange(shape[0], dtype=jnp.uint32)
    return hashes_of_rows(key, rows, shape[1])


def hashes_of_rows(key: jax.Array, rows: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Two uint32[n, width], hashes of the elements of rows (uint32[n]) by their numbers, row * width + column. Raises
    ValueError for 2^16 columns or more.

      key: typed or uint32[2]; of another kind than threefry2x32, two words are drawn and serve as the key.
    """
    if width >= 1 << 16:
        raise ValueError(f"the random numbers of a row need {width} hashes; the most is {(1 << 16) - 1}")
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        threefry = str(jax.random.key_impl(key)) == "threefry2x32"
        key = jax.random.key_data(key) if threefry else jax.random.bits(key, (2,), jnp.uint32)
    lower, upper = (rows & 0xFFFF) * jnp.uint32(width), (rows >> 16) * jnp.uint32(width)
    first = (lower + (upper << 16))[:, None]
    high = ((upper >> 16) + (first[:, 0] < lower).astype(jnp.uint32))[:, None]
    low = first + jnp.arange(width, dtype=jnp.uint32)
    hash_a, hash_b = threefry2x32_p.bind(key[0], key[1], high + (low < first).astype(jnp.uint32), low)
    return hash_a, hash_b
