"""The types that a GGUF file keeps numbers in, encoded and checked where a tensor lies: bytes as gguf's quantize makes
them, which computes the same in numpy, one array of float32 for each operation.

F32, F16 and BF16 are numbers. In Q8_0 and Q4_0 each 32 numbers of a row share a scale in f16, of 34 and 18 bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtune.models.placement import partition
from jaxtune.pallas.formats.division import divide

BLOCK = 32  # numbers of a row that share a scale in q8_0 and q4_0
LARGEST_F16 = 65504.0
_CHUNK = 1 << 26  # numbers that are encoded at a time
_SAMPLED_ROWS = 16


def chunks(array: Any) -> Iterator[Any]:
    """The array cut along its first axis into parts of about _CHUNK numbers."""
    rows = max(1, _CHUNK // (array.size // len(array)))
    for at in range(0, len(array), rows):
        yield array if rows >= len(array) else array[at : at + rows]


def encode(name: str, array: Any, kind: str) -> np.ndarray:
    """The bytes, uint8[n] in host memory, that a file has of an array [..., columns] of floats in the type `kind`.

    Every value is compared with what its bytes stand for; for some rows gguf's own reader says what that is.

    Raises:
      ArithmeticError: values that are not finite, too large for f16, or further off than the type's rounding.
    """
    array = jnp.asarray(array)
    array = array.reshape(-1, array.shape[-1])
    coded = _encoded(array, kind)
    finite, fits, near = jax.device_get(_checked(array, coded, kind))
    if not finite:
        raise ArithmeticError(f"gguf: {name} holds values that are not finite")
    if not fits:
        raise ArithmeticError(f"gguf: {name} has values above {LARGEST_F16:g}, too large for f16: use bf16")
    rows = np.unique(np.linspace(0, len(array) - 1, _SAMPLED_ROWS).astype(int))
    sampled = partition.on_host(array[rows]).astype(np.float32)
    host = partition.on_host(coded)
    del array, coded
    if not near or not _reader_agrees(sampled, np.ascontiguousarray(host[rows]), kind):
        raise ArithmeticError(f"gguf: {name}: {kind} is further from the model's values than it rounds")
    return np.ascontiguousarray(host).reshape(-1).view(np.uint8)


@functools.partial(jax.jit, static_argnums=1)
def _encoded(array: jax.Array, kind: str) -> jax.Array:
    """array [rows, columns] as a file has it: numbers of the type, or uint8[rows, bytes]."""
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
    return jnp.where(scales == 0, 0, divide(jnp.ones_like(scales), jnp.where(scales == 0, 1, scales)))


def _q8_0(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(scales float32[rows, n], codes uint8[rows, n, 32])"""
    largest = jnp.abs(blocks).max(-1)
    scales = divide(largest, jnp.full_like(largest, 127))
    numbers = blocks * _inverse(scales)[..., None]
    size = jnp.abs(numbers)
    whole = jnp.floor(size)
    rounded = jnp.sign(numbers) * (whole + jnp.floor(2 * (size - whole)))  # halves away from zero
    return scales, lax.bitcast_convert_type(rounded.astype(jnp.int8), jnp.uint8)


def _q4_0(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(scales float32[rows, n], codes uint8[rows, n, 16])"""
    at = jnp.abs(blocks).argmax(-1, keepdims=True)
    scales = jnp.take_along_axis(blocks, at, -1)[..., 0] / -8
    # The barrier keeps the sum from being contracted into the product: gguf rounds between them.
    numbers = lax.optimization_barrier(blocks * _inverse(scales)[..., None]) + jnp.float32(8.5)
    codes = jnp.clip(jnp.trunc(numbers), 0, 15).astype(jnp.uint8)
    return scales, codes[..., :16] | (codes[..., 16:] << 4)


@functools.partial(jax.jit, static_argnums=2)
def _checked(array: jax.Array, coded: jax.Array, kind: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(is all finite, does it fit into the type, is what the bytes stand for as near as the type's rounding)"""
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
    """Whether gguf reads rows of a file, float32[rows, columns] before, as what they were but for the rounding."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    found = dequantize(coded.view(np.uint8) if kind in ("BF16", "Q8_0", "Q4_0") else coded, GGMLQuantizationType[kind])
    return bool((np.abs(found.reshape(wide.shape) - wide) <= _allowed(wide, kind, np)).all())


def _allowed(wide: Any, kind: str, numpy: Any) -> Any:
    """The largest error that a type's rounding explains, for each value [rows, columns]. numpy: or jax.numpy."""
    if kind == "F32":
        return numpy.zeros_like(wide)
    if kind in ("F16", "BF16"):
        return numpy.abs(wide) * np.float32(2.0**-11 if kind == "F16" else 2.0**-8) + np.float32(2.0**-25)
    # A block's scale is its largest value over 127, or over 8 (whose mirror image is cut off by a whole step), in f16.
    largest = numpy.abs(wide).reshape(len(wide), -1, BLOCK).max(-1, keepdims=True)
    steps, worst = (127, 0.5) if kind == "Q8_0" else (8, 1.0)
    bound = largest * np.float32(worst * 1.001 / steps + 2.0**-11) + np.float32(steps * 2.0**-25)
    return numpy.broadcast_to(bound, (*bound.shape[:-1], BLOCK)).reshape(wide.shape)
