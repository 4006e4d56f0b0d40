"""Division with the same result on every device, so that quantised bytes are equal everywhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def divide(x: jax.Array, y: jax.Array) -> jax.Array:
    """x / y in float32, correctly rounded. XLA's own division on an NVIDIA GPU (div.full.f32) may be off by two
    units."""
    return _rounded_quotient(x, y, x / y)


def _rounded_quotient(x: jax.Array, y: jax.Array, quotient: jax.Array) -> jax.Array:
    """The float32 that is nearest to x / y, from a `quotient` of the device that is at most a few units in the last
    place off. All three are float32 of one shape.

    The correction is exact where x, y and the quotient are normal numbers; elsewhere `quotient` itself is returned.
    """

    def parts(value):  # value = mantissa * 2^(exponent - 150)
        bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
        return (bits & 0x7FFFFF) | 0x800000, ((bits >> 23) & 0xFF).astype(jnp.int32)

    (mx, ex), (my, ey) = parts(x), parts(y)
    for _ in range(2):  # the second time is for a correction that crosses a power of two
        mq, eq = parts(quotient)
        # x - y * quotient, exact: it is a few times my, so 32 bits of the product are enough.
        shift = (ex - ey - eq + 150).astype(jnp.uint32)
        rest = jax.lax.bitcast_convert_type((mx << shift) - my * mq, jnp.int32)
        divisor = my.astype(jnp.int32)
        units = jnp.floor_divide(2 * rest + divisor, 2 * divisor)
        bits = jax.lax.bitcast_convert_type(quotient, jnp.int32) + units
        normal = (ex > 0) & (ey > 0) & (ey < 255) & (eq > 0) & (eq < 255)
        quotient = jnp.where(normal, jax.lax.bitcast_convert_type(bits, jnp.float32), quotient)
    return quotient
