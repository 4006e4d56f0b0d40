"""Sums of arrays over devices that exchange numbers of 16, 8 or 4 bits. Gradients are summed so if mesh.gradient_sync
names one of these formats.

A sum has two legs, as in NCCL's all-reduce: `reduce_scatter` sends each device its part of all devices' arrays, and
`all_gather` sends the parts of the sum to all devices; train/program/gradient_sync.py calls both. `part_of_sum` is the
first leg alone, for an array of any shape; gathers.scatter calls it. Numbers are in the low format on both legs
(`encode`, `decode`), and are added in float32. `weights_in_blocks` gives weights with which int4 loses less of small
numbers. What a format is:

- `bf16`: bfloat16 numbers, 2 bytes each.
- `int8`: integers from -127 to 127 with a float32 scale, max |x| / 127, for each block of 64 numbers; 1.06 bytes each.
- `int4`: codes k from -7 to 7 that stand for k |k| / 49 of a scale for each block of 16 numbers; 0.56 bytes each. Steps
  between codes grow with the number, so that small numbers beside a large one keep some of their digits. The scale is
  one byte e, for 2^(-e / 8) of the largest number of the row, which is sent in float32: the smallest such scale that is
  not less than the block's max |x|, or 2^-31.9 of the row's largest number.

Numbers are rounded to the nearest, or stochastically with a seed: then the expected result is the number. A block with
a number that is not finite (in int4 its whole row) has a scale that is not finite, so that all numbers that are decoded
from it are infinite or NaN: every device learns of the overflow of one.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from jaxtune.pallas.rounding import random_bits, stochastic_round

SyncFormat = Literal["bf16", "int8", "int4"]
Axes = str | tuple[str, ...]  # one or several axes of a mesh, by name
BLOCK = 64  # numbers that share a scale in int8; the length of an array is a multiple of this
INT4_BLOCK = 16  # numbers that share a scale in int4
_STEPS = 8  # scales of int4 between a number and its double
_BITS = {"bf16": 16.0, "int8": 8.0 + 32 / BLOCK, "int4": 4.0 + 8 / INT4_BLOCK}


def bytes_per_number(format: SyncFormat) -> float:
    """Bytes of a number in a format, with its share of the block's scale: 2.0 in bf16, 1.0625 in int8, 0.5625 in int4.
    The planner computes the time of sending gradients from it."""
    return _BITS[format] / 8


def encode(x: jax.Array, format: SyncFormat, seed: jax.Array | None = None, stream: int = 0) -> dict[str, jax.Array]:
    """Encodes float32[..., n] in a low format, for `decode`; n is a multiple of 64. Devices send each other what it
    returns.

    Args:
      x: the numbers.
      format: "bf16", "int8" or "int4" (the module describes them).
      seed: uint32[2], from which stochastic rounding draws; None: numbers are rounded to the nearest.
      stream: a number that must differ between arrays that are rounded with the same seed, so that each has its own
        random numbers.
    Returns:
      {"codes": uint16[..., n], the bits of bfloat16; int8[..., n]; or uint8[..., n / 2], two int4 a byte}; for int8
        also "scales": float32[..., n / 64]; for int4 "scales": uint8[..., n / 16] and "largest": float32[..., 1], the
        largest |x| of each row.
    """
    if format == "bf16":
        rounded = x.astype(jnp.bfloat16) if seed is None else stochastic_round(x, seed, stream)
        # As integers, because XLA may widen bfloat16 before it is sent (it does on CPUs).
        return {"codes": jax.lax.bitcast_convert_type(rounded, jnp.uint16)}
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK if format == "int8" else INT4_BLOCK)
    draws = None if seed is None else (random_bits(blocks.shape, seed, stream).astype(jnp.float32) + 0.5) / 65536
    return _encode_int8(blocks, draws) if format == "int8" else _encode_int4(blocks, draws)


def _encode_int8(blocks: jax.Array, draws: jax.Array | None) -> dict[str, jax.Array]:
    """`encode` for the format int8: {"codes": int8[..., blocks * 64], whole numbers from -127 to 127, "scales":
    float32[..., blocks], max |x| / 127 of each block}. blocks: float32[..., blocks, 64], the numbers. draws: numbers of
    the same shape, uniform from 0 to 1, for stochastic rounding; None: codes are rounded to the nearest."""
    scales = jnp.abs(blocks).max(-1) / 127
    codes = jnp.clip(_rounded(blocks * _inverse(scales)[..., None], draws), -127, 127).astype(jnp.int8)
    return {"codes": codes.reshape(*scales.shape[:-1], -1), "scales": scales}


def _encode_int4(blocks: jax.Array, draws: jax.Array | None) -> dict[str, jax.Array]:
    """`encode` for the format int4: {"codes": uint8[..., blocks * 8], two codes a byte (of each 64 numbers, the first
    half in the low bits), "scales": uint8[..., blocks], "largest": float32[..., 1], the largest |x| of each row}.
    blocks: float32[..., blocks, 16], the numbers; a row has a multiple of 64 of them. draws: numbers of the same shape,
    uniform from 0 to 1, for stochastic rounding; None: codes are rounded to the nearest."""
    of_blocks = jnp.abs(blocks).max(-1)
    largest = of_blocks.max(-1, keepdims=True)
    scales = jnp.clip(jnp.floor(-_STEPS * jnp.log2(of_blocks * _inverse(largest))), 0, 255).astype(jnp.uint8)
    multiples = jnp.abs(blocks) * _inverse(_int4_scales(scales, largest) / 49)[..., None]
    lower = jnp.clip(jnp.floor(jnp.sqrt(multiples)), 0, 6)  # a code; the number is from lower^2 to (lower + 1)^2
    codes = jnp.clip(lower + _rounded((multiples - lower * lower) / (2 * lower + 1), draws), 0, 7)
    codes = jnp.where(blocks < 0, -codes, codes).astype(jnp.int8).reshape(*largest.shape[:-1], -1, BLOCK)
    half = BLOCK // 2  # of each 64 numbers, the first half is in the low bits of their bytes
    codes = jax.lax.bitcast_convert_type((codes[..., :half] & 15) | (codes[..., half:] << 4), jnp.uint8)
    return {"codes": codes.reshape(*largest.shape[:-1], -1), "scales": scales, "largest": largest}


def _rounded(x: jax.Array, draws: jax.Array | None) -> jax.Array:
    """The float32 numbers `x` rounded to integers, which stay float32: stochastically by `draws`, numbers of the same
    shape that are uniform from 0 to 1; to the nearest (even) if it is None. The encoders round codes by it."""
    return jnp.round(x) if draws is None else jnp.floor(x + draws)


def _int4_scales(scales: jax.Array, largest: jax.Array) -> jax.Array:
    """The scales, float32[..., blocks], that the bytes `scales`, uint8[..., blocks], stand for in rows with the largest
    numbers `largest`, float32[..., 1]: `largest` times 2^(-byte / 8). _encode_int4 calls it, and decode, which passes a
    49th of the largest numbers and so gets a 49th of the scales."""
    return largest * jnp.exp2(scales.astype(jnp.float32) * (-1 / _STEPS))


def _inverse(scales: jax.Array) -> jax.Array:
    """1 / scales, float32 of the same shape; 0 for scales that are zero or subnormal, which some devices take for 0, so
    that their inverse would not be finite, and for scales that are infinite or NaN. The encoders multiply numbers by it
    before they round them to codes. The code of a number that is not finite has no meaning, and only the scale shows
    the overflow. weights_in_blocks calls it, too."""
    return jnp.where(scales >= jnp.finfo(jnp.float32).tiny, 1 / scales, 0)


def weights_in_blocks(usual: jax.Array) -> jax.Array:
    """The weights by which numbers are divided before they are encoded in int4, and multiplied after they are decoded,
    so that those that are usually small keep more of their digits beside large ones of the same block.

    A weight is the root of a number's usual size as a part of the largest one in its block, which is midway between the
    same weight for all, with which the sum of all errors is smallest, and errors in proportion to each number. It is at
    least 1/8, so that a number that is larger than usual for once does not cost the others of its block their digits.

    The quantised sum of gradients calls it (train/program/gradient_sync.py).

    Args:
      usual: float32[n], the numbers' usual sizes, in any unit; n is a multiple of 16.
    Returns:
      float32[n], from 1/8 to 1; 1 in blocks of zeros (or only subnormal numbers).
    """
    blocks = usual.reshape(-1, INT4_BLOCK)
    inverse = _inverse(blocks.max(-1, keepdims=True))
    return jnp.where(inverse > 0, jnp.maximum(jnp.sqrt(blocks * inverse), 1 / 8), 1.0).reshape(-1)


def decode(encoded: dict[str, jax.Array], format: SyncFormat) -> jax.Array:
    """Decodes `encoded`, what `encode` returned for `format`, to float32[..., n]: bfloat16 numbers from their bits; in
    int8 each code times the scale of its block; in int4 k |k| / 49 times that scale for each code k. Receiving devices
    call it (reduce_scatter then adds the numbers), and senders, to know what rounding took from them."""
    codes = encoded["codes"]
    if format == "bf16":
        return jax.lax.bitcast_convert_type(codes, jnp.bfloat16).astype(jnp.float32)
    scales = encoded["scales"]
    if format == "int8":
        blocks = codes.reshape(*scales.shape, BLOCK).astype(jnp.float32)
        return (blocks * scales[..., None]).reshape(codes.shape)
    codes = codes.reshape(*codes.shape[:-1], -1, BLOCK // 2)
    low = jax.lax.bitcast_convert_type(codes << 4, jnp.int8) >> 4  # the shift repeats the sign
    high = jax.lax.bitcast_convert_type(codes, jnp.int8) >> 4
    blocks = jnp.concatenate([low, high], -1).reshape(*scales.shape, INT4_BLOCK).astype(jnp.float32)
    scales = _int4_scales(scales, encoded["largest"] / 49)
    return (blocks * jnp.abs(blocks) * scales[..., None]).reshape(*scales.shape[:-1], -1)


def reduce_scatter(x: jax.Array, axes: Axes, format: SyncFormat, seed=None, stream: int = 0):
    """Sums float32[devices, n] over the devices along the mesh axes `axes`, which exchange it in a low format, and
    returns this device's part, within jax.shard_map: (float32[n], the sum of all devices' x[i] on the i-th of them;
    float32[devices, n], what rounding took from this device's x, which error feedback adds to the next step's). n is a
    multiple of 64. seed: uint32[2], for stochastic rounding, which must differ between devices; None: numbers are
    rounded to the nearest. stream: different for arrays that are rounded with the same seed. It is the first leg of the
    quantised sum of gradients (train/program/gradient_sync.py) and of part_of_sum."""
    sent = encode(x, format, seed, stream)
    received = {name: jax.lax.all_to_all(part, axes, 0, 0, tiled=True) for name, part in sent.items()}
    return decode(received, format).sum(0), x - decode(sent, format)


def all_gather(x: jax.Array, axes: Axes, format: SyncFormat, seed=None, stream: int = 0):
    """Collects float32[n] of all devices along the mesh axes `axes`, which exchange it in a low format, within
    jax.shard_map: (float32[devices, n], the same bits on all devices; float32[n], what rounding took from this device's
    x, which error feedback adds to the next step's). n is a multiple of 64. seed: uint32[2], for stochastic rounding;
    None: numbers are rounded to the nearest. stream: different for arrays that are rounded with the same seed. It is
    the second leg of the quantised sum of gradients (train/program/gradient_sync.py)."""
    sent = encode(x, format, seed, stream)
    gathered = {name: jax.lax.all_gather(part, axes) for name, part in sent.items()}
    return decode(gathered, format), x - decode(sent, format)


def part_of_sum(gradient: jax.Array, axes: Axes, axis: int, count: int, format: SyncFormat) -> jax.Array:
    """Sums an array, `gradient` (of any floating-point dtype), over the `count` devices along the mesh axes `axes`, and
    returns this device's equal part of the sum, float32, cut along `axis` of the array: jax.lax.psum_scatter in a low
    format, rounded stochastically, without error feedback. gathers.scatter calls it, within jax.shard_map. `count`
    divides that axis.

    The seed is a checksum of the array's bits, so that the same arrays give the same sum, without a key that would have
    to be passed to each layer's backward.
    """
    wide = gradient.astype(jnp.float32)
    shape = (*wide.shape[:axis], count, wide.shape[axis] // count, *wide.shape[axis + 1 :])
    parts = jnp.moveaxis(wide.reshape(shape), axis, 0)
    own, flat = parts.shape[1:], parts.reshape(count, -1)
    size = flat.shape[1]
    flat = jnp.pad(flat, ((0, 0), (0, -size % BLOCK)))
    bits = jax.lax.bitcast_convert_type(wide, jnp.uint32)
    checksum = jnp.stack([bits.sum(dtype=jnp.uint32), (bits >> 9).sum(dtype=jnp.uint32)])
    key = jax.random.fold_in(jax.random.wrap_key_data(checksum), jax.lax.axis_index(axes))
    total, _ = reduce_scatter(flat, axes, format, jax.random.key_data(key))
    return total[:size].reshape(own)
