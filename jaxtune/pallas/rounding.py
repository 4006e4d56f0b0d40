"""Stochastic rounding to bfloat16, with which small updates of a weight are right on average.

With rounding to nearest, a bf16 weight does not change under updates below 1/512 of it, which is most updates of
fine-tuning. If a value is rounded up with a probability equal to its relative distance from the lower neighbour, no
update is lost in expectation (arXiv 1502.02551, 2010.06192). `stochastic_round` rounds an array, and `random_bits`
draws the random numbers for it, also for code that rounds to other formats.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def stochastic_round(x: jax.Array, seed: jax.Array, stream: int) -> jax.Array:
    """Rounds float32 to bfloat16 of the same shape: to one of the two neighbours of each value, the nearer with the
    higher probability, so that the expected result is the value. The optimizer's step stores bf16 weights so, because
    rounding to the nearest would lose small updates. models/placement/low_format.py, which encodes the numbers that
    devices send each other, rounds to bf16 so if it is given a seed.

    A value that bfloat16 represents stays as it is; a value that is not finite is cast. The same arguments give the
    same bits on every device and however x is divided over devices. Raises ValueError for more than 2^32 elements.

    Args:
      x: the values, float32.
      seed: uint32[2], different for each step.
      stream: a number that is different for each tensor of a step.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + random_bits(x.shape, seed, stream)
    rounded = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def random_bits(shape: tuple[int, ...], seed: jax.Array, stream: int) -> jax.Array:
    """The random numbers of stochastic rounding, uint32 of `shape`, uniform from 0 to 2^16 - 1. A number is a hash of
    the element's position in row-major order, of `seed`, uint32[2], different for each step, and of `stream`, the
    number of the tensor, by which tensors of the same shape get different numbers. stochastic_round adds them to the
    bits of float32 values, of which it then keeps the upper 16; the int8 and int4 of models/placement/low_format.py
    round by them, too. Raises ValueError for more than 2^32 elements.

    jax.random would write its numbers to memory before they are used, twice the bytes of the bf16 weight itself. This
    is some twenty integer operations for each number, inside the fusion that updates the weight.
    """
    if math.prod(shape) > 1 << 32:
        raise ValueError(f"stochastic_round: {shape} has more than 2^32 elements")
    place, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        place += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
        stride *= shape[axis]
    hashed = _mixed(place ^ seed[0]) + jnp.uint32(stream * 0x9E3779B9 & 0xFFFFFFFF)
    return _mixed(hashed ^ seed[1]) >> 16


def _mixed(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every bit of the result depends on every bit of x (MurmurHash3's finaliser),
    elementwise. random_bits calls it twice: for the position of each number with the first word of the seed, and for
    the result with the stream and the second word."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
