"""Stochastic rounding to bfloat16. Rounded to nearest, a bf16 weight does not change under updates below 1/512 of it,
which is most of fine-tuning. Rounding up with a probability equal to the relative distance from the lower neighbour
loses none in expectation (arXiv 1502.02551, 2010.06192).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def stochastic_round(x: jax.Array, seed: jax.Array, stream: int) -> jax.Array:
    """Rounds float32 to a neighbour in bfloat16, so that the expected result is the value; what is not finite is cast.
    Equal arguments give equal bits on every device and however x is divided. Raises ValueError for more than 2^32
    elements.

      seed: uint32[2], different for each step.
      stream: different for each tensor of a step.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + random_bits(x.shape, seed, stream)
    rounded = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def random_bits(shape: tuple[int, ...], seed: jax.Array, stream: int) -> jax.Array:
    """uint32 of `shape` from 0 to 2^16 - 1, a hash of the element's row-major position, `seed` (uint32[2]) and
    `stream`. Raises ValueError for more than 2^32 elements.

    jax.random would first write its numbers to memory, twice the bytes of the bf16 weight; these twenty integer
    operations fuse with the update.

      stream: different for each tensor of a step.
    """
    if math.prod(shape) > 1 << 32:
        raise ValueError(f"stochastic_round: {shape} has more than 2^32 elements")
    position, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        position += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
        stride *= shape[axis]
    hashed = _mixed(position ^ seed[0]) + jnp.uint32(stream * 0x9E3779B9 & 0xFFFFFFFF)
    return _mixed(hashed ^ seed[1]) >> 16


def _mixed(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every bit depends on every bit of x (MurmurHash3's finaliser)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
