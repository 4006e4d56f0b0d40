"""Random numbers of an array whose rows are divided: each part draws the numbers that the whole array would have there.

A number is a hash (threefry2x32, as in jax.random) of its position, so any part can be drawn alone, and again.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

_CHOICES = 1 << 16  # values of a mask's random number: a hash has 64 bits, enough for four numbers


def uniform(key: jax.Array, shape: tuple[int, int], part: jax.Array | int = 0) -> jax.Array:
    """float32[shape], uniform in [0, 1): `part` of an array that consists of parts of this shape, in order, along its
    rows. Part 0 for a threefry2x32 key is what jax.random.uniform draws.

    Args:
      key: of jax.random, typed or uint32[2].
      shape: (rows, columns) of a part.
      part: the number of the part, for example of the device that has these rows.
    Raises:
      ValueError: 2^16 columns or more.
    """
    one, other = _hashes(key, shape, part)
    digits = ((one ^ other) >> 9) | jnp.uint32(0x3F800000)  # as jax.random.uniform: 1 to 2
    return jax.lax.bitcast_convert_type(digits, jnp.float32) - 1.0


def mask(key: jax.Array, shape: tuple[int, int], rate: float, part: jax.Array | int = 0) -> jax.Array:
    """bool[shape], False with probability `rate`, for dropout: `part` of a mask that consists of parts of this shape,
    in order, along its rows.

    Args:
      key: of jax.random, typed or uint32[2].
      shape: (rows, columns) of a part.
      rate: from 0 to below 1, rounded to the nearest multiple of 2^-16.
      part: the number of the part, for example of the device that has these rows.
    Raises:
      ValueError: 2^18 columns or more.
    """
    one, other = _hashes(key, (shape[0], -(-shape[1] // 4)), part)
    numbers = (one & 0xFFFF, one >> 16, other & 0xFFFF, other >> 16)
    least = jnp.uint32(round(rate * _CHOICES))
    # The barrier computes hashes once: fused with the mask's reader, a hash would be computed for each of its numbers.
    parts = jax.lax.optimization_barrier([number >= least for number in numbers])
    return jnp.concatenate(parts, 1)[:, : shape[1]]


def _hashes(key: jax.Array, shape: tuple[int, int], part: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """Two arrays uint32[shape] with a hash of each element of `part` of an array that consists of parts of this shape,
    along its rows. The hash is that of the element's number in the whole array, row * width + column, under the key, as
    jax.random computes it; jax.random.bits is the xor of the two arrays."""
    rows = jnp.asarray(part, jnp.uint32) * jnp.uint32(shape[0]) + jnp.arange(shape[0], dtype=jnp.uint32)
    return hashes_of_rows(key, rows, shape[1])


def hashes_of_rows(key: jax.Array, rows: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Two arrays uint32[rows, width] with a hash of each element of some rows of an array with `width` columns, for
    draws that need single rows. The hash is that of the element's number in the array, row * width + column, so it does
    not depend on which other rows are asked for.

    Args:
      key: of jax.random, typed or uint32[2].
      rows: uint32[rows], the numbers of the rows in the whole array.
      width: the number of hashes in a row.
    Raises:
      ValueError: 2^16 columns or more.
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
    one, other = threefry2x32_p.bind(key[0], key[1], high + (low < first).astype(jnp.uint32), low)
    return one, other
