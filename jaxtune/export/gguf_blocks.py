"""Encodes tensors in the number types of GGUF files, in runs. Each is encoded, decoded and compared on the tensor's
device; on the host the gguf package decodes a sample of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtune.export import gguf_codes, gguf_k_codes
from jaxtune.models.placement.host_pieces import copied
from jaxtune.models.stack.stack_layers import UNTUNED

Floats = jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class BlockType:
    """A quantised type, which encodes each block of neighbouring numbers of a row alone."""

    numbers: int  # how many numbers of a row are one block
    encode: Callable[[jax.Array], jax.Array]  # float32[n, numbers] -> uint8[n, bytes of a block]
    decode: Callable[[jax.Array], jax.Array]  # uint8[n, bytes of a block] -> float32[n, numbers]
    # (blocks float32[n, numbers], numpy or jax.numpy) -> the largest error in each block that rounding explains, [n, 1]
    allowed: Callable[[Floats, ModuleType], Floats]
    # (blocks that quantisation-aware training (QAT) rounded to the type, the name of the dtype in which it made them)
    # -> as from `encode`, but it decodes to exactly these blocks; None: QAT does not round to the type
    exactly: Callable[[jax.Array, str], jax.Array] | None = None


def _of_32(
    encode: Callable, decode: Callable, steps: int, worst: float, exactly: Callable | None = None, f16: int = 1
) -> BlockType:
    """A BlockType of 32 numbers. steps, worst, f16: as for gguf_codes.allowed."""
    bound = functools.partial(gguf_codes.allowed, steps=steps, worst=worst, f16=f16)
    return BlockType(gguf_codes.NUMBERS, encode, decode, bound, exactly)


def _of_256(bits: int) -> BlockType:
    """Q4_K, Q5_K or Q6_K."""
    bound = functools.partial(gguf_k_codes.allowed, bits=bits)
    return BlockType(gguf_k_codes.NUMBERS, gguf_k_codes.encoder(bits), gguf_k_codes.decoder(bits), bound)


BLOCK_TYPES = {  # by gguf's names
    "Q8_0": _of_32(gguf_codes.encode_q8_0, gguf_codes.decode_q8_0, 127, 0.5, gguf_codes.encode_q8_0),
    "Q4_0": _of_32(gguf_codes.encode_q4_0, gguf_codes.decode_q4_0, 8, 1.0, gguf_codes.encode_q4_0),
    "Q5_0": _of_32(gguf_codes.encode_q5_0, gguf_codes.decode_q5_0, 16, 1.0),
    "Q5_1": _of_32(gguf_codes.encode_q5_1, gguf_codes.decode_q5_1, 31, 1.0, f16=3),
    "Q4_K": _of_256(4),
    "Q5_K": _of_256(5),
    "Q6_K": _of_256(6),
}
_PLAIN_ROW = 32  # numbers of a row in which the values of a plain type are handled
LARGEST_F16 = 65504.0
# Sizes of the runs that are encoded at a time. The encoders are compiled for these sizes only, whatever the tensors'
# shapes. The first is for quantised types alone, of which as many numbers are fewer bytes: an encoder of Q4_K has a
# hundred kernels, and starting them takes longer than encoding 2^24 numbers on an H200.
_RUNS = (1 << 26, 1 << 24, 1 << 22, 1 << 20, 1 << 16)
# How many numbers of a run are also decoded with gguf's own reader: at least the first, or one in the second.
_SAMPLED = 1 << 16, 1 << 8
_PART = 1 << 30  # a larger tensor is divided into parts of this size, because positions are 32-bit integers


def block_size(kind: str) -> int:
    """Numbers of a row that are encoded as one; 32 for plain types, which have no blocks. kind: gguf's name of the
    type.
    """
    return BLOCK_TYPES[kind].numbers if kind in BLOCK_TYPES else _PLAIN_ROW


def grid_of(grid: str | None, kind: str) -> str | None:
    """`grid` for `encode`: plain types hold numbers of any grid."""
    return grid if kind in BLOCK_TYPES else None


def encode(name: str, array: Any, kind: str, grid: str | None = None) -> Iterator[Callable[[], np.ndarray]]:
    """Encodes floats [..., columns] in runs of at most 2^26 numbers (2^24 in plain types), in the order of the file.
    Columns must be whole blocks.

      name: of the tensor, for errors.
      array: on the device or the host.
      kind: gguf's name of the type.
      grid: the dtype in which QAT rounded the values to this type (Q8_0 or Q4_0), which shortened the scales; they are
        encoded exactly. None: rounded here.

    Yields functions that copy a run's bytes to the host, uint8[n]; threads may call them while the next run is encoded.
    They raise ArithmeticError for values that are not finite, too large for F16, or further off than rounding explains;
    with `grid`, ValueError for any that is not exact.
    """
    if isinstance(array, np.ndarray) and kind == "F32":  # rotary factors and adapters: the device would change nothing
        yield functools.partial(_unchanged, name, array)
        return
    array, block = jnp.asarray(array), block_size(kind)
    for section in _parts(array):
        for start, size, value_count in _runs(section.size, kind):
            blocks, sample = _cut(section, start, size, value_count, block)
            coded = _encoded(blocks, kind) if grid is None else _exactly(blocks, kind, grid)
            answers = _checked(blocks, coded, kind, grid is not None)
            yield functools.partial(_fetched, name, kind, coded, value_count, answers, sample, grid is not None)
            del blocks, coded, sample


def programs(array: jax.ShapeDtypeStruct, kind: str, grid: str | None) -> dict[tuple, Callable[[], jax.stages.Lowered]]:
    """{key: a function that traces a program of `encode`}, in order; equal keys are one program.

    array: shape, dtype and sharding of the tensor.
    kind: gguf's name of the type.
    grid: the dtype in which QAT rounded the values to this type; None: `encode` rounds them.
    """
    lowerings: dict[tuple, Callable[[], jax.stages.Lowered]] = {}
    block, dtype, where = block_size(kind), array.dtype, array.sharding
    rows = _rows_of_parts(array)
    for count in {min(rows, len(array)), len(array) % rows or rows}:
        section = jax.ShapeDtypeStruct((count, *array.shape[1:]), dtype, sharding=where)
        for _, size, value_count in _runs(section.size, kind):
            lower_cut = functools.partial(_cut.lower, section, 0, size, value_count, block)
            lowerings["cut", section.shape, str(dtype), size, value_count, block] = lower_cut
            blocks = jax.ShapeDtypeStruct((size // block, block), dtype, sharding=where)
            encoder, statics = (_encoded, (kind,)) if grid is None else (_exactly, (kind, grid))
            lowerings["encoded", kind, grid, str(dtype), size] = functools.partial(encoder.lower, blocks, *statics)
            checked = functools.partial(_lowered_check, blocks, kind, grid)
            lowerings["checked", kind, grid, str(dtype), size] = checked
    return lowerings


def _lowered_check(blocks: jax.ShapeDtypeStruct, kind: str, grid: str | None) -> jax.stages.Lowered:
    form = _encoded.eval_shape(blocks, kind) if grid is None else _exactly.eval_shape(blocks, kind, grid)
    coded = jax.ShapeDtypeStruct(form.shape, form.dtype, sharding=blocks.sharding)
    return _checked.lower(blocks, coded, kind, grid is not None)


def _rows_of_parts(array: jax.Array | jax.ShapeDtypeStruct) -> int:
    return max(1, _PART // (array.size // len(array)))


def _parts(array: jax.Array) -> Iterator[jax.Array]:
    """Slices along the first axis of at most 2^30 numbers, or one row, because positions are 32-bit integers."""
    rows = _rows_of_parts(array)
    for start in range(0, len(array), rows):
        yield array if rows >= len(array) else array[start : start + rows]


def _runs(numbers: int, kind: str) -> Iterator[tuple[int, int, int]]:
    """(start, size, how many of it are values) of each run, in few sizes, as each compiles."""
    sizes, start = _RUNS if kind in BLOCK_TYPES else _RUNS[1:], 0
    while start < numbers:
        size = max((size for size in sizes if 2 * size <= 3 * (numbers - start)), default=min(sizes))
        value_count = min(size, numbers - start)
        yield start, size, value_count
        start += value_count


@functools.partial(jax.jit, static_argnums=(2, 3, 4), compiler_options=UNTUNED)
def _cut(array: jax.Array, start: int, size: int, value_count: int, block: int) -> tuple[jax.Array, jax.Array]:
    """A run as [size / block, block], padded with zeros after its values, and its sampled blocks."""
    run = lax.dynamic_slice(array.reshape(-1), (start,), (value_count,))
    blocks = jnp.pad(run, (0, size - value_count)).reshape(-1, block)
    return blocks, blocks[_places(len(blocks), block)]


@functools.cache
def _places(rows: int, block: int) -> np.ndarray:
    """Indices of sampled blocks, first to last: of 2^16 numbers, or of one in 2^8 if these are more."""
    least, share = _SAMPLED
    return np.linspace(0, rows - 1, min(max(least, rows * block // share), rows * block) // block).astype(np.int32)


def _fetched(
    name: str,
    kind: str,
    coded: jax.Array,
    value_count: int,
    answers: jax.Array,
    sample: jax.Array,
    exact: bool,
) -> np.ndarray:
    """A run's bytes without padding, uint8[n]; raises what `encode` says."""
    # Few copies, and all started at once: a thread that waits for one has to wait for Python's lock after it too.
    (finite, in_range, near), wide = jax.device_get((answers, sample))
    host_bytes, shape = copied(coded), (len(coded), block_size(kind))
    if not finite:
        raise _not_finite(name)
    if not in_range:
        raise ArithmeticError(f"gguf: {name} has values above {LARGEST_F16:g}, too large for f16: use bf16")
    if not near or not _reader_agrees(wide.astype(np.float32), host_bytes[_places(*shape)], kind, exact):
        if exact:
            raise ValueError(
                f"gguf: numbers of {name} are not on the grid of {kind} to which the model says its weights were "
                'rounded ("qat" in config.json): they were changed since; remove "qat" to have them rounded'
            )
        raise ArithmeticError(f"gguf: {name}: in {kind} its values are further off than that type's rounding explains")
    flat_bytes = np.ascontiguousarray(host_bytes).reshape(-1).view(np.uint8)
    return flat_bytes[: flat_bytes.size * value_count // (len(coded) * block_size(kind))]


def _unchanged(name: str, array: np.ndarray) -> np.ndarray:
    """The bytes as float32. Raises ArithmeticError if a number is not finite."""
    wide = np.ascontiguousarray(array, np.float32).reshape(-1)
    if not np.isfinite(wide).all():
        raise _not_finite(name)
    return wide.view(np.uint8)


def _not_finite(name: str) -> ArithmeticError:
    return ArithmeticError(
        f"export: {name} has values that are not finite in float32, so the model is broken: take an earlier checkpoint "
        "of its training, or load it anew; save_pretrained writes it as it is"
    )


@functools.partial(jax.jit, static_argnums=1, compiler_options=UNTUNED)
def _encoded(array: jax.Array, kind: str) -> jax.Array:
    """[rows, block], each row one block, in a plain type, or uint8[rows, bytes of a block]."""
    if kind == "BF16":
        return array.astype(jnp.bfloat16)
    wide = array.astype(jnp.float32)
    if kind == "F32":
        return wide
    if kind == "F16":
        return wide.astype(jnp.float16)
    return BLOCK_TYPES[kind].encode(wide)


@functools.partial(jax.jit, static_argnums=(1, 2), compiler_options=UNTUNED)
def _exactly(array: jax.Array, kind: str, grid: str) -> jax.Array:
    """uint8[rows, bytes of a block] of numbers that QAT made in the dtype `grid`."""
    encode = BLOCK_TYPES[kind].exactly
    assert encode is not None, kind
    return encode(array.astype(jnp.float32), grid)


@functools.partial(jax.jit, static_argnums=(2, 3), compiler_options=UNTUNED)
def _checked(array: jax.Array, coded: jax.Array, kind: str, exact: bool) -> jax.Array:
    """bool[3] of floats [rows, block]: all finite; in F16's range; decoded to within the type's rounding."""
    wide = array.astype(jnp.float32)
    decoded = BLOCK_TYPES[kind].decode(coded) if kind in BLOCK_TYPES else coded.astype(jnp.float32)
    in_range = (jnp.abs(wide) <= LARGEST_F16).all() if kind == "F16" else jnp.array(True)
    near = (jnp.abs(decoded - wide) <= _allowed(wide, kind, jnp, exact)).all()
    return jnp.stack([jnp.isfinite(wide).all(), in_range, near])


def _reader_agrees(wide: np.ndarray, coded: np.ndarray, kind: str, exact: bool) -> bool:
    """Whether the gguf package decodes sampled blocks to the values float32[rows, block]: a check by other code."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    as_bytes = kind == "BF16" or kind in BLOCK_TYPES
    # As one row: the package decodes 16 rows at a time, which takes it ten times as long.
    row = (coded.view(np.uint8) if as_bytes else coded).reshape(1, -1)
    decoded = dequantize(row, GGMLQuantizationType[kind])
    return bool((np.abs(decoded.reshape(wide.shape) - wide) <= _allowed(wide, kind, np, exact)).all())


def _allowed(wide: Floats, kind: str, numpy: ModuleType, exact: bool) -> Floats:
    """The largest error that rounding explains: [rows, 1] for a quantised type, else [rows, block]; zero if `exact`.
    numpy: numpy or jax.numpy.
    """
    if exact:
        return numpy.zeros_like(wide)
    if kind in BLOCK_TYPES:
        return BLOCK_TYPES[kind].allowed(wide, numpy)
    if kind == "F32":
        return numpy.zeros_like(wide)
    return numpy.abs(wide) * np.float32(2.0**-11 if kind == "F16" else 2.0**-8) + np.float32(2.0**-25)
