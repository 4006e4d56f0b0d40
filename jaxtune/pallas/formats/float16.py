"""Rounding to float16 with the same result on every device (`as_float16`), so that quantised bytes are equal
everywhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def as_float16(x: jax.Array) -> jax.Array:
    """Rounds x, float32 of any shape, to the nearest float16 numbers, and returns them in float32. Numbers beyond
    float16's range become infinite. Int8.encode rounds weights so, because bitsandbytes quantises float16 weights, and
    quantisation-aware training the scales of q4_0 and q8_0, because GGUF files store them in float16.

    A cast is not used, because XLA may leave out a conversion to float16 and back; and reduce_precision turns float16's
    subnormal numbers, which are multiples of 2^-24, into zeros, so they are rounded separately.
    """
    subnormal = jnp.round(x * 2**24) * 2**-24
    return jnp.where(jnp.abs(x) < 2**-14, subnormal, jax.lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10))
