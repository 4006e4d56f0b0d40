"""Sums of arrays over devices that exchange numbers of 16, 8 or 4 bits (mesh.gradient_sync), with two legs as in NCCL's
all-reduce: `reduce_scatter` and `all_gather`. Both send the low format and add in float32.

- `bf16`: bfloat16, 2 bytes each.
- `int8`: -127 to 127 with a float32 scale, max |x| / 127, for each block of 64; 1.06 bytes each.
- `int4`: codes k from -7 to 7 for k |k| / 49 of a scale for each block of 16; 0.56 bytes each. Steps grow with the
  number, so that small numbers beside a large one keep digits. The scale is a byte e, for 2^(-e / 8) of the row's
  largest number in float32: the smallest that is at least the block's max |x|, or 2^-31.9 of the row's.

Rounding is to the nearest, or stochastic with a seed. A block with a number that is not finite (in int4 its row)
decodes to infinities or NaN, so every device learns of the overflow of one.
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
    """Bytes of a number with its share of the scale: 2.0, 1.0625 or 0.5625."""
    return _BITS[format] / 8


def encode(x: jax.Array, format: SyncFormat, seed: jax.Array | None = None, stream: int = 0) -> dict[str, jax.Array]:
    """Rounds numbers to a low format. Returns {"codes": uint16[..., n] (bits of bfloat16), int8[..., n] or uint8[..., n
    / 2]}, with "scales": float32[..., n / 64] for int8, for int4 uint8[..., n / 16] and "largest": float32[..., 1].

      x: float32[..., n], n a multiple of 64.
      format: "bf16", "int8" or "int4".
      seed: uint32[2], for stochastic rounding; None: to the nearest.
      stream: differs between arrays that share a seed.
    """
    if format == "bf16":
        rounded = x.astype(jnp.bfloat16) if seed is None else stochastic_round(x, seed, stream)
        # As integers, because XLA may widen bfloat16 before it is sent (it does on CPUs).
        return {"codes": jax.lax.bitcast_convert_type(rounded, jnp.uint16)}
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK if format == "int8" else INT4_BLOCK)
    draws = None if seed is None else (random_bits(blocks.shape, seed, stream).astype(jnp.float32) + 0.5) / 65536
    return _encode_int8(blocks, draws) if format == "int8" else _encode_int4(blocks, draws)


def _encode_int8(blocks: jax.Array, draws: jax.Array | None) -> dict[str, jax.Array]:
    scales = jnp.abs(blocks).max(-1) / 127
    codes = jnp.clip(_rounded(blocks * _inverse(scales)[..., None], draws), -127, 127).astype(jnp.int8)
    return {"codes": codes.reshape(*scales.shape[:-1], -1), "scales": scales}


def _encode_int4(blocks: jax.Array, draws: jax.Array | None) -> dict[str, jax.Array]:
    """Two codes a byte: of each 64 numbers, the first half is in the low bits. blocks: float32[..., blocks, 16]."""
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
    """Integers in float32."""
    return jnp.round(x) if draws is None else jnp.floor(x + draws)


def _int4_scales(scales: jax.Array, largest: jax.Array) -> jax.Array:
    """largest (float32[..., 1]) * 2^(-scales / 8)."""
    return largest * jnp.exp2(scales.astype(jnp.float32) * (-1 / _STEPS))


def _inverse(scales: jax.Array) -> jax.Array:
    """1 / scales; 0 for scales that are infinite, NaN, 0 or subnormal, which some devices take for 0."""
    return jnp.where(scales >= jnp.finfo(jnp.float32).tiny, 1 / scales, 0)


def weights_in_blocks(usual: jax.Array) -> jax.Array:
    """Factors float32[n], 1/8 to 1 (no weights of a model), that divide numbers before int4 and multiply them after, so
    that usually small ones keep digits beside large ones.

    A factor is the root of a number's usual size relative to its block's largest: midway between the least total error
    and errors in proportion to each number. At least 1/8, so that one unusually large number does not cost its block
    their digits. In a block whose usual sizes are all zero they are 1.

      usual: float32[n], usual sizes in any unit, at least 0; n is a multiple of 16.
    """
    blocks = usual.reshape(-1, INT4_BLOCK)
    inverse = _inverse(blocks.max(-1, keepdims=True))
    return jnp.where(inverse > 0, jnp.maximum(jnp.sqrt(blocks * inverse), 1 / 8), 1.0).reshape(-1)


def decode(encoded: dict[str, jax.Array], format: SyncFormat) -> jax.Array:
    """float32[..., n] from what `encode` returned."""
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
    """Sums over devices within jax.shard_map: (float32[n], this device's row of the sum; float32[devices, n], what
    rounding took from this x, for error feedback).

      x: float32[devices, n], this device's terms; n a multiple of 64.
      axes: mesh axes over which it sums.
      format: in which numbers are sent.
      seed: uint32[2], for stochastic rounding, which must differ between devices; None: to the nearest.
      stream: differs between arrays that share a seed.
    """
    sent = encode(x, format, seed, stream)
    received = {name: jax.lax.all_to_all(array, axes, 0, 0, tiled=True) for name, array in sent.items()}
    return decode(received, format).sum(0), x - decode(sent, format)


def all_gather(x: jax.Array, axes: Axes, format: SyncFormat, seed=None, stream: int = 0):
    """Collects arrays of devices within jax.shard_map: (float32[devices, n], the same bits everywhere; float32[n], what
    rounding took from this x).

      x: float32[n], this device's; n a multiple of 64.
      axes: mesh axes over which it collects.
      format: in which numbers are sent.
      seed: uint32[2], for stochastic rounding; None: to the nearest.
      stream: differs between arrays that share a seed.
    """
    sent = encode(x, format, seed, stream)
    gathered = {name: jax.lax.all_gather(array, axes) for name, array in sent.items()}
    return decode(gathered, format), x - decode(sent, format)


def sum_shard(gradient: jax.Array, axes: Axes, axis: int, count: int, format: SyncFormat) -> jax.Array:
    """This device's part, float32, of an array's sum over devices: psum_scatter in a low format, rounded
    stochastically. The seed is a checksum of the bits, so that equal arrays give equal sums and no key is passed to
    each layer's backward.

      gradient: this device's, with the whole shape.
      axes: mesh axes over which it sums.
      axis: of the array, along which the sum is divided.
      count: devices along `axes`.
      format: in which numbers are sent.
    """
    wide = gradient.astype(jnp.float32)
    shape = (*wide.shape[:axis], count, wide.shape[axis] // count, *wide.shape[axis + 1 :])
    shards = jnp.moveaxis(wide.reshape(shape), axis, 0)
    shard_shape, flat = shards.shape[1:], shards.reshape(count, -1)
    size = flat.shape[1]
    flat = jnp.pad(flat, ((0, 0), (0, -size % BLOCK)))
    bits = jax.lax.bitcast_convert_type(wide, jnp.uint32)
    checksum = jnp.stack([bits.sum(dtype=jnp.uint32), (bits >> 9).sum(dtype=jnp.uint32)])
    key = jax.random.fold_in(jax.random.wrap_key_data(checksum), jax.lax.axis_index(axes))
    total, _ = reduce_scatter(flat, axes, format, jax.random.key_data(key))
    return total[:size].reshape(shard_shape)
