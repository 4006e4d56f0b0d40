"""Random numbers of an array whose rows are divided over devices: each device draws for its rows the numbers that these
rows have in the whole array, so the numbers do not depend on how many devices there are.

A number is made of a hash (threefry2x32, as in jax.random) of its position in the whole array and the key, so any rows
can be drawn alone, and drawn again in the backward. `mask` draws dropout masks, for which each hash gives four numbers,
and `uniform` numbers in [0, 1). `hashes_of_rows` computes the hashes of rows, for both.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

_CHOICES = 1 << 16  # values of a mask's random number: a hash has 64 bits, enough for four numbers


def uniform(key: jax.Array, shape: tuple[int, int], part: jax.Array | int = 0) -> jax.Array:
    """Draws uniform random numbers in [0, 1) for a block of consecutive rows of a larger array: float32[shape],
    multiples of 2^-23. The array consists of blocks of this shape, one below the other. For a threefry2x32 key, block 0
    is what jax.random.uniform(key, shape) draws (with jax_threefry_partitionable, JAX's default). The noise on
    embeddings (NEFTune) is drawn so.

    Args:
      key: a key of jax.random, typed or uint32[2].
      shape: (rows, columns) of a block.
      part: which of the blocks of rows is drawn, 0 or more, for example the number of the device that has these rows.
    Raises:
      ValueError: 2^16 columns or more.
    """
    one, other = _hashes(key, shape, part)
    digits = ((one ^ other) >> 9) | jnp.uint32(0x3F800000)  # as jax.random.uniform: 1 to 2
    return jax.lax.bitcast_convert_type(digits, jnp.float32) - 1.0


def mask(key: jax.Array, shape: tuple[int, int], rate: float, part: jax.Array | int = 0) -> jax.Array:
    """Draws a dropout mask for a block of consecutive rows of a larger array: bool[shape], False (the element is
    dropped) with the probability `rate`. The array consists of blocks of this shape, one below the other. The dropout
    of LoRA's inputs is drawn so. Nothing is scaled: the caller divides what remains by 1 - rate.

    Args:
      key: a key of jax.random, typed or uint32[2].
      shape: (rows, columns) of a block.
      rate: the probability, from 0 to below 1, rounded to the nearest multiple of 2^-16.
      part: which of the blocks of rows is drawn, 0 or more, for example the number of the device that has these rows.
    Raises:
      ValueError: more than 4 (2^16 - 1) columns, because a hash gives four numbers.
    """
    one, other = _hashes(key, (shape[0], -(-shape[1] // 4)), part)
    numbers = (one & 0xFFFF, one >> 16, other & 0xFFFF, other >> 16)
    least = jnp.uint32(round(rate * _CHOICES))
    # The barrier computes hashes once: fused with the mask's reader, a hash would be computed for each of its numbers.
    parts = jax.lax.optimization_barrier([number >= least for number in numbers])
    return jnp.concatenate(parts, 1)[:, : shape[1]]


def _hashes(key: jax.Array, shape: tuple[int, int], part: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """Computes a hash of 64 bits for each element of a block of consecutive rows of a larger array, as two arrays
    uint32[shape]. It is the threefry2x32 hash of the element's number in the whole array, row * columns + column, as
    jax.random computes it; jax.random.bits(key, shape) is the xor of the two arrays of part 0. `uniform` and `mask`
    make their numbers from the hashes.

    Args:
      key: a key of jax.random, typed or uint32[2].
      shape: (rows, columns) of a block; the array consists of blocks of this shape, one below the other.
      part: which of the blocks of rows is drawn, 0 or more, for example the number of the device that has these rows.
    Raises:
      ValueError: 2^16 columns or more.
    """
    rows = jnp.asarray(part, jnp.uint32) * jnp.uint32(shape[0]) + jnp.arange(shape[0], dtype=jnp.uint32)
    return hashes_of_rows(key, rows, shape[1])


def hashes_of_rows(key: jax.Array, rows: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Computes a hash of 64 bits for each element of single rows of an array with `width` columns, as two arrays
    uint32[n, width]. The hash is that of the element's number in the array, row * width + column, under the key, so it
    does not depend on which other rows are asked for. `uniform` and `mask` are made from such hashes.
    `_hashes` calls it, for consecutive rows; nothing else in the package does.

    Args:
      key: a key of jax.random, typed or uint32[2]. Of a typed key that is not of threefry2x32, two words are drawn,
        which serve as the key.
      rows: uint32[n], the numbers of the rows in the whole array.
      width: the number of columns.
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
