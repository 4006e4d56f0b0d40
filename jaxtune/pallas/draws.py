"""Random numbers of an array whose rows are divided: each part draws what the whole would have there.

Numbers are hashes (threefry2x32, as jax.random's) of where they stand, so any part can be drawn alone, and again.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

_CHOICES = 1 << 16  # of a mask's numbers: a hash has 64 bits, for four of them


def uniform(key: jax.Array, shape: tuple[int, int], part: jax.Array | int = 0) -> jax.Array:
    """float32[shape] of at least 0 and below 1: `part` of what is drawn for as many parts as there are, in order, each
    of `shape`. Part 0 of a threefry2x32 key is what jax.random.uniform draws.

    Raises:
      ValueError: 2^16 columns or more.
    """
    one, other = _hashes(key, shape, part)
    digits = ((one ^ other) >> 9) | jnp.uint32(0x3F800000)  # as jax.random.uniform: 1 to 2
    return jax.lax.bitcast_convert_type(digits, jnp.float32) - 1.0


def mask(key: jax.Array, shape: tuple[int, int], rate: float, part: jax.Array | int = 0) -> jax.Array:
    """bool[shape], False with probability `rate`, to the nearest of 2^-16; part as in `uniform`.

    Raises:
      ValueError: 2^18 columns or more.
    """
    one, other = _hashes(key, (shape[0], -(-shape[1] // 4)), part)
    numbers = (one & 0xFFFF, one >> 16, other & 0xFFFF, other >> 16)
    least = jnp.uint32(round(rate * _CHOICES))
    # Made before they are joined: fused with what reads the mask, a hash would be made for each of its four numbers.
    parts = jax.lax.optimization_barrier([number >= least for number in numbers])
    return jnp.concatenate(parts, 1)[:, : shape[1]]


def _hashes(key: jax.Array, shape: tuple[int, int], part: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """Two words, each uint32[shape], for every element of `part` of an array: a hash of its number in the whole, row *
    width + column, which has 64 bits in two words. jax.random.bits is one ^ the other."""
    rows = jnp.asarray(part, jnp.uint32) * jnp.uint32(shape[0]) + jnp.arange(shape[0], dtype=jnp.uint32)
    return hashes_of_rows(key, rows, shape[1])


def hashes_of_rows(key: jax.Array, rows: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """The two words of each element of these rows, numbered by uint32, of an array as wide."""
    if width >= 1 << 16:
        raise ValueError(f"random numbers of a row come of {width} hashes; there may be {(1 << 16) - 1}")
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        threefry = str(jax.random.key_impl(key)) == "threefry2x32"
        key = jax.random.key_data(key) if threefry else jax.random.bits(key, (2,), jnp.uint32)
    lower, upper = (rows & 0xFFFF) * jnp.uint32(width), (rows >> 16) * jnp.uint32(width)
    first = (lower + (upper << 16))[:, None]
    high = ((upper >> 16) + (first[:, 0] < lower).astype(jnp.uint32))[:, None]
    low = first + jnp.arange(width, dtype=jnp.uint32)
    one, other = threefry2x32_p.bind(key[0], key[1], high + (low < first).astype(jnp.uint32), low)
    return one, other
