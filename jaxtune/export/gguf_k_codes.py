"""Encoders and decoders of GGUF's types Q4_K, Q5_K and Q6_K (`encoder`, `decoder`). `allowed` computes the largest
error that rounding to one of them can cause. Each of these functions gets the type as the number of bits of its codes:
4, 5 or 6. gguf_blocks.BLOCK_TYPES has them for exports. Q4_K and Q5_K are encoded by `_with_least`, with scales from
`_best_with_least`, and Q6_K by `_signed`, with scales from `_best_signed`.

A block is 256 numbers of a row. It is divided into parts, each of which has a scale, and in Q4_K and Q5_K a least value
too. The parts' scales are themselves whole numbers, which a scale of the whole block in f16 multiplies:

| type | bytes | parts | a number is |
|---|---|---|---|
| Q4_K | 144 | 8 of 32 | d * scale * code - dmin * least, code of 4 bits, scale and least of 6 |
| Q5_K | 176 | 8 of 32 | the same, code of 5 bits |
| Q6_K | 210 | 16 of 16 | d * scale * (code - 32), code of 6 bits, scale an int8 |

The layout of the bytes is the one that the gguf package's dequantize reads; the package cannot encode these types.
Which codes are best is the writer's choice: here the scale of each part is the best of about twenty candidates by the
sum of squared errors, in which a number's error counts more the larger the number is, as in llama.cpp's own encoder
(its error is compared in tests/llama_cpp)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

NUMBERS = 256  # numbers of a row in a block
# Blocks that are encoded at a time on a CPU, so that the candidates' sums stay in its cache: it is five times as fast.
_IN_CACHE = 64
_PART, _SIGNED_PART = 32, 16  # numbers that share a scale: in Q4_K and Q5_K, and in Q6_K
_SIX_BITS = 63  # largest scale of a part in Q4_K and Q5_K
_LARGEST_SIGNED = 128  # the largest magnitude of a part's scale in Q6_K
_NORMAL_F16 = 2.0**-14  # the smallest normal number of f16
_SMALLEST_F16 = 2.0**-24  # the smallest scale of a block that is not 0


def encoder(bits: int) -> Callable[[jax.Array], jax.Array]:
    """Returns the encoder of a type, for gguf_blocks.BLOCK_TYPES: a function of blocks float32[n, 256] that returns
    uint8[n, bytes of a block]. bits: the bits of a code, 4 for Q4_K, 5 for Q5_K and 6 for Q6_K."""
    one = functools.partial(_signed if bits == 6 else _with_least, bits=bits)

    def encode(blocks: jax.Array) -> jax.Array:
        return lax.platform_dependent(
            blocks, cpu=lambda blocks: lax.map(one, blocks, batch_size=_IN_CACHE), default=jax.vmap(one)
        )

    return encode


def decoder(bits: int) -> Callable[[jax.Array], jax.Array]:
    """Returns the decoder of a type: a function of uint8[n, bytes of a block] that returns float32[n, 256], with which
    an export checks its encoded blocks. bits: the bits of a code, 4 for Q4_K, 5 for Q5_K and 6 for Q6_K."""
    return _decoded_signed if bits == 6 else functools.partial(_decoded_with_least, bits=bits)


def allowed(blocks: jax.Array | np.ndarray, numpy: ModuleType, *, bits: int) -> jax.Array | np.ndarray:
    """The largest error that rounding to a type explains, for each block of float32[n, 256]: [n, 1]. A value that is
    further off after decoding is an error of the encoder.

    It is one and a half steps, where a step is the range of the part with the largest range, in which 0 is included,
    divided by the largest code; in Q6_K, the largest magnitude divided by 32. Half a step is by rounding to a code, and
    one because the best scale may cut off what is largest, and scales and least values are rounded. A little is added
    for blocks so small that their scale in f16 is imprecise.

    Args:
      blocks: the values.
      numpy: the module that computes it, numpy or jax.numpy.
      bits: the bits of a code, 4 for Q4_K, 5 for Q5_K and 6 for Q6_K.
    """
    if bits == 6:
        largest, steps = numpy.abs(blocks).max(-1, keepdims=True), 32
    else:
        parts = blocks.reshape(len(blocks), -1, _PART)
        ranges = numpy.maximum(parts.max(-1), 0) - numpy.minimum(parts.min(-1), 0)
        largest, steps = ranges.max(-1, keepdims=True), 2**bits - 1
    return largest * numpy.float32(1.5 / steps) + numpy.float32((steps + 1) * _SMALLEST_F16)


def _quotient(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns x / y, and 0 where y is 0, so that a part of zeros, whose scale is 0, has finite codes."""
    return jnp.where(y == 0, 0, x / jnp.where(y == 0, 1, y))


