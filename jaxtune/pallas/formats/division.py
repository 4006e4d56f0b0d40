"""Quotients that are the same on every device, so that the bytes of what is quantised are, too."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def divide(x: jax.Array, y: jax.Array) -> jax.Array:
    """float32 x / y, correctly rounded: XLA's own on an NVIDIA GPU (div.full.f32) may be two units off."""
    return _rounded_quotient(x, y, x / y)


def _rounded_quotient(x: jax.Array, y: jax.Array, quotient: jax.Array) -> jax.Array:
    """The float32 nearest to x / y, from one at most a few units off; all normal numbers, or `quotient` as it is."""

    def parts(value):  # value = mantissa * 2^(exponent - 150)
        bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
        return (bits & 0x7FFFFF) | 0x800000, ((bits >> 23) & 0xFF).astype(jnp.int32)

    (mx, ex), (my, ey) = parts(x), parts(y)
    for _ in range(2):  # a second time where the first one crosses a power of two
        mq, eq = parts(quotient)
        # x - y * quotient, exactly: it is a few times my, so 32 bits of the product are enough.
        shift = (ex - ey - eq + 150).astype(jnp.uint32)
        rest = jax.lax.bitcast_convert_type((mx << shift) - my * mq, jnp.int32)
        divisor = my.astype(jnp.int32)
        units = jnp.floor_divide(2 * rest + divisor, 2 * divisor)
        bits = jax.lax.bitcast_convert_type(quotient, jnp.int32) + units
        normal = (ex > 0) & (ey > 0) & (ey < 255) & (eq > 0) & (eq < 255)
        quotient = jnp.where(normal, jax.lax.bitcast_convert_type(bits, jnp.float32), quotient)
    return quotient
