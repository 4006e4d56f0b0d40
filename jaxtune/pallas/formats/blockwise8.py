"""Quantisation to eight bits in blocks of 256 elements, through the dynamic maps of bitsandbytes (arXiv 2110.02861).

A block stores one float32, its largest magnitude (absmax), and a byte per element: the index of element / absmax in a
map of 256 values that is dense near 0. There are two maps, with and without negative values.
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
    """The 256 values that a byte stands for: float32[256], ascending, bit for bit bitsandbytes' map. Cached: do not
    change it.

    Decade d, from 0 to 6, covers 10^(d-7) to 10^(d-6) with the centres of n equal intervals; n is 2^d on either side of
    0 if signed, else 2^(d+1). 0 and 1 complete the map; -1 is not in it.

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
    """Number of equal intervals in a decade (0 has the smallest magnitudes), on either side of 0 if signed."""
    return 2**decade if signed else 2 ** (decade + 1)


@functools.cache
def upper_bounds(signed: bool) -> np.ndarray:
    """The largest float32 that is nearest to each magnitude of the map but 1, ascending: float32[128] if signed, else
    [255].

    A bound is the middle to the next magnitude, rounded down, so a float32 is above the bound exactly if it is above
    the middle. Cached: do not change the array.
    """
    values = dynamic_map(signed)[SIGNED_ZERO if signed else 0 :].astype(np.float64)
    middle = (values[:-1] + values[1:]) / 2  # exact in float64
    rounded = middle.astype(np.float32)
    return np.where(rounded.astype(np.float64) > middle, np.nextafter(rounded, np.float32(0)), rounded)


@functools.cache
def _decades(signed: bool) -> list[tuple[np.float32, np.float32, np.float32]]:
    """(a, b, last) of each of the 7 decades: floor(min(a x + b, last)) is the index of the magnitude nearest to x, or
    one less.
    """
    decades, first = [], 1  # 0 has index 0
    for decade in range(_DECADES):
        count = _intervals(signed, decade)
        width = 0.9 * 10.0 ** (decade + 1 - _DECADES) / count
        decades.append(tuple(np.float32(v) for v in (1 / width, first - count / 9 - 0.25, first + count - 1)))
        first += count
    return decades


def _edges(signed: bool) -> list[float]:
    """The six magnitudes, ascending, midway between the last value of one decade and the first of the next."""
    return [10.0 ** (d + 1 - _DECADES) * (1 + 0.9 / _intervals(signed, d)) for d in range(_DECADES - 1)]


def nearest_codes(x: jax.Array, signed: bool) -> jax.Array:
    """The index of the map's value nearest to each number, uint8 in x's shape; ties go towards 0.

    A binary search would read the map eight times per element, each read waiting for the one before. Within a decade
    the map is linear, so a product gives the index or one less; a comparison with the exact bound decides.

      x: float32, from -1 to 1, or from 0 to 1 if not signed (a negative number would get the index of its magnitude). A
      number beyond gets the last index on its side.
    """
    magnitude = jnp.abs(x)
    (per_unit, start, last), *higher_decades = _decades(signed)
    for edge, (per_unit_above, start_above, last_above) in zip(_edges(signed), higher_decades, strict=True):
        above = magnitude > edge
        per_unit = jnp.where(above, per_unit_above, per_unit)
        start = jnp.where(above, start_above, start)
        last = jnp.where(above, last_above, last)
    index = jnp.minimum(magnitude * per_unit + start, last).astype(jnp.int32)
    index += (magnitude > jnp.asarray(upper_bounds(signed)).at[index].get(mode="clip")).astype(jnp.int32)
    if signed:
        index = jnp.where(x < 0, SIGNED_ZERO - jnp.minimum(index, SIGNED_ZERO), SIGNED_ZERO + index)
    return index.astype(jnp.uint8)


def encode(values: jax.Array, signed: bool) -> tuple[jax.Array, jax.Array]:
    """Quantises values of any shape: (codes uint8[blocks, 256], absmax float32[blocks]) of the flattened values, padded
    with zeros.

    XLA divides, so codes may differ between devices. A block whose absmax is below 2^-126 becomes zeros; a number that
    is not finite makes its block meaningless.

      values: floating-point numbers (TypeError for others), not negative if not signed.
      signed: False: the map without negative values, which is finer.
    """
    Arguments("blockwise8.encode").array("values", values, "...", FLOATS)
    blocks = in_blocks(values)
    absmax = jnp.abs(blocks).max(1)
    absmax = jnp.where(absmax < jnp.finfo(jnp.float32).tiny, 0.0, absmax)
    scale = jnp.where(absmax == 0, 1.0, absmax)
    return nearest_codes(blocks / scale[:, None], signed), absmax


def decode(codes: jax.Array, absmax: jax.Array, signed: bool) -> jax.Array:
    """float32[blocks, 256], padding included: the map's value of each code times its block's absmax.

    codes: uint8[blocks, 256]; TypeError or ValueError for another dtype or shape.
    absmax: float32[blocks].
    signed: of the map from -1 to 1; else from 0 to 1.
    """
    check = Arguments("blockwise8.decode")
    check.array("codes", codes, f"blocks {BLOCK}", jnp.uint8)
    check.array("absmax", absmax, "blocks", jnp.float32)
    return jnp.asarray(dynamic_map(signed)).at[codes].get(mode="promise_in_bounds") * absmax[:, None]


def in_blocks(values: jax.Array) -> jax.Array:
    """Values of any shape, flattened and padded with zeros, as float32[blocks, 256]."""
    flat = values.astype(jnp.float32).reshape(-1)
    return jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
