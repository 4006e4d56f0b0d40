"""Encoders for the number types of GGUF files, which run and check themselves on the tensor's device.

Their bytes equal those of the gguf package's quantize, which computes the same in numpy with one float32 array for each
operation. F32, F16 and BF16 are plain numbers. In Q8_0 and Q4_0 each 32 numbers of a row share a scale in f16; such a
block has 34 or 18 bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtune.models.placement import partition
from jaxtune.pallas.formats.division import divide

BLOCK = 32  # numbers of a row that share a scale in q8_0 and q4_0
LARGEST_F16 = 65504.0
# Sizes of the runs that are encoded at a time. The encoders are compiled for these sizes only, whatever the tensors'
# shapes.
_RUNS = (1 << 24, 1 << 22, 1 << 16)
_SAMPLED_BLOCKS = 2048  # blocks of a run that are also decoded with gguf's own reader
_PART = 1 << 30  # a larger tensor is divided into parts of this size, because positions are 32-bit integers


def encode(name: str, array: Any, kind: str) -> Iterator[Callable[[], np.ndarray]]:
    """Encodes an array [..., columns] of floats in the type `kind`, run by run in the order of the file.

    Every value is compared with what its bytes decode to; for some blocks gguf's own reader decodes them.

    Args:
      name: of the tensor, for messages.
      array: the values.
      kind: gguf's name of the type.
    Yields:
      for each run a function that returns its bytes, uint8[n] in host memory. A thread may call it while the device
        encodes the next run.
    Raises:
      ArithmeticError: by that function: values that are not finite, too large for f16, or further off than the type's
        rounding explains.
    """
    array = jnp.asarray(array)
    for part in _parts(array):
        for at, size, own in _runs(part.size):
            blocks = _cut(part, at, size, own)
            coded = _encoded(blocks, kind)
            answers = _checked(blocks, coded, kind)
            places = np.linspace(0, -(-own // BLOCK) - 1, min(_SAMPLED_BLOCKS, size // BLOCK)).astype(np.int32)
            yield functools.partial(_fetched, name, kind, coded, own, answers, _sampled(blocks, coded, places))
            del blocks, coded


def _parts(array: jax.Array) -> Iterator[jax.Array]:
    """The array divided along its first axis into parts of about 2^30 numbers, because positions within a part are
    32-bit integers."""
    rows = max(1, _PART // (array.size // len(array)))
    for at in range(0, len(array), rows):
        yield array if rows >= len(array) else array[at : at + rows]


def _runs(numbers: int) -> Iterator[tuple[int, int, int]]:
    """Divides the `numbers` values of a flat tensor into runs that are encoded one at a time, and yields (start, size,
    how many of the values it contains) for each.

    Every size is one of _RUNS, so that the encoder is compiled for three sizes only; `_cut` pads a run that contains
    fewer values than its size. Each run has the smallest size of which four have room for more than the values that are
    left, or the largest size if there is none: 2^22 + 1 values are a run of 2^22 and one of 2^16.
    """
    at = 0
    while at < numbers:
        size = min((size for size in _RUNS if 4 * size > numbers - at), default=max(_RUNS))
        own = min(size, numbers - at)
        yield at, size, own
        at += own


@functools.partial(jax.jit, static_argnums=(2, 3))
def _cut(array: jax.Array, at: int, size: int, own: int) -> jax.Array:
    """Cuts a run out of an array: its `own` numbers from position `at` of the flat array, padded with zeros to `size`
    numbers so that few sizes are compiled, as [size / BLOCK, BLOCK]."""
    run = lax.dynamic_slice(array.reshape(-1), (at,), (own,))
    return jnp.pad(run, (0, size - own)).reshape(-1, BLOCK)


@jax.jit
def _sampled(blocks: jax.Array, coded: jax.Array, places: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The blocks at `places`, and their encoded bytes."""
    return blocks[places], coded[places]


