"""Rounding to float16 with the same result on every device, so that quantised bytes are equal everywhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def as_float16(x: jax.Array) -> jax.Array:
    """x (float32) rounded to the nearest float16 numbers, as float32; infinite beyond float16's range.

    XLA may leave out a cast to float16 and back, and reduce_precision turns float16's subnormal numbers (multiples of
    2^-24) into zeros, so these are rounded separately.
    """
    subnormal = jnp.round(x * 2**24) * 2**-24
    return jnp.where(jnp.abs(x) < 2**-14, subnormal, jax.lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10))
