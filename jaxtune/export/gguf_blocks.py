"""Writes tensors in the number types of GGUF files; encoders run and check themselves on the tensor's device.

F32, F16 and BF16 are plain numbers. The quantised types, which BLOCK_TYPES lists, code the numbers of a row in blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtune.export import gguf_codes, gguf_k_codes
from jaxtune.models.placement import partition

Floats = jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class BlockType:
    """A quantised type, in which rows are coded in blocks of neighbouring numbers."""

    numbers: int  # in a block
    encode: Callable[[jax.Array], jax.Array]  # float32[n, numbers] -> uint8[n, bytes of a block]
    decode: Callable[[jax.Array], jax.Array]  # uint8[n, bytes of a block] -> float32[n, numbers]
    # (blocks float32[n, numbers], numpy or jax.numpy) -> the largest error of each that rounding explains, [n, 1]
    allowed: Callable[[Floats, ModuleType], Floats]


def _of_32(encode: Callable, decode: Callable, steps: int, worst: float) -> BlockType:
    """A type with blocks of 32; steps and worst: see gguf_codes.allowed."""
    bound = functools.partial(gguf_codes.allowed, steps=steps, worst=worst)
    return BlockType(gguf_codes.NUMBERS, encode, decode, bound)


def _of_256(bits: int) -> BlockType:
    """A type with blocks of 256 and codes of this many bits."""
    bound = functools.partial(gguf_k_codes.allowed, bits=bits)
    return BlockType(gguf_k_codes.NUMBERS, gguf_k_codes.encoder(bits), gguf_k_codes.decoder(bits), bound)


BLOCK_TYPES = {  # by gguf's names
    "Q8_0": _of_32(gguf_codes.encode_q8_0, gguf_codes.decode_q8_0, 127, 0.5),
    "Q4_0": _of_32(gguf_codes.encode_q4_0, gguf_codes.decode_q4_0, 8, 1.0),
    "Q5_0": _of_32(gguf_codes.encode_q5_0, gguf_codes.decode_q5_0, 16, 1.0),
    "Q5_1": _of_32(gguf_codes.encode_q5_1, gguf_codes.decode_q5_1, 31, 1.0),
    "Q4_K": _of_256(4),
    "Q5_K": _of_256(5),
    "Q6_K": _of_256(6),
}
_PLAIN_ROW = 32  # numbers of a row in which the values of a plain type are handled
LARGEST_F16 = 65504.0
# Sizes of the runs that are encoded at a time. The encoders are compiled for these sizes only, whatever the tensors'
# shapes.
_RUNS = (1 << 24, 1 << 22, 1 << 16)
_SAMPLED = 1 << 16  # numbers of a run that are also decoded with gguf's own reader
_PART = 1 << 30  # a larger tensor is divided into parts of this size, because positions are 32-bit integers


def block_size(kind: str) -> int:
    """Numbers of a row that a block of a type has; `kind` is gguf's name of it."""
    return BLOCK_TYPES[kind].numbers if kind in BLOCK_TYPES else _PLAIN_ROW


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
    array, block = jnp.asarray(array), block_size(kind)
    for part in _parts(array):
        for at, size, own in _runs(part.size):
            blocks = _cut(part, at, size, own, block)
            coded = _encoded(blocks, kind)
            answers = _checked(blocks, coded, kind)
            places = np.linspace(0, -(-own // block) - 1, min(_SAMPLED, size) // block).astype(np.int32)
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


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _cut(array: jax.Array, at: int, size: int, own: int, block: int) -> jax.Array:
    """Cuts a run out of an array: its `own` numbers from position `at` of the flat array, padded with zeros to `size`
    numbers so that few sizes are compiled, as [size / block, block]."""
    run = lax.dynamic_slice(array.reshape(-1), (at,), (own,))
    return jnp.pad(run, (0, size - own)).reshape(-1, block)


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
    return found[: found.size * own // (len(coded) * block_size(kind))]


@functools.partial(jax.jit, static_argnums=1)
def _encoded(array: jax.Array, kind: str) -> jax.Array:
    """Encodes an array of floats, a block a row, in the GGUF type `kind`: an array of that dtype, or uint8[rows, bytes
    of a block] for a quantised type."""
    if kind == "BF16":
        return array.astype(jnp.bfloat16)
    wide = array.astype(jnp.float32)
    if kind == "F32":
        return wide
    if kind == "F16":
        return wide.astype(jnp.float16)
    return BLOCK_TYPES[kind].encode(wide)


@functools.partial(jax.jit, static_argnums=2)
def _checked(array: jax.Array, coded: jax.Array, kind: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compares an array of floats, a block a row, with what `coded`, its encoded form in the GGUF type `kind`, decodes
    to, on the device.

    Returns:
      (all values are finite, all fit into the type, all decode to within the type's rounding), boolean scalars.
    """
    wide = array.astype(jnp.float32)
    found = BLOCK_TYPES[kind].decode(coded) if kind in BLOCK_TYPES else coded.astype(jnp.float32)
    fits = (jnp.abs(wide) <= LARGEST_F16).all() if kind == "F16" else jnp.array(True)
    return jnp.isfinite(wide).all(), fits, (jnp.abs(found - wide) <= _allowed(wide, kind, jnp)).all()


def _reader_agrees(wide: np.ndarray, coded: np.ndarray, kind: str) -> bool:
    """Whether the gguf package decodes `coded`, values encoded in the GGUF type `kind`, to `wide`, the float32[rows,
    block] they were made from, within the type's rounding: an independent check of the encoders."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    as_bytes = kind == "BF16" or kind in BLOCK_TYPES
    found = dequantize(coded.view(np.uint8) if as_bytes else coded, GGMLQuantizationType[kind])
    return bool((np.abs(found.reshape(wide.shape) - wide) <= _allowed(wide, kind, np)).all())


def _allowed(wide: Floats, kind: str, numpy: ModuleType) -> Floats:
    """The largest error that rounding to the GGUF type `kind` explains, for each value or row of `wide`, float32[rows,
    block]. `numpy` is numpy or jax.numpy."""
    if kind in BLOCK_TYPES:
        return BLOCK_TYPES[kind].allowed(wide, numpy)
    if kind == "F32":
        return numpy.zeros_like(wide)
    return numpy.abs(wide) * np.float32(2.0**-11 if kind == "F16" else 2.0**-8) + np.float32(2.0**-25)
