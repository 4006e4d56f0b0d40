"""Quantisation to eight bits in blocks of 256 elements, through the dynamic maps of bitsandbytes (arXiv 2110.02861).

A block stores one float32, its largest magnitude (absmax), and a byte per element: the index of element / absmax in a
map of 256 values that is dense near 0. There are two maps, with and without negative values. 8-bit Adam stores its
moments like this, and NF4's double quantisation its absmax (less their mean).

`dynamic_map` returns a map, `encode` quantises an array of any shape, and `decode` returns its numbers; `in_blocks`
divides an array into blocks, `nearest_codes` finds the indices of scaled numbers, and `upper_bounds` returns the
numbers at which one index ends and the next begins.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas.arguments import FLOATS, Arguments

BLOCK = 256  # elements that share an absmax
_DECADES = 7  # of the map, from 10^-7 to 1
SIGNED_ZERO = 127  # index of 0 in the signed map


@functools.cache
def dynamic_map(signed: bool) -> np.ndarray:
    """The dynamic map of arXiv 2110.02861, the 256 values that a byte stands for: float32[256] in ascending order,
    equal bit for bit to that of bitsandbytes. `decode` reads it, NF4's double quantisation stores it as nested_map, and
    8-bit Adam's kernel decodes by it. It is computed once for each map; callers must not change the array.

    Decade d, from 0 to 6, covers 10^(d-7) to 10^(d-6) with the centres of n equal intervals; n is 2^d on either side of
    0 if signed, else 2^(d+1). With 0 and 1 these are 256 values; -1 is not among them.

    signed: True: the map has negative values. False: it has none.
    """
    values = [np.float32(0.0), np.float32(1.0)]
    for decade in range(_DECADES):
        count = _intervals(signed, decade)
        low = np.float32(0.1)
        step = np.float64((np.float32(1) - low) / np.float32(count))
        index = np.arange(count + 1)
        # As torch.linspace: a fused multiply-add from the nearer end; exact in float64, so it is rounded once.
        edges = np.where(index < (count + 1) // 2, low + step * index, 1 - step * (count - index)).astype(np.float32)
        centres = np.float32(10.0 ** (decade + 1 - _DECADES)) * ((edges[:-1] + edges[1:]) / np.float32(2))
        values += [*centres, *(-centres if signed else ())]
    return np.sort(np.asarray(values, np.float32))


def _intervals(signed: bool, decade: int) -> int:
    """The number of equal intervals into which a decade of the map is divided, whose centres are the map's values.
    The map has 0 and 1 besides. `dynamic_map`, `_decades` and `_edges` call it.

    Args:
      signed: True: the number on either side of 0 of the map with negative values. False: that of the map without.
      decade: from 0 (the smallest magnitudes) to 6.
    """
    return 2**decade if signed else 2 ** (decade + 1)


@functools.cache
def upper_bounds(signed: bool) -> np.ndarray:
    """For each magnitude of the map except 1, ascending from 0, the largest float32 to which it is the nearest
    magnitude: float32[128] if signed, else float32[255]. `nearest_codes` compares with it, and 8-bit Adam's kernel
    encodes by a table that is made from it. It is computed once for each map; callers must not change the array.

    It is the middle between the magnitude and the next, rounded down, so that a float32 is above it exactly if it is
    above the middle. signed: True: the map with negative values. False: the map without.
    """
    values = dynamic_map(signed)[SIGNED_ZERO if signed else 0 :].astype(np.float64)
    middle = (values[:-1] + values[1:]) / 2  # exact in float64
    rounded = middle.astype(np.float32)
    return np.where(rounded.astype(np.float64) > middle, np.nextafter(rounded, np.float32(0)), rounded)


@functools.cache
def _decades(signed: bool) -> list[tuple[np.float32, np.float32, np.float32]]:
    """Numbers (a, b, last) for each of the 7 decades of the map's magnitudes, ascending, from which `nearest_codes`
    computes an index. For a magnitude x in the decade, the index, counted from 0 for the magnitude 0, of the nearest
    magnitude is floor(min(a x + b, last)) or one more. b is a quarter of an interval too low, so that rounding errors
    never make the result two off. signed: True: the map with negative values. False: the map without."""
    found, first = [], 1  # 0 has index 0
    for decade in range(_DECADES):
        count = _intervals(signed, decade)
        width = 0.9 * 10.0 ** (decade + 1 - _DECADES) / count
        found.append(tuple(np.float32(v) for v in (1 / width, first - count / 9 - 0.25, first + count - 1)))
        first += count
    return found


def _edges(signed: bool) -> list[float]:
    """The six magnitudes, ascending, at which one decade of the map ends and the next begins: midway between the last
    value of one decade and the first of the next. `nearest_codes` finds a number's decade by them. signed: True: the
    map with negative values. False: the map without."""
    return [10.0 ** (d + 1 - _DECADES) * (1 + 0.9 / _intervals(signed, d)) for d in range(_DECADES - 1)]


def nearest_codes(x: jax.Array, signed: bool) -> jax.Array:
    """Quantises numbers to the map: uint8 in x's shape, the index of the map's value that is nearest to each number;
    ties go towards 0. Callers divide by the largest magnitude first; a number beyond the map would get the index of its
    last value on that side. `encode` and NF4.encode (for its absmax) call it.

    A binary search would read the map eight times per element, each read waiting for the one before. Within a decade
    the map is linear, so a product gives the index or one less: it is computed 1/4 of an interval too low, which is far
    more than its rounding error. Comparing with the exact bound between the two indices decides.

    Args:
      x: float32 of any shape, from -1 to 1; if not signed, from 0 to 1, and a negative number would get the index of
        its magnitude.
      signed: True: the map with negative values. False: the map without.
    """
    magnitude = jnp.abs(x)
    (per_unit, start, last), *others = _decades(signed)
    for edge, (per_unit_above, start_above, last_above) in zip(_edges(signed), others, strict=True):
        above = magnitude > edge
        per_unit = jnp.where(above, per_unit_above, per_unit)
        start = jnp.where(above, start_above, start)
        last = jnp.where(above, last_above, last)
    place = jnp.minimum(magnitude * per_unit + start, last).astype(jnp.int32)
    place += (magnitude > jnp.asarray(upper_bounds(signed)).at[place].get(mode="clip")).astype(jnp.int32)
    if signed:
        place = jnp.where(x < 0, SIGNED_ZERO - jnp.minimum(place, SIGNED_ZERO), SIGNED_ZERO + place)
    return place.astype(jnp.uint8)


def encode(values: jax.Array, signed: bool) -> tuple[jax.Array, jax.Array]:
    """Quantises values of any shape to eight bits, in float32 arithmetic with XLA's division, so codes may differ
    between devices. Returns (codes uint8[blocks, 256], absmax float32[blocks]); the values are flattened, and the last
    block is padded with zeros. A block whose largest magnitude is below the smallest normal float32, 2^-126, becomes
    zeros; values that are not finite make their block meaningless. 8-bit Adam stores its moments like this: its update
    in plain JAX (pallas/adam8's plain_update) calls `encode`, and its kernel encodes by itself.

    Args:
      values: floating-point numbers, which must not be negative if not signed.
      signed: True: codes are indices into the map with negative values. False: into the map without, which is finer.
    Raises:
      TypeError: values are not floating-point numbers.
    """
    Arguments("blockwise8.encode").array("values", values, "...", FLOATS)
    blocks = in_blocks(values)
    absmax = jnp.abs(blocks).max(1)
    absmax = jnp.where(absmax < jnp.finfo(jnp.float32).tiny, 0.0, absmax)
    scale = jnp.where(absmax == 0, 1.0, absmax)
    return nearest_codes(blocks / scale[:, None], signed), absmax


def decode(codes: jax.Array, absmax: jax.Array, signed: bool) -> jax.Array:
    """Decodes what `encode` returned: float32[blocks, 256], for each code the map's value times its block's absmax,
    which is the encoded value up to the error of quantisation. The padding of the last block is included. 8-bit Adam's
    update in plain JAX (plain_update) reads the moments with it; its kernel decodes them by itself.

    Args:
      codes: uint8[blocks, 256].
      absmax: float32[blocks].
      signed: the value that `encode` got.
    Raises:
      TypeError, ValueError: codes or absmax has another dtype or shape.
    """
    check = Arguments("blockwise8.decode")
    check.array("codes", codes, f"blocks {BLOCK}", jnp.uint8)
    check.array("absmax", absmax, "blocks", jnp.float32)
    return jnp.asarray(dynamic_map(signed)).at[codes].get(mode="promise_in_bounds") * absmax[:, None]


def in_blocks(values: jax.Array) -> jax.Array:
    """Flattens values of any shape and divides them into blocks of 256, the last padded with zeros: float32[blocks,
    256]. `encode` calls it, and 8-bit Adam's update in plain JAX (plain_update) for the gradient."""
    flat = values.astype(jnp.float32).reshape(-1)
    return jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
