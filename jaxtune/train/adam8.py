"""Adam with 8-bit states (arXiv 2110.02861), with the maths of bitsandbytes' AdamW8bit.

Each moment is kept as one byte an element, a place in a map of 256 values that is dense near 0, and one float32 for a
block of 256 elements, its largest magnitude. A step decodes, updates, moves the parameter by the moments as they are
before they are encoded again, and encodes.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

BLOCK = 256
MIN_SIZE = 4096  # elements; smaller tensors keep float32 moments
_DECADES = 7
_SIGNED_ZERO = 127  # place of 0 in the signed map


@functools.cache
def dynamic_map(signed: bool) -> np.ndarray:
    """float32[256], ascending: the dynamic map of arXiv 2110.02861, to the bit that of bitsandbytes.

    Decade d of 7 covers 10^(d-7) to 10^(d-6) with the centres of n equal intervals, n = 2^d on either side of 0 if
    signed, else 2^(d+1). With 0 and 1 that makes 256; -1 is not among them.
    """
    values = [np.float32(0.0), np.float32(1.0)]
    for decade in range(_DECADES):
        count = _intervals(signed, decade)
        low = np.float32(0.1)
        step = np.float64((np.float32(1) - low) / np.float32(count))
        index = np.arange(count + 1)
        # As torch.linspace: from the nearer end, a fused multiply-add; exact in float64, so rounded once.
        edges = np.where(index < (count + 1) // 2, low + step * index, 1 - step * (count - index)).astype(np.float32)
        centres = np.float32(10.0 ** (decade + 1 - _DECADES)) * ((edges[:-1] + edges[1:]) / np.float32(2))
        values += [*centres, *(-centres if signed else ())]
    return np.sort(np.asarray(values, np.float32))


def _intervals(signed: bool, decade: int) -> int:
    return 2**decade if signed else 2 ** (decade + 1)


@functools.cache
def _upper_bounds(signed: bool) -> np.ndarray:
    """float32: of each magnitude of the map but 1, ascending from 0, the largest float32 that is nearest to it.

    That is the middle to the next one, rounded down: x lies above it exactly if it lies above the middle.
    """
    values = dynamic_map(signed)[_SIGNED_ZERO if signed else 0 :].astype(np.float64)
    middle = (values[:-1] + values[1:]) / 2  # exact in float64
    rounded = middle.astype(np.float32)
    return np.where(rounded.astype(np.float64) > middle, np.nextafter(rounded, np.float32(0)), rounded)


@functools.cache
def _decades(signed: bool) -> list[tuple[np.float32, np.float32, np.float32]]:
    """(a, b, last) of each decade: a value x in it has the place floor(a x + b) or the next, at most `last` + 1."""
    found, first = [], 1  # 0 is at place 0
    for decade in range(_DECADES):
        count = _intervals(signed, decade)
        width = 0.9 * 10.0 ** (decade + 1 - _DECADES) / count
        found.append(tuple(np.float32(v) for v in (1 / width, first - count / 9 - 0.25, first + count - 1)))
        first += count
    return found


def _edges(signed: bool) -> list[float]:
    """Where decades meet: midway between the last value of one and the first of the next, whose intervals are wider."""
    return [10.0 ** (d + 1 - _DECADES) * (1 + 0.9 / _intervals(signed, d)) for d in range(_DECADES - 1)]


def nearest_codes(x: jax.Array, signed: bool) -> jax.Array:
    """uint8 places in the map of the values nearest to x, float32 from -1 (or 0) to 1; ties go towards 0.

    A search of the map would read it eight times for an element, each read waiting for the one before. Within a decade
    the map is linear, so a product gives the place to within one, always the lower of the two: it is taken 1/4 of an
    interval too low, far more than its rounding error. One read of the exact bound between the two decides.
    """
    magnitude = jnp.abs(x)
    (per_unit, start, last), *others = _decades(signed)
    for edge, (per_unit_above, start_above, last_above) in zip(_edges(signed), others, strict=True):
        above = magnitude > edge
        per_unit = jnp.where(above, per_unit_above, per_unit)
        start = jnp.where(above, start_above, start)
        last = jnp.where(above, last_above, last)
    place = jnp.minimum(magnitude * per_unit + start, last).astype(jnp.int32)
    place += magnitude > jnp.asarray(_upper_bounds(signed)).at[place].get(mode="clip")
    if signed:
        place = jnp.where(x < 0, _SIGNED_ZERO - jnp.minimum(place, _SIGNED_ZERO), _SIGNED_ZERO + place)
    return place.astype(jnp.uint8)


def encode(values: jax.Array, signed: bool) -> tuple[jax.Array, jax.Array]:
    """(codes uint8[blocks, 256], absmax float32[blocks]) of float32 values of any shape; the last block is padded.

    A block whose largest magnitude is no normal float32 becomes zeros.
    """
    blocks = _blocks(values)
    absmax = jnp.abs(blocks).max(1)
    absmax = jnp.where(absmax < jnp.finfo(jnp.float32).tiny, 0.0, absmax)
    scale = jnp.where(absmax == 0, 1.0, absmax)
    return nearest_codes(blocks / scale[:, None], signed), absmax


def decode(codes: jax.Array, absmax: jax.Array, signed: bool) -> jax.Array:
    """float32[blocks, 256], the inverse of `encode` up to rounding."""
    return jnp.asarray(dynamic_map(signed)).at[codes].get(mode="promise_in_bounds") * absmax[:, None]


def _blocks(values: jax.Array) -> jax.Array:
    flat = values.astype(jnp.float32).reshape(-1)
    return jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)


class Adam8State(NamedTuple):
    """Trees as the parameters'. m, v: uint8[blocks, 256], or float32 of the tensor's shape below MIN_SIZE elements;
    their absmax: float32[blocks], or float32[0]. count: int32, updates made."""

    count: jax.Array
    m: Any
    m_absmax: Any
    v: Any
    v_absmax: Any


def scale_by_adam_8bit(beta1: float, beta2: float, eps: float) -> optax.GradientTransformation:
    """Adam's direction m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps), as optax.scale_by_adam, over 8-bit states.

    2 + 8/256 bytes an element. The direction is float32, from moments that are not rounded to 8 bits in this step.
    """

    def init(params):
        def moment(p, zero_code):
            if p.size < MIN_SIZE:
                return jnp.zeros(p.shape, jnp.float32)
            return jnp.full((-(-p.size // BLOCK), BLOCK), zero_code, jnp.uint8)

        def absmax(p):
            return jnp.zeros(0 if p.size < MIN_SIZE else -(-p.size // BLOCK), jnp.float32)

        return Adam8State(
            count=jnp.zeros((), jnp.int32),
            m=jax.tree.map(lambda p: moment(p, _SIGNED_ZERO), params),
            m_absmax=jax.tree.map(absmax, params),
            v=jax.tree.map(lambda p: moment(p, 0), params),
            v_absmax=jax.tree.map(absmax, params),
        )

    def update(updates, state, params=None):
        del params
        count = jnp.asarray(optax.safe_increment(state.count))
        # 1 - beta^t, without the digits that a power near 1 loses in float32.
        correction1, correction2 = (
            -jnp.expm1(count * jnp.float32(math.log(beta) if beta else -math.inf)) for beta in (beta1, beta2)
        )

        def one(g, m, m_absmax, v, v_absmax):
            """(direction, and the new m, m_absmax, v, v_absmax) of one tensor."""
            shape, rounded = g.shape, m.dtype == jnp.uint8
            g = g.astype(jnp.float32)
            if rounded:
                g, m, v = _blocks(g), decode(m, m_absmax, signed=True), decode(v, v_absmax, signed=False)
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            direction = m / correction1 / (jnp.sqrt(v) / jnp.sqrt(correction2) + eps)
            if rounded:
                direction = direction.reshape(-1)[: math.prod(shape)].reshape(shape)
                (m, m_absmax), (v, v_absmax) = encode(m, signed=True), encode(v, signed=False)
            return direction, m, m_absmax, v, v_absmax

        leaves, structure = jax.tree.flatten(updates)
        states = (jax.tree.leaves(tree) for tree in state[1:])
        results = [one(*tensors) for tensors in zip(leaves, *states, strict=True)]
        direction, *moments = (jax.tree.unflatten(structure, column) for column in zip(*results, strict=True))
        return direction, Adam8State(count, *moments)

    return optax.GradientTransformation(init, update)
