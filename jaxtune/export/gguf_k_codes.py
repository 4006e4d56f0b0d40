"""Encoders and decoders of GGUF's types Q4_K, Q5_K and Q6_K, by the number of bits of their codes: 4, 5 or 6.

A block is 256 numbers of a row, in parts with a scale each, and in Q4_K and Q5_K a least value. Scales are whole
numbers, times a scale of the whole block in f16:

| type | bytes | parts | a number is |
|---|---|---|---|
| Q4_K | 144 | 8 of 32 | d * scale * code - dmin * least, code of 4 bits, scale and least of 6 |
| Q5_K | 176 | 8 of 32 | the same, code of 5 bits |
| Q6_K | 210 | 16 of 16 | d * scale * (code - 32), code of 6 bits, scale an int8 |

The gguf package reads this layout and cannot write it. Each part's scale is the best of about twenty candidates by
squared errors, in which larger numbers count more, as in llama.cpp's encoder.
"""

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
    """float32[n, 256] -> uint8[n, bytes of a block]."""
    encode_block = functools.partial(_signed if bits == 6 else _with_least, bits=bits)

    def encode(blocks: jax.Array) -> jax.Array:
        return lax.platform_dependent(
            blocks,
            cpu=lambda blocks: lax.map(encode_block, blocks, batch_size=_IN_CACHE),
            default=jax.vmap(encode_block),
        )

    return encode


def decoder(bits: int) -> Callable[[jax.Array], jax.Array]:
    """uint8[n, bytes of a block] -> float32[n, 256]."""
    return _decoded_signed if bits == 6 else functools.partial(_decoded_with_least, bits=bits)


def allowed(blocks: jax.Array | np.ndarray, numpy: ModuleType, *, bits: int) -> jax.Array | np.ndarray:
    """[n, 1]: the largest error that rounding explains in blocks: one and a half steps, a step being the largest range
    of a part, 0 included, divided by the largest code (Q6_K: the largest magnitude / 32). Half a step is rounding to a
    code; one, because the best scale may cut off what is largest, and scales and least values are rounded.

      blocks: float32[n, 256].
      numpy: numpy or jax.numpy.
      bits: of a code: 4, 5 or 6.
    """
    if bits == 6:
        largest, steps = numpy.abs(blocks).max(-1, keepdims=True), 32
    else:
        parts = blocks.reshape(len(blocks), -1, _PART)
        ranges = numpy.maximum(parts.max(-1), 0) - numpy.minimum(parts.min(-1), 0)
        largest, steps = ranges.max(-1, keepdims=True), 2**bits - 1
    return largest * numpy.float32(1.5 / steps) + numpy.float32((steps + 1) * _SMALLEST_F16)


def _quotient(x: jax.Array, y: jax.Array) -> jax.Array:
    """x / y, and 0 where y is 0, so that a part of zeros has finite codes."""
    return jnp.where(y == 0, 0, x / jnp.where(y == 0, 1, y))


def _in_f16(x: jax.Array) -> jax.Array:
    """A scalar of at least 0 rounded to f16, in float32; tiny ones upwards, so that no scale becomes 0."""
    near = x.astype(jnp.float16)
    above = lax.bitcast_convert_type(lax.bitcast_convert_type(near, jnp.uint16) + 1, jnp.float16)
    return jnp.where((x < _NORMAL_F16) & (near.astype(jnp.float32) < x), above, near).astype(jnp.float32)


def _bytes_of(x: jax.Array) -> jax.Array:
    """A scalar rounded to f16 as uint8[2], the lower byte first."""
    return lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint8)


