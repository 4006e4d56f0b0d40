"""Encoders and decoders of GGUF's types with blocks of 32 numbers, Q8_0, Q4_0, Q5_0 and Q5_1: an `encode_` and a
`decode_` function for each, on arrays with a block in each row. `allowed` computes the largest error that rounding to
one of them can cause; a check of encoded blocks compares their errors with it. The other functions pack and unpack
scales and codes.

A block holds 32 neighbouring numbers of a row. They share a scale d in f16, and in Q5_1 also a smallest value m in f16:

| type | bytes | a number is |
|---|---|---|
| Q8_0 | 34 | d * code, code an int8 |
| Q4_0 | 18 | d * (code - 8), code of 4 bits |
| Q5_0 | 22 | d * (code - 16), code of 5 bits |
| Q5_1 | 24 | d * code + m, code of 5 bits |

The bytes equal those of the gguf package's quantize, which computes the same in numpy. The exceptions are weights that
quantisation-aware training in 16 bits rounded to Q8_0 or Q4_0 (the argument `dtype` of these two types' encoders):
their scales are those of the training, which have fewer bits (models/gguf_grids.py).

gguf_blocks.BLOCK_TYPES lists the functions for exports. Users choose Q8_0 and Q4_0 for a file; Q5_0, Q5_1 and Q8_0 also
take the place of Q4_K, Q5_K and Q6_K where rows are not whole blocks of 256.
"""

from __future__ import annotations

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtune.models.gguf_grids import inverse, q8_0_codes, signed_codes
from jaxtune.pallas.formats.division import divide

NUMBERS = 32  # numbers of a row in a block


def _bytes_of(scales: jax.Array) -> jax.Array:
    """The bytes of scales float32[n, 1] rounded to f16, the lower byte first: uint8[n, 2]. A block begins with its
    scale so, after which Q5_1 has its least number."""
    return lax.bitcast_convert_type(scales[:, 0].astype(jnp.float16), jnp.uint8)


def _f16_of(pair: jax.Array) -> jax.Array:
    """Reads f16 numbers, such as the scales of blocks, from their bytes, for the decoders: float32[n, 1]. pair:
    uint8[n, 2], the two bytes of each, the lower one first."""
    return lax.bitcast_convert_type(pair, jnp.float16).astype(jnp.float32)[:, None]


def encode_q8_0(blocks: jax.Array, dtype: str = "float32") -> jax.Array:
    """Encodes blocks float32[n, 32] in Q8_0: uint8[n, 34]. Exports to GGUF files call it. A block begins with its scale
    d in f16, and its 32 codes follow, each an int8 from -127 to 127; a code stands for the number d * code.

    dtype: the name of the dtype in which quantisation-aware training rounded the numbers to Q8_0; they are then encoded
    without an error. The default, "float32", is also right for numbers that were not rounded to Q8_0 in training."""
    scales, codes = q8_0_codes(blocks, dtype)
    return jnp.concatenate([_bytes_of(scales), lax.bitcast_convert_type(codes.astype(jnp.int8), jnp.uint8)], -1)


def decode_q8_0(coded: jax.Array) -> jax.Array:
    """Decodes blocks of Q8_0, uint8[n, 34], to float32[n, 32]: the scale, an f16 in the first two bytes, times the
    codes, int8. An export checks its encoded blocks with it."""
    return _f16_of(coded[:, :2]) * lax.bitcast_convert_type(coded[:, 2:], jnp.int8).astype(jnp.float32)


def _halves(codes: jax.Array) -> jax.Array:
    """Packs the low four bits of codes uint8[n, 32] into uint8[n, 16], for the encoders of Q4_0, Q5_0 and Q5_1. Byte i
    has those of code i in its low four bits, and those of code i + 16 in its high four."""
    return (codes[:, :16] & 15) | (codes[:, 16:] << 4)


def _fifth_bits(codes: jax.Array) -> jax.Array:
    """Packs the fifth bits (value 16) of codes uint8[n, 32] into uint8[n, 4], for the encoders of Q5_0 and Q5_1: bit j
    of byte i is that of code 8 i + j."""
    places = jnp.arange(8, dtype=jnp.uint8)
    return (codes.reshape(-1, 4, 8) >> 4 << places).sum(-1, dtype=jnp.uint8)


def _five_bits(high: jax.Array, low: jax.Array) -> jax.Array:
    """Unpacks codes of five bits, as numbers float32[n, 32] from 0 to 31, for the decoders of Q5_0 and Q5_1. high:
    uint8[n, 4], their fifth bits; bit j of byte i is that of code 8 i + j. low: uint8[n, 16], their low four bits; byte
    i has those of code i in its low half and those of code i + 16 in its high half."""
    fifth = (high[..., None] >> jnp.arange(8, dtype=jnp.uint8) & 1).reshape(-1, NUMBERS)
    return (jnp.concatenate([low & 15, low >> 4], -1) | (fifth << 4)).astype(jnp.float32)


