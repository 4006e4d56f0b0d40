"""Encoders and decoders of GGUF's types with blocks of 32 neighbouring numbers, a block in each row, which share a
scale d in f16, and in Q5_1 a smallest value m in f16:

| type | bytes | a number is |
|---|---|---|
| Q8_0 | 34 | d * code, code an int8 |
| Q4_0 | 18 | d * (code - 8), code of 4 bits |
| Q5_0 | 22 | d * (code - 16), code of 5 bits |
| Q5_1 | 24 | d * code + m, code of 5 bits |

The bytes equal those of the gguf package, but weights that QAT in 16 bits (`dtype`) rounded to Q8_0 or Q4_0 keep its
scales, which have fewer bits (models/qat/gguf_grids.py).
"""

from __future__ import annotations

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtune.models.qat.gguf_grids import inverse, q8_0_codes, signed_codes
from jaxtune.pallas.formats.division import divide

NUMBERS = 32  # numbers of a row in a block


def _bytes_of(scales: jax.Array) -> jax.Array:
    """float32[n, 1] rounded to f16 as uint8[n, 2], the lower byte first."""
    return lax.bitcast_convert_type(scales[:, 0].astype(jnp.float16), jnp.uint8)


def _f16_of(pair: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(pair, jnp.float16).astype(jnp.float32)[:, None]


def encode_q8_0(blocks: jax.Array, dtype: str = "float32") -> jax.Array:
    """float32[n, 32] -> uint8[n, 34]: d in f16, then 32 int8 from -127 to 127. dtype: in which QAT rounded the numbers
    to Q8_0, to encode them exactly; "float32" also without QAT.
    """
    scales, codes = q8_0_codes(blocks, dtype)
    return jnp.concatenate([_bytes_of(scales), lax.bitcast_convert_type(codes.astype(jnp.int8), jnp.uint8)], -1)


def decode_q8_0(coded: jax.Array) -> jax.Array:
    """uint8[n, 34] -> float32[n, 32]."""
    return _f16_of(coded[:, :2]) * lax.bitcast_convert_type(coded[:, 2:], jnp.int8).astype(jnp.float32)


def _halves(codes: jax.Array) -> jax.Array:
    """Low four bits of uint8[n, 32] in uint8[n, 16]: byte i has code i in its low half, i + 16 in its high."""
    return (codes[:, :16] & 15) | (codes[:, 16:] << 4)


def _fifth_bits(codes: jax.Array) -> jax.Array:
    """Fifth bits of uint8[n, 32] in uint8[n, 4]: bit j of byte i is code 8 i + j's."""
    shifts = jnp.arange(8, dtype=jnp.uint8)
    return (codes.reshape(-1, 4, 8) >> 4 << shifts).sum(-1, dtype=jnp.uint8)


def _five_bits(high: jax.Array, low: jax.Array) -> jax.Array:
    """float32[n, 32] from 0 to 31 of `_fifth_bits` and `_halves`."""
    fifth = (high[..., None] >> jnp.arange(8, dtype=jnp.uint8) & 1).reshape(-1, NUMBERS)
    return (jnp.concatenate([low & 15, low >> 4], -1) | (fifth << 4)).astype(jnp.float32)


def encode_q4_0(blocks: jax.Array, dtype: str = "float32") -> jax.Array:
    """float32[n, 32] -> uint8[n, 18]: d in f16, then 32 codes of four bits. dtype: in which QAT rounded the numbers to
    Q4_0, to encode them exactly; "float32" also without QAT.
    """
    scales, codes = signed_codes(blocks, 8, dtype)
    return jnp.concatenate([_bytes_of(scales), _halves(codes.astype(jnp.uint8))], -1)


def decode_q4_0(coded: jax.Array) -> jax.Array:
    """uint8[n, 18] -> float32[n, 32]."""
    codes = jnp.concatenate([coded[:, 2:] & 15, coded[:, 2:] >> 4], -1)
    return _f16_of(coded[:, :2]) * (codes.astype(jnp.float32) - 8)


def encode_q5_0(blocks: jax.Array) -> jax.Array:
    """float32[n, 32] -> uint8[n, 22]: d in f16, 4 bytes of fifth bits, 16 of low bits."""
    scales, wide = signed_codes(blocks, 16)
    codes = wide.astype(jnp.uint8)
    return jnp.concatenate([_bytes_of(scales), _fifth_bits(codes), _halves(codes)], -1)


def decode_q5_0(coded: jax.Array) -> jax.Array:
    """uint8[n, 22] -> float32[n, 32]."""
    return _f16_of(coded[:, :2]) * (_five_bits(coded[:, 2:6], coded[:, 6:]) - 16)


def encode_q5_1(blocks: jax.Array) -> jax.Array:
    """float32[n, 32] -> uint8[n, 24]: d and m in f16, 4 bytes of fifth bits, 16 of low bits."""
    least, most = blocks.min(-1, keepdims=True), blocks.max(-1, keepdims=True)
    scales = divide(most - least, jnp.full_like(most, 31))
    numbers = lax.optimization_barrier((blocks - least) * inverse(scales)) + jnp.float32(0.5)
    codes = jnp.clip(jnp.trunc(numbers), 0, 31).astype(jnp.uint8)
    return jnp.concatenate([_bytes_of(scales), _bytes_of(least), _fifth_bits(codes), _halves(codes)], -1)


def decode_q5_1(coded: jax.Array) -> jax.Array:
    """uint8[n, 24] -> float32[n, 32]."""
    return _f16_of(coded[:, :2]) * _five_bits(coded[:, 4:8], coded[:, 8:]) + _f16_of(coded[:, 2:4])


def allowed(
    blocks: jax.Array | np.ndarray, numpy: ModuleType, *, steps: int, worst: float, f16: int = 1
) -> jax.Array | np.ndarray:
    """float32[n, 1]: a bound on the error of rounding in each block, with what f16 adds. M is the block's largest
    magnitude.

      blocks: float32[n, numbers of a block].
      numpy: numpy or jax.numpy.
      steps: a step between codes is M / steps.
      worst: in steps: 0.5 for Q8_0; 1 for Q4_0 and Q5_0, which have no code for one of M and -M; 1 for Q5_1, whose
        steps divide a range of up to 2 M.
      f16: in 2^-11 M: 1 for a scale; 3 for Q5_1, whose scale is multiplied up to 2 M and which has m.
    """
    largest = numpy.abs(blocks).max(-1, keepdims=True)
    return largest * numpy.float32(worst * 1.001 / steps + f16 * 2.0**-11) + numpy.float32(steps * 2.0**-25)