def _in_f16(x: jax.Array) -> jax.Array:
    """Rounds a scalar x of at least 0 to a number of f16, and returns it in float32: the nearest one, or, where x is
    smaller than the normal numbers of f16, the next one that is not below x.

    Rounded to nearest, the scale of a block of tiny numbers could be 0, or too small for its largest part.
    """
    near = x.astype(jnp.float16)
    above = lax.bitcast_convert_type(lax.bitcast_convert_type(near, jnp.uint16) + 1, jnp.float16)
    return jnp.where((x < _NORMAL_F16) & (near.astype(jnp.float32) < x), above, near).astype(jnp.float32)


def _bytes_of(x: jax.Array) -> jax.Array:
    """The two bytes, the lower one first, of a float32 scalar rounded to f16: uint8[2]. GGUF stores a block's scale
    so."""
    return lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint8)


def _with_least(block: jax.Array, *, bits: int) -> jax.Array:
    """Encodes one block float32[256], whose eight parts each have a scale and a least value: in Q4_K, uint8[144], if
    `bits` is 4, and in Q5_K, uint8[176], if it is 5."""
    parts, top = block.reshape(-1, _PART), 2**bits - 1
    scales, least = _best_with_least(parts, top)
    block_scale, block_least = (_in_f16(each.max() / _SIX_BITS) for each in (scales, least))
    scales, least = (
        jnp.clip(jnp.round(_quotient(each, whole)), 0, _SIX_BITS)
        for each, whole in ((scales, block_scale), (least, block_least))
    )
    steps = (block_scale * scales)[:, None]
    codes = jnp.clip(jnp.round(_quotient(parts + (block_least * least)[:, None], steps)), 0, top).astype(jnp.uint8)
    pairs = codes.reshape(-1, 2, _PART)  # two parts share bytes: the first has their low halves
    low = (pairs[:, 0] & 15) | (pairs[:, 1] << 4)
    high = (codes >> 4 << jnp.arange(8, dtype=jnp.uint8)[:, None]).sum(0, dtype=jnp.uint8)
    packed = _packed(scales.astype(jnp.uint8), least.astype(jnp.uint8))
    fifth = [high] if bits == 5 else []
    return jnp.concatenate([_bytes_of(block_scale), _bytes_of(block_least), packed, *fifth, low.reshape(-1)])


def _packed(scales: jax.Array, least: jax.Array) -> jax.Array:
    """Packs the eight scales and eight least values of a block's parts, each uint8[8] of six bits, into uint8[12], as
    blocks of Q4_K and Q5_K store them.

    The first four scales are the low six bits of bytes 0 to 3, the first four least values those of bytes 4 to 7. Of
    the last four of each, the low four bits are in bytes 8 to 11 (the scale's in the low half), and the high two bits
    are the high bits of bytes 0 to 7."""
    return jnp.concatenate(
        [
            scales[:4] | (scales[4:] >> 4 << 6),
            least[:4] | (least[4:] >> 4 << 6),
            (scales[4:] & 15) | (least[4:] << 4),
        ]
    )