def _with_least(block: jax.Array, *, bits: int) -> jax.Array:
    """float32[256] -> uint8[144] (Q4_K) or uint8[176] (Q5_K)."""
    parts, top = block.reshape(-1, _PART), 2**bits - 1
    scales, least = _best_with_least(parts, top)
    block_scale, block_least = (_in_f16(values.max() / _SIX_BITS) for values in (scales, least))
    scales, least = (
        jnp.clip(jnp.round(_quotient(values, unit)), 0, _SIX_BITS)
        for values, unit in ((scales, block_scale), (least, block_least))
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
    """Packs eight scales and eight least values, six bits in uint8[8] each, into uint8[12].

    Low six bits of bytes 0 to 3: the first four scales; of 4 to 7: their least values. The last four: low bits in bytes
    8 to 11, high two in those of bytes 0 to 7.
    """
    return jnp.concatenate(
        [
            scales[:4] | (scales[4:] >> 4 << 6),
            least[:4] | (least[4:] >> 4 << 6),
            (scales[4:] & 15) | (least[4:] << 4),
        ]
    )


def _best_with_least(parts: jax.Array, top: int) -> tuple[jax.Array, jax.Array]:
    """(scales, negatives of least values), float32[n], of parts float32[n, 32]: the best of 21 candidates by weighted
    squares.
    """
    weights = jnp.sqrt((parts * parts).mean(-1, keepdims=True)) + jnp.abs(parts)
    smallest = jnp.minimum(parts.min(-1), 0)
    span = parts.max(-1) - smallest
    weighted = weights * parts
    w, x, xx = weights.sum(-1), weighted.sum(-1), (weighted * parts).sum(-1)

    def candidate(index: jax.Array, best: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        steps = _quotient(top - 1 + 0.1 * index, span)[:, None]
        codes = jnp.clip(jnp.round((parts - best[2][:, None]) * steps), 0, top)
        c, cc, cx = (weights * codes).sum(-1), (weights * codes * codes).sum(-1), (weighted * codes).sum(-1)
        determinant = w * cc - c * c
        determinant = jnp.where(determinant > 1e-5 * w * cc, determinant, 0)  # below this, all codes are equal
        least = jnp.minimum(_quotient(cc * x - c * cx, determinant), 0)
        scale = jnp.where(least < 0, _quotient(w * cx - c * x, determinant), _quotient(cx, cc))
        error = xx + scale * (scale * cc + 2 * least * c - 2 * cx) + least * (least * w - 2 * x)
        better = (error < best[0]) & (scale > 0)
        return tuple(jnp.where(better, new, old) for new, old in zip((error, scale, least), best))

    # A part without a range has zeros or equal negative numbers: these are its least value.
    none = jnp.full_like(w, jnp.inf), span / top, smallest
    _, scales, least = lax.fori_loop(0, 21, candidate, none)
    return scales, -least


def _signed(block: jax.Array, *, bits: int) -> jax.Array:
    """float32[256] -> uint8[210] (Q6_K)."""
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
    """Scales float32[n], of either sign, for parts float32[n, 16] and codes -middle to middle - 1: the best of 19."""
    weighted = parts * parts * parts
    largest_index = jnp.abs(parts).argmax(-1, keepdims=True)
    largest = jnp.take_along_axis(parts, largest_index, -1)

    def candidate(index: jax.Array, best: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        codes = jnp.clip(jnp.round(parts * _quotient(0.9 - 0.1 * index - middle, largest)), -middle, middle - 1)
        cx, cc = (weighted * codes).sum(-1), (parts * parts * codes * codes).sum(-1)
        scale = _quotient(cx, cc)
        better = scale * cx > best[0]  # the error is the weighted sum of squares, less this
        return tuple(jnp.where(better, new, old) for new, old in zip((scale * cx, scale), best))

    none = jnp.zeros_like(largest[:, 0]), largest[:, 0] / -middle
    return lax.fori_loop(0, 19, candidate, none)[1]


def _f16_of(pair: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(pair, jnp.float16).astype(jnp.float32)[:, None]


def _decoded_with_least(coded: jax.Array, *, bits: int) -> jax.Array:
    """uint8[n, 144] (Q4_K) or uint8[n, 176] (Q5_K) -> float32[n, 256]."""
    count = len(coded)
    first, second, mixed = coded[:, 4:8], coded[:, 8:12], coded[:, 12:16]
    scales = jnp.concatenate([first & 63, (mixed & 15) | (first >> 6 << 4)], -1)
    least = jnp.concatenate([second & 63, (mixed >> 4) | (second >> 6 << 4)], -1)
    low = coded[:, -128:].reshape(count, 4, 1, _PART)
    codes = jnp.concatenate([low & 15, low >> 4], 2).reshape(count, 8, _PART)
    if bits == 5:
        shifts = jnp.arange(8, dtype=jnp.uint8)[:, None]
        codes |= (coded[:, None, 16:48] >> shifts & 1) << 4
    steps = (_f16_of(coded[:, :2]) * scales)[..., None]
    return (steps * codes - (_f16_of(coded[:, 2:4]) * least)[..., None]).reshape(count, NUMBERS)


def _decoded_signed(coded: jax.Array) -> jax.Array:
    """uint8[n, 210] (Q6_K) -> float32[n, 256]."""
    count = len(coded)
    low, high = coded[:, :128].reshape(count, 2, 2, 32), coded[:, 128:192].reshape(count, 2, 1, 32)
    shifts = 2 * jnp.arange(4, dtype=jnp.uint8)[:, None]
    codes = jnp.concatenate([low & 15, low >> 4], 2) | ((high >> shifts & 3) << 4)
    scales = lax.bitcast_convert_type(coded[:, 192:208], jnp.int8).astype(jnp.float32)
    steps = (_f16_of(coded[:, 208:]) * scales)[..., None]
    return (steps * (codes.reshape(count, 16, 16).astype(jnp.float32) - 32)).reshape(count, NUMBERS)
