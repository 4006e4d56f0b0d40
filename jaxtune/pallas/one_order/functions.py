"""Functions of single numbers, as a CPU computes them in one order: by additions, multiplications and divisions alone,
because XLA has several exponentials for a CPU, with other last bits, and chooses by the shape of a loop.

Computed in float32, rounded to the argument's dtype; derivatives are those of the functions. No sum adds two rounded
products, so that nothing depends on which of them is contracted with the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

_LEAST, _MOST = -87.33654, 88.72283  # of exp: below, zero, as a CPU may flush what is not normal; above, infinite
_LOG2_HIGH = 0.693359375  # 9 bits: its products with exponents are exact
_LOG2_LOW = math.log(2) - _LOG2_HIGH
_SMALL = 0.625  # up to here tanh is a polynomial
# Least squares at Chebyshev's nodes: (tanh(x) / x - 1) / x^2 by x^2 up to _SMALL^2, relative error below 2e-8, and
# exp(z^2) erfc(z) / t by t = 3 / (3 + z) for z up to 10, below 3e-9.
_TANH = (-0.00610494688, 0.0210036402, -0.0538524972, 0.133327823, -0.333333291)
_ERFC = (
    0.0560373163,
    -0.293811561,
    0.539473685,
    -0.445969768,
    0.407346779,
    -0.00391391223,
    0.192817396,
    0.171281537,
    0.188703719,
    0.18803481,
)


def _of_float32(
    function: Callable[[jax.Array], jax.Array], derivative: Callable[[jax.Array, jax.Array], jax.Array]
) -> Callable[[jax.Array], jax.Array]:
    """function in its argument's dtype. derivative: of (x, function(x)), float32."""

    @jax.custom_jvp
    def computed(x):
        return function(x.astype(jnp.float32)).astype(x.dtype)

    @computed.defjvp
    def _jvp(primals, tangents):
        (x,), (dx,) = primals, tangents
        out = computed(x)
        return out, (derivative(x.astype(jnp.float32), out.astype(jnp.float32)) * dx).astype(out.dtype)

    return computed


def _polynomial(x: jax.Array, coefficients: Sequence[float]) -> jax.Array:
    """By Horner's rule. coefficients: the highest power's first."""
    out = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        out = out * x + np.float32(coefficient)
    return out


def _power_of_two(n: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type((n + 127) << 23, jnp.float32)


def _exp(x):
    inside = jnp.clip(x, _LEAST, _MOST)
    n = jnp.round(inside * np.float32(1 / math.log(2)))
    remainder = (inside - n * np.float32(_LOG2_HIGH)) - n * np.float32(_LOG2_LOW)
    series = _polynomial(remainder, [1 / math.factorial(power) for power in range(7, -1, -1)])
    n = n.astype(jnp.int32)
    half = n >> 1  # 2^128, of the largest x, is no float32
    out = series * _power_of_two(half) * _power_of_two(n - half)
    return jnp.where(x < _LEAST, 0.0, jnp.where(x > _MOST, jnp.inf, out))


def _log(x):
    """Of normal positive numbers."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    exponent = (bits - 0x3F3504F3) >> 23  # the mantissa is from sqrt(1/2) to sqrt(2)
    excess = jax.lax.bitcast_convert_type(bits - (exponent << 23), jnp.float32) - 1.0
    ratio = excess / (2.0 + excess)  # log(1 + excess) = 2 atanh(ratio)
    series = excess * _polynomial(ratio * ratio, [2 / 9, 2 / 7, 2 / 5, 2 / 3, 2.0]) / (2.0 + excess)
    exponent = exponent.astype(jnp.float32)
    return (series + exponent * np.float32(_LOG2_LOW)) + exponent * np.float32(_LOG2_HIGH)


def _sigmoid(x):
    return 1.0 / (1.0 + _exp(-x))


def _tanh(x):
    small = jnp.clip(x, -_SMALL, _SMALL)
    square = small * small
    small = small + (small * square) * _polynomial(square, _TANH)
    large = 1.0 - 2.0 / (1.0 + _exp(2.0 * jnp.abs(x)))
    return jnp.where(jnp.abs(x) <= _SMALL, small, jnp.where(x < 0, -large, large))


def _erfc(x):
    size = jnp.minimum(jnp.abs(x), 10.0)
    t = 3.0 / (3.0 + size)
    out = _exp(-size * size) * (t * _polynomial(t, _ERFC))
    return jnp.where(x < 0, 2.0 - out, out)


exp = _of_float32(_exp, lambda _, out: out)
log = _of_float32(_log, lambda x, _: 1.0 / x)
sigmoid = _of_float32(_sigmoid, lambda _, out: out * (1.0 - out))
tanh = _of_float32(_tanh, lambda _, out: 1.0 - out * out)
erfc = _of_float32(_erfc, lambda x, _: -2.0 / math.sqrt(math.pi) * jnp.exp(-x * x))


def silu(x: jax.Array) -> jax.Array:
    """x sigmoid(x)."""
    return x * sigmoid(x)


def gelu(x: jax.Array) -> jax.Array:
    """x times the normal distribution below x."""
    return 0.5 * x * erfc(x * np.float32(-math.sqrt(0.5)))


def gelu_tanh(x: jax.Array) -> jax.Array:
    """gelu with tanh in the distribution's stead, (1 + tanh(y)) / 2 = sigmoid(2 y)."""
    cubic = x * (x * x) * np.float32(0.044715)
    return x * sigmoid((x + cubic) * np.float32(2 * math.sqrt(2 / math.pi)))
