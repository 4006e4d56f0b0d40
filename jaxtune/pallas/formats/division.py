"""Division of float32 numbers with the same result on every device, so that quantised bytes are equal everywhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def divide(x: jax.Array, y: jax.Array) -> jax.Array:
    """x / y of float32 arrays of one shape, rounded to the nearest float32 on every device.

    XLA's own division on an NVIDIA GPU (div.full.f32) may be two units in the last place off. It stays where x, y or
    the quotient is zero, subnormal or not finite.
    """
    return _rounded_quotient(x, y, x / y)


def _rounded_quotient(x: jax.Array, y: jax.Array, quotient: jax.Array) -> jax.Array:
    """The float32 nearest to x / y; `quotient` may be a few units in the last place off."""

    def fields(value):  # value = mantissa * 2^(exponent - 150)
        bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
        return (bits & 0x7FFFFF) | 0x800000, ((bits >> 23) & 0xFF).astype(jnp.int32)

    (mx, ex), (my, ey) = fields(x), fields(y)
    for _ in range(2):  # the second time is for a correction that crosses a power of two
        mq, eq = fields(quotient)
        # x - y * quotient, exact: it is a few times my, so 32 bits of the product are enough.
        shift = (ex - ey - eq + 150).astype(jnp.uint32)
        remainder = jax.lax.bitcast_convert_type((mx << shift) - my * mq, jnp.int32)
        divisor = my.astype(jnp.int32)
        units = jnp.floor_divide(2 * remainder + divisor, 2 * divisor)
        bits = jax.lax.bitcast_convert_type(quotient, jnp.int32) + units
        normal = (ex > 0) & (ey > 0) & (ey < 255) & (eq > 0) & (eq < 255)
        quotient = jnp.where(normal, jax.lax.bitcast_convert_type(bits, jnp.float32), quotient)
    return quotient
