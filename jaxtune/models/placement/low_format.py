"""Sums of arrays over devices that exchange numbers of 16, 8 or 4 bits.

A sum has two legs, as in NCCL's all-reduce: `reduce_scatter` sends each device its part of all devices' arrays, and
`all_gather` sends the parts of the sum to all devices. Numbers are in the low format on both legs, and are added in
float32. What a format is: `bf16` are bfloat16 numbers; `int8` and `int4` are integers from -127 to 127 and from -7 to 7
with a float32 scale, max |x| / 127 or / 7, for each block of 64 numbers (2, 1.06 and 0.56 bytes a number).

Numbers are rounded to the nearest, or stochastically with a seed: then the expected result is the number. A block with
a number that is not finite has a scale that is not finite, so that all numbers that are decoded from it are infinite or
NaN: every device learns of the overflow of one.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from jaxtune.pallas.rounding import random_bits, stochastic_round

SyncFormat = Literal["bf16", "int8", "int4"]
Axes = str | tuple[str, ...]  # one or several axes of a mesh, by name
BLOCK = 64  # numbers that share a scale
_LARGEST = {"int8": 127, "int4": 7}
_BITS = {"bf16": 16.0, "int8": 8.0 + 32 / BLOCK, "int4": 4.0 + 32 / BLOCK}


def bytes_per_number(format: SyncFormat) -> float:
    """Bytes of a number in a format, with its share of the block's scale: 2.0, 1.0625 or 0.5625. The planner computes
    the time of sending gradients from it."""
    return _BITS[format] / 8


def encode(x: jax.Array, format: SyncFormat, seed: jax.Array | None = None, stream: int = 0) -> dict[str, jax.Array]:
    """Encodes float32[..., n] in a low format, for `decode`; n is a multiple of 64.

    Args:
      x: the numbers.
      format: the format.
      seed: uint32[2], from which stochastic rounding draws; None: numbers are rounded to the nearest.
      stream: different for arrays that are rounded with the same seed.
    Returns:
      {"codes": uint16[..., n], the bits of bfloat16; int8[..., n]; or uint8[..., n / 2], two int4 a byte}, and for int8
        and int4 "scales": float32[..., n / 64].
    """
    if format == "bf16":
        rounded = x.astype(jnp.bfloat16) if seed is None else stochastic_round(x, seed, stream)
        # As integers, because XLA may widen bfloat16 before it is sent (it does on CPUs).
        return {"codes": jax.lax.bitcast_convert_type(rounded, jnp.uint16)}
    largest = _LARGEST[format]
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    scales = jnp.abs(blocks).max(-1) / largest
    # Of scales that are not normal numbers, which some devices take for 0, the inverse is not finite.
    inverse = jnp.where(scales >= jnp.finfo(jnp.float32).tiny, 1 / scales, 0)
    multiples = blocks * inverse[..., None]
    if seed is None:
        whole = jnp.round(multiples)
    else:
        draws = (random_bits(blocks.shape, seed, stream).astype(jnp.float32) + 0.5) / 65536
        whole = jnp.floor(multiples + draws)
    codes = jnp.clip(whole, -largest, largest).astype(jnp.int8)
    if format == "int4":
        half = BLOCK // 2  # the first half of a block is in the low bits of its bytes
        low, high = codes[..., :half], codes[..., half:]
        codes = jax.lax.bitcast_convert_type((low & 15) | (high << 4), jnp.uint8)
    return {"codes": codes.reshape(*x.shape[:-1], -1), "scales": scales}


def decode(encoded: dict[str, jax.Array], format: SyncFormat) -> jax.Array:
    """Decodes `encoded`, what `encode` returned for a format (codes, and scales of blocks), to float32[..., n]."""
    codes = encoded["codes"]
    if format == "bf16":
        return jax.lax.bitcast_convert_type(codes, jnp.bfloat16).astype(jnp.float32)
    scales = encoded["scales"]
    codes = codes.reshape(*scales.shape, -1)
    if format == "int4":
        low = jax.lax.bitcast_convert_type(codes << 4, jnp.int8) >> 4  # the shift repeats the sign
        high = jax.lax.bitcast_convert_type(codes, jnp.int8) >> 4
        codes = jnp.concatenate([low, high], -1)
    return (codes.astype(jnp.float32) * scales[..., None]).reshape(*scales.shape[:-1], -1)


def reduce_scatter(x: jax.Array, axes: Axes, format: SyncFormat, seed=None, stream: int = 0):
    """Sums float32[devices, n] over the devices along the mesh axes `axes`, which exchange it in a low format, and
    returns this device's part, within jax.shard_map: (float32[n], the sum of all devices' x[i] on the i-th of them;
    float32[devices, n], what rounding took from this device's x, which error feedback adds to the next step's). n is a
    multiple of 64. seed, stream: as in `encode`; the seed must differ between devices."""
    sent = encode(x, format, seed, stream)
    received = {name: jax.lax.all_to_all(part, axes, 0, 0, tiled=True) for name, part in sent.items()}
    return decode(received, format).sum(0), x - decode(sent, format)


def all_gather(x: jax.Array, axes: Axes, format: SyncFormat, seed=None, stream: int = 0):
    """Collects float32[n] of all devices along the mesh axes `axes`, which exchange it in a low format, within
    jax.shard_map: (float32[devices, n], the same bits on all devices; float32[n], what rounding took from this device's
    x, for error feedback). n is a multiple of 64; seed, stream: as in `encode`."""
    sent = encode(x, format, seed, stream)
    gathered = {name: jax.lax.all_gather(part, axes) for name, part in sent.items()}
    return decode(gathered, format), x - decode(sent, format)


def part_of_sum(gradient: jax.Array, axes: Axes, axis: int, count: int, format: SyncFormat) -> jax.Array:
    """Sums an array, `gradient`, over the `count` devices along the mesh axes `axes`, and returns this device's equal
    part along `axis` of the array, float32: jax.lax.psum_scatter in a low format, rounded stochastically.
    gathers.scatter calls it, within jax.shard_map.

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
