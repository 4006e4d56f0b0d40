"""Eight-bit numbers in blocks of 256, through bitsandbytes' dynamic maps (arXiv 2110.02861).

A block has one float32, its largest magnitude (absmax), and a byte per element: the index of element / absmax in a map
of 256 values that is dense near 0. NF4's double quantisation stores its absmax like this, and 8-bit Adam its moments.
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
    """The dynamic map of arXiv 2110.02861, float32[256] in ascending order, equal bit for bit to that of bitsandbytes.

    Decade d of 7 covers 10^(d-7) to 10^(d-6) with the centres of n equal intervals; n is 2^d on either side of 0 if
    signed, else 2^(d+1). With 0 and 1 these are 256 values; -1 is not among them.

    signed: whether the map has negative values.
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
    """The number of intervals of a decade (0 to 6) on either side of 0 in the signed map, or in the unsigned one, whose
    centres are its values."""
    return 2**decade if signed else 2 ** (decade + 1)


@functools.cache
def upper_bounds(signed: bool) -> np.ndarray:
    """float32: for each magnitude of the map except 1, ascending from 0, the largest float32 that is nearest to it.

    This is the middle between it and the next magnitude, rounded down: x is above it exactly if x is above the middle.
    signed: whether the map is the one with negative values.
    """
    values = dynamic_map(signed)[SIGNED_ZERO if signed else 0 :].astype(np.float64)
    middle = (values[:-1] + values[1:]) / 2  # exact in float64
    rounded = middle.astype(np.float32)
    return np.where(rounded.astype(np.float64) > middle, np.nextafter(rounded, np.float32(0)), rounded)


@functools.cache
def _decades(signed: bool) -> list[tuple[np.float32, np.float32, np.float32]]:
    """(a, b, last) of each of the 7 decades of the map's magnitudes, ascending; signed: which map. `nearest_codes` uses
    them: for a magnitude x in the decade, the position among all magnitudes (0 has position 0) that is nearest to x is
    floor(min(a x + b, last)) or one more. b is a quarter of an interval too low, so that rounding errors never make it
    two off."""
    found, first = [], 1  # 0 has index 0
    for decade in range(_DECADES):
        count = _intervals(signed, decade)
        width = 0.9 * 10.0 ** (decade + 1 - _DECADES) / count
        found.append(tuple(np.float32(v) for v in (1 / width, first - count / 9 - 0.25, first + count - 1)))
        first += count
    return found


def _edges(signed: bool) -> list[float]:
    """The six magnitudes, ascending, at which one decade of the map ends and the next begins: midway between the last
    value of one decade and the first of the next. signed: which map."""
    return [10.0 ** (d + 1 - _DECADES) * (1 + 0.9 / _intervals(signed, d)) for d in range(_DECADES - 1)]


def nearest_codes(x: jax.Array, signed: bool) -> jax.Array:
    """uint8: the index of the (signed) map's value nearest to each x, float32 from -1 (or 0) to 1; ties go towards 0.

    A binary search would read the map eight times per element, each read waiting for the one before. Within a decade
    the map is linear, so a product gives the index or one less: it is computed 1/4 of an interval too low, which is far
    more than its rounding error. Comparing with the exact bound between the two indices decides.
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
    """Quantises values of any shape: (codes uint8[blocks, 256], absmax float32[blocks]); the last block is padded with
    zeros. signed: whether the map is the signed one; without it, values must not be negative.

    A block whose largest magnitude is no normal float32 becomes zeros.

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
    """float32[blocks, 256], the inverse of `encode` up to rounding, with the last block's padding. signed: as it was in
    `encode`.

    Raises:
      TypeError, ValueError: codes and absmax do not have the form that `encode` gives.
    """
    check = Arguments("blockwise8.decode")
    check.array("codes", codes, f"blocks {BLOCK}", jnp.uint8)
    check.array("absmax", absmax, "blocks", jnp.float32)
    return jnp.asarray(dynamic_map(signed)).at[codes].get(mode="promise_in_bounds") * absmax[:, None]


def in_blocks(values: jax.Array) -> jax.Array:
    """float32[blocks, 256] of values of any shape, the last block padded with zeros."""
    flat = values.astype(jnp.float32).reshape(-1)
    return jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