def _best_with_least(parts: jax.Array, top: int) -> tuple[jax.Array, jax.Array]:
    """Finds the scale and the least value of each part, for codes from 0 to `top`; a number is scale * code + least. Of
    21 candidates it takes the one with the smallest sum of squared errors, each weighted by the number's magnitude plus
    the root mean square of the part.

    A candidate divides the part's range into between top - 1 and top + 1 steps, and counts them from the least value
    that was best so far. With the codes that this gives, scale and least value follow from two linear equations. The
    least value cannot be above 0.

    Args:
      parts: float32[n, 32], a part a row.
      top: the largest code, 15 for Q4_K and 31 for Q5_K.
    Returns:
      (scales float32[n], the negatives of the least values float32[n]), both at least 0.
    """
    weights = jnp.sqrt((parts * parts).mean(-1, keepdims=True)) + jnp.abs(parts)
    smallest = jnp.minimum(parts.min(-1), 0)
    span = parts.max(-1) - smallest
    weighted = weights * parts
    one, x, xx = weights.sum(-1), weighted.sum(-1), (weighted * parts).sum(-1)

    def candidate(index: jax.Array, best: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        steps = _quotient(top - 1 + 0.1 * index, span)[:, None]
        codes = jnp.clip(jnp.round((parts - best[2][:, None]) * steps), 0, top)
        c, cc, cx = (weights * codes).sum(-1), (weights * codes * codes).sum(-1), (weighted * codes).sum(-1)
        determinant = one * cc - c * c
        determinant = jnp.where(determinant > 1e-5 * one * cc, determinant, 0)  # below this, all codes are equal
        least = jnp.minimum(_quotient(cc * x - c * cx, determinant), 0)
        scale = jnp.where(least < 0, _quotient(one * cx - c * x, determinant), _quotient(cx, cc))
        error = xx + scale * (scale * cc + 2 * least * c - 2 * cx) + least * (least * one - 2 * x)
        better = (error < best[0]) & (scale > 0)
        return tuple(jnp.where(better, new, old) for new, old in zip((error, scale, least), best))

    # A part without a range has zeros or equal negative numbers: these are its least value.
    none = jnp.full_like(one, jnp.inf), span / top, smallest
    _, scales, least = lax.fori_loop(0, 21, candidate, none)
    return scales, -least


def _signed(block: jax.Array, *, bits: int) -> jax.Array:
    """Encodes one block float32[256] in Q6_K: uint8[210]. A number is d * scale * (code - 32), with a scale int8 for
    each 16 numbers and one d for the block. bits: the bits of a code, 6."""
    parts, middle = block.reshape(-1, _SIGNED_PART), 2 ** (bits - 1)
    scales = _best_signed(parts, middle)
    largest = jnp.take(scales, jnp.abs(scales).argmax())
    block_scale = -jnp.sign(largest) * _in_f16(jnp.abs(largest) / _LARGEST_SIGNED)  # the largest scale becomes -128
    scales = jnp.clip(jnp.round(_quotient(scales, block_scale)), -_LARGEST_SIGNED, _LARGEST_SIGNED - 1)
    steps = (block_scale * scales)[:, None]
    codes = jnp.clip(jnp.round(_quotient(parts, steps)), -middle, middle - 1) + middle
    # Each half of the block is four rows of 32; a byte has the low bits of a row and of the row two below.
    rows = codes.astype(jnp.uint8).reshape(2, 4, 32)
    low = (rows[:, :2] & 15) | (rows[:, 2:] << 4)
    high = (rows >> 4 << (2 * jnp.arange(4, dtype=jnp.uint8))[:, None]).sum(1, dtype=jnp.uint8)
    scales = lax.bitcast_convert_type(scales.astype(jnp.int8), jnp.uint8)
    return jnp.concatenate([low.reshape(-1), high.reshape(-1), scales, _bytes_of(block_scale)])


def _best_signed(parts: jax.Array, middle: int) -> jax.Array:
    """Finds the scale of each part, for codes from -middle to middle - 1: float32[n]. A number is scale * code. Of 19
    candidates it takes the scale with the smallest sum of squared errors, each weighted by the square of its number.

    A candidate divides the part by a step with which the number of the largest magnitude becomes a value between
    -middle - 0.9 and -middle + 0.9, and rounds to codes; the scale then follows from these codes by least squares. The
    largest number may be positive, so scales can be negative.

    Args:
      parts: float32[n, 16], a part a row.
      middle: half the number of codes, 32 for Q6_K.
    """
    weighted = parts * parts * parts
    at = jnp.abs(parts).argmax(-1, keepdims=True)
    largest = jnp.take_along_axis(parts, at, -1)

    def candidate(index: jax.Array, best: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        codes = jnp.clip(jnp.round(parts * _quotient(0.9 - 0.1 * index - middle, largest)), -middle, middle - 1)
        cx, cc = (weighted * codes).sum(-1), (parts * parts * codes * codes).sum(-1)
        scale = _quotient(cx, cc)
        better = scale * cx > best[0]  # the error is the weighted sum of squares, less this
        return tuple(jnp.where(better, new, old) for new, old in zip((scale * cx, scale), best))

    none = jnp.zeros_like(largest[:, 0]), largest[:, 0] / -middle
    return lax.fori_loop(0, 19, candidate, none)[1]


def _f16_of(pair: jax.Array) -> jax.Array:
    """Reads f16 numbers, such as the scales of blocks, from their bytes, for the decoders: float32[n, 1]. pair:
    uint8[n, 2], the two bytes of each, the lower one first."""
    return lax.bitcast_convert_type(pair, jnp.float16).astype(jnp.float32)[:, None]


def _decoded_with_least(coded: jax.Array, *, bits: int) -> jax.Array:
    """Decodes blocks of Q4_K, uint8[n, 144], or Q5_K, uint8[n, 176], to float32[n, 256]. A number is d * scale * code -
    dmin * least, with a scale and a least value for each 32 numbers. bits: the bits of a code, 4 for Q4_K and 5 for
    Q5_K. The export checks its own encoding with it."""
    count = len(coded)
    first, second, mixed = coded[:, 4:8], coded[:, 8:12], coded[:, 12:16]
    scales = jnp.concatenate([first & 63, (mixed & 15) | (first >> 6 << 4)], -1)
    least = jnp.concatenate([second & 63, (mixed >> 4) | (second >> 6 << 4)], -1)
    low = coded[:, -128:].reshape(count, 4, 1, _PART)
    codes = jnp.concatenate([low & 15, low >> 4], 2).reshape(count, 8, _PART)
    if bits == 5:
        places = jnp.arange(8, dtype=jnp.uint8)[:, None]
        codes |= (coded[:, None, 16:48] >> places & 1) << 4
    steps = (_f16_of(coded[:, :2]) * scales)[..., None]
    return (steps * codes - (_f16_of(coded[:, 2:4]) * least)[..., None]).reshape(count, NUMBERS)


def _decoded_signed(coded: jax.Array) -> jax.Array:
    """Decodes blocks of Q6_K, uint8[n, 210], to float32[n, 256]. Its numbers are signed: a code less 32, times a scale
    of either sign, without the least value that Q4_K and Q5_K have. The export checks its own encoding with it."""
    count = len(coded)
    low, high = coded[:, :128].reshape(count, 2, 2, 32), coded[:, 128:192].reshape(count, 2, 1, 32)
    places = 2 * jnp.arange(4, dtype=jnp.uint8)[:, None]
    codes = jnp.concatenate([low & 15, low >> 4], 2) | ((high >> places & 3) << 4)
    scales = lax.bitcast_convert_type(coded[:, 192:208], jnp.int8).astype(jnp.float32)
    steps = (_f16_of(coded[:, 208:]) * scales)[..., None]
    return (steps * (codes.reshape(count, 16, 16).astype(jnp.float32) - 32)).reshape(count, NUMBERS)