def _fetched(
    name: str, kind: str, coded: jax.Array, own: int, answers: Sequence[jax.Array], sampled: Sequence[jax.Array]
) -> np.ndarray:
    """Copies a run's bytes to the host and raises what `encode` says if its checks failed. A run is a part of a tensor,
    of one of three sizes; its end may be padding.

    Args:
      name: of the tensor, for messages.
      kind: gguf's name of the type.
      coded: the encoded run, on the device.
      own: how many of its numbers are the tensor's; the rest is padding.
      answers: what `_checked` returned.
      sampled: what `_sampled` returned.
    Returns:
      the bytes of the first `own` numbers, uint8[n].
    """
    finite, fits, near = jax.device_get(answers)
    if not finite:
        raise ArithmeticError(f"gguf: {name} has values that are not finite")
    if not fits:
        raise ArithmeticError(f"gguf: {name} has values above {LARGEST_F16:g}, too large for f16: use bf16")
    wide, read = (partition.on_host(each) for each in sampled)
    if not near or not _reader_agrees(wide.astype(np.float32), np.ascontiguousarray(read), kind):
        raise ArithmeticError(f"gguf: {name}: in {kind} its values are further off than that type's rounding explains")
    found = np.ascontiguousarray(partition.on_host(coded)).reshape(-1).view(np.uint8)
    return found[: found.size * own // (len(coded) * BLOCK)]


@functools.partial(jax.jit, static_argnums=1)
def _encoded(array: jax.Array, kind: str) -> jax.Array:
    """Encodes an array [rows, columns] of floats in the GGUF type `kind` (F32, F16, BF16, Q8_0 or Q4_0): an array of
    that dtype, or uint8[rows, bytes] for a quantised type."""
    if kind == "BF16":
        return array.astype(jnp.bfloat16)
    wide = array.astype(jnp.float32)
    if kind == "F32":
        return wide
    if kind == "F16":
        return wide.astype(jnp.float16)
    blocks = wide.reshape(len(wide), -1, BLOCK)
    scales, codes = _q8_0(blocks) if kind == "Q8_0" else _q4_0(blocks)
    scales = lax.bitcast_convert_type(scales.astype(jnp.float16), jnp.uint8)
    return jnp.concatenate([scales, codes], -1).reshape(len(wide), -1)


def _inverse(scales: jax.Array) -> jax.Array:
    """1 / scales, and 0 where a scale is 0."""
    return jnp.where(scales == 0, 0, divide(jnp.ones_like(scales), jnp.where(scales == 0, 1, scales)))


def _q8_0(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(scales float32[rows, n], codes uint8[rows, n, 32]) of blocks [rows, n, 32]. The codes are the bits of the int8
    numbers of Q8_0, -127 to 127, as bytes to be written."""
    largest = jnp.abs(blocks).max(-1)
    scales = divide(largest, jnp.full_like(largest, 127))
    numbers = blocks * _inverse(scales)[..., None]
    size = jnp.abs(numbers)
    whole = jnp.floor(size)
    rounded = jnp.sign(numbers) * (whole + jnp.floor(2 * (size - whole)))  # halves away from zero
    return scales, lax.bitcast_convert_type(rounded.astype(jnp.int8), jnp.uint8)


def _q4_0(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(scales float32[rows, n], codes uint8[rows, n, 16]) of blocks [rows, n, 32]; a byte contains two codes."""
    at = jnp.abs(blocks).argmax(-1, keepdims=True)
    scales = jnp.take_along_axis(blocks, at, -1)[..., 0] / -8
    # The barrier prevents a fused multiply-add, because gguf rounds between product and sum.
    numbers = lax.optimization_barrier(blocks * _inverse(scales)[..., None]) + jnp.float32(8.5)
    codes = jnp.clip(jnp.trunc(numbers), 0, 15).astype(jnp.uint8)
    return scales, codes[..., :16] | (codes[..., 16:] << 4)


@functools.partial(jax.jit, static_argnums=2)
def _checked(array: jax.Array, coded: jax.Array, kind: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compares an array [rows, columns] with what `coded`, its encoded form in the GGUF type `kind`, decodes to, on the
    device.

    Returns:
      (all values are finite, all fit into the type, all decode to within the type's rounding), boolean scalars.
    """
    wide = array.astype(jnp.float32)
    if kind.startswith("Q"):
        blocks = coded.reshape(len(wide), wide.shape[1] // BLOCK, -1)
        scales = lax.bitcast_convert_type(blocks[..., :2], jnp.float16).astype(jnp.float32)[..., None]
        if kind == "Q8_0":
            codes = lax.bitcast_convert_type(blocks[..., 2:], jnp.int8)
        else:
            codes = jnp.concatenate([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], -1).astype(jnp.int8) - 8
        found = (codes.astype(jnp.float32) * scales).reshape(wide.shape)
    else:
        found = coded.astype(jnp.float32)
    fits = (jnp.abs(wide) <= LARGEST_F16).all() if kind == "F16" else jnp.array(True)
    return jnp.isfinite(wide).all(), fits, (jnp.abs(found - wide) <= _allowed(wide, kind, jnp)).all()


def _reader_agrees(wide: np.ndarray, coded: np.ndarray, kind: str) -> bool:
    """Whether the gguf package decodes `coded`, values encoded in the GGUF type `kind`, to `wide`, the float32[rows,
    columns] they were made from, within the type's rounding: an independent check of the encoders."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    found = dequantize(coded.view(np.uint8) if kind in ("BF16", "Q8_0", "Q4_0") else coded, GGMLQuantizationType[kind])
    return bool((np.abs(found.reshape(wide.shape) - wide) <= _allowed(wide, kind, np)).all())


def _allowed(wide: Any, kind: str, numpy: Any) -> Any:
    """The largest error that rounding to the GGUF type `kind` explains, for each value of `wide`, float32[rows,
    columns]. `numpy` is numpy or jax.numpy."""
    if kind == "F32":
        return numpy.zeros_like(wide)
    if kind in ("F16", "BF16"):
        return numpy.abs(wide) * np.float32(2.0**-11 if kind == "F16" else 2.0**-8) + np.float32(2.0**-25)
    # A block's scale is its largest value over 127 (q8_0) or over 8 (q4_0), in f16. Codes of q4_0 end at 7, so the
    # negative of the largest value is clipped by a whole step.
    largest = numpy.abs(wide).reshape(len(wide), -1, BLOCK).max(-1, keepdims=True)
    steps, worst = (127, 0.5) if kind == "Q8_0" else (8, 1.0)
    bound = largest * np.float32(worst * 1.001 / steps + 2.0**-11) + np.float32(steps * 2.0**-25)
    return numpy.broadcast_to(bound, (*bound.shape[:-1], BLOCK)).reshape(wide.shape)
