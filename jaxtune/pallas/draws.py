"""Random numbers of an array whose rows are divided: each part draws what the whole would have there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p


def uniform(key: jax.Array, shape: tuple[int, int], part: jax.Array | int = 0) -> jax.Array:
    """float32[shape] of at least 0 and below 1: `part` of what is drawn for as many parts as there are, in order, each
    of `shape`; part 0 is jax.random.uniform's.

    Raises:
      ValueError: another part than 0 by a key that is not threefry2x32, or of 2^16 columns or more.
    """
    if isinstance(part, int) and part == 0:
        return jax.random.uniform(key, shape)
    rows = jnp.asarray(part, jnp.uint32) * jnp.uint32(shape[0]) + jnp.arange(shape[0], dtype=jnp.uint32)
    digits = (bits_of_rows(key, rows, shape[1]) >> 9) | jnp.uint32(0x3F800000)  # as jax.random.uniform: 1 to 2
    return jax.lax.bitcast_convert_type(digits, jnp.float32) - 1.0


def bits_of_rows(key: jax.Array, rows: jax.Array, width: int) -> jax.Array:
    """uint32[len(rows), width]: what jax.random.bits draws for these rows, numbered by uint32, of an array as wide.

    An element's bits are a hash of its number, row * width + column, which has 64 bits, in two words.
    """
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if (kind := str(jax.random.key_impl(key))) != "threefry2x32":
            raise ValueError(f"random numbers in parts: another part than 0 needs a threefry2x32 key, this is {kind}")
        key = jax.random.key_data(key)
    if width >= 1 << 16:
        raise ValueError(f"random numbers of {width} columns in parts; there may be {(1 << 16) - 1}")
    lower, upper = (rows & 0xFFFF) * jnp.uint32(width), (rows >> 16) * jnp.uint32(width)
    first = (lower + (upper << 16))[:, None]
    high = ((upper >> 16) + (first[:, 0] < lower))[:, None]
    low = first + jnp.arange(width, dtype=jnp.uint32)
    one, other = threefry2x32_p.bind(key[0], key[1], high + (low < first), low)
    return one ^ other