def encode_q4_0(blocks: jax.Array, dtype: str = "float32") -> jax.Array:
    """Encodes blocks float32[n, 32] in Q4_0, for exports: uint8[n, 18]. The bytes of a block are its scale d in f16,
    then 32 codes of four bits, two in a byte; a number is d * (code - 8). dtype: the name of the dtype in which
    quantisation-aware training in Q4_0 made the numbers, which are then encoded exactly; "float32" also for numbers
    that were not trained so."""
    scales, codes = signed_codes(blocks, 8, dtype)
    return jnp.concatenate([_bytes_of(scales), _halves(codes.astype(jnp.uint8))], -1)


def decode_q4_0(coded: jax.Array) -> jax.Array:
    """Decodes blocks of Q4_0, uint8[n, 18], to float32[n, 32]. A number is d * (code - 8), with d an f16 in the first
    two bytes. An export checks its encoded blocks with it."""
    codes = jnp.concatenate([coded[:, 2:] & 15, coded[:, 2:] >> 4], -1)
    return _f16_of(coded[:, :2]) * (codes.astype(jnp.float32) - 8)


def encode_q5_0(blocks: jax.Array) -> jax.Array:
    """Encodes blocks float32[n, 32] in Q5_0, for exports: uint8[n, 22]. The bytes of a block are its scale d in f16,
    four bytes with the fifth bits of the codes, and 16 with their low four bits; a number is d * (code - 16)."""
    scales, wide = signed_codes(blocks, 16)
    codes = wide.astype(jnp.uint8)
    return jnp.concatenate([_bytes_of(scales), _fifth_bits(codes), _halves(codes)], -1)


def decode_q5_0(coded: jax.Array) -> jax.Array:
    """Decodes blocks of Q5_0, uint8[n, 22], to float32[n, 32]. A number is d * (code - 16), with d an f16 in the first
    two bytes; the other 20 have the codes (_five_bits). An export checks its encoded blocks with it."""
    return _f16_of(coded[:, :2]) * (_five_bits(coded[:, 2:6], coded[:, 6:]) - 16)


def encode_q5_1(blocks: jax.Array) -> jax.Array:
    """Encodes blocks float32[n, 32] in Q5_1, for exports: uint8[n, 24]. The bytes of a block are its scale d and its
    least number m, both in f16, four bytes with the fifth bits of the codes, and 16 with their low four bits; a number
    is d * code + m."""
    least, most = blocks.min(-1, keepdims=True), blocks.max(-1, keepdims=True)
    scales = divide(most - least, jnp.full_like(most, 31))
    numbers = lax.optimization_barrier((blocks - least) * inverse(scales)) + jnp.float32(0.5)
    codes = jnp.clip(jnp.trunc(numbers), 0, 31).astype(jnp.uint8)
    return jnp.concatenate([_bytes_of(scales), _bytes_of(least), _fifth_bits(codes), _halves(codes)], -1)


def decode_q5_1(coded: jax.Array) -> jax.Array:
    """Decodes blocks of Q5_1, uint8[n, 24], to float32[n, 32]. A number is d * code + m, with d and m as f16 in the
    first four bytes. An export checks its encoded blocks with it."""
    return _f16_of(coded[:, :2]) * _five_bits(coded[:, 4:8], coded[:, 8:]) + _f16_of(coded[:, 2:4])


def allowed(
    blocks: jax.Array | np.ndarray, numpy: ModuleType, *, steps: int, worst: float, f16: int = 1
) -> jax.Array | np.ndarray:
    """Returns a bound on the error that rounding to a type can cause in each block, with what f16 adds: float32[n, 1].
    An export ends with an error if values decode to ones that differ by more, because the encoder is wrong then.
    A step is the difference between the values of neighbouring codes.

    Args:
      blocks: the values, float32[n, 32].
      numpy: the module that computes the result, numpy or jax.numpy.
      steps: how many steps make up M, the largest magnitude in a block: a step is M / steps.
      worst: the largest error, in steps. It is 0.5 for Q8_0, which rounds to the nearest code. It is 1 for Q4_0 and
        Q5_0, which have a code for the value of magnitude M, but none for its negative. It is 1 for Q5_1 too, which
        rounds to the nearest code, but whose steps are up to twice as large, because they divide a range of up to 2 M.
      f16: what rounding the block's numbers to f16 adds, in units of 2^-11 M: 1 for a scale alone. It is 3 for Q5_1: 2
        for the scale, which codes multiply up to 2 M, and 1 for the least value.
    """
    largest = numpy.abs(blocks).max(-1, keepdims=True)
    return largest * numpy.float32(worst * 1.001 / steps + f16 * 2.0**-11) + numpy.float32(steps * 2.0**-25)
