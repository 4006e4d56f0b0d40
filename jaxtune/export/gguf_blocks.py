"""Encodes tensors in the number types of GGUF files (`encode`), for gguf_file.py, which writes the bytes. It cuts a
tensor into runs (`_parts`, `_runs`, `_cut`). Each run is encoded on the tensor's device (`_encoded`, or `_exactly`
after quantisation-aware training), where it is also decoded and compared (`_checked`, within the error that `_allowed`
gives). `_fetched` copies its bytes to the host, where the gguf package decodes a sample of them (`_places`,
`_reader_agrees`). `programs` compiles all that ahead.

F32, F16 and BF16 are plain numbers. The quantised types, which BLOCK_TYPES lists as BlockTypes (made by `_of_32` and
`_of_256`), code the numbers of a row in blocks of `block_size`.
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
from jaxtune.models.stack_layers import UNTUNED

Floats = jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class BlockType:
    """A quantised type of GGUF files, in which a row is divided into blocks of neighbouring numbers and each block is
    encoded alone. BLOCK_TYPES has them by gguf's names."""

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
    """Makes a BlockType with blocks of 32 numbers, for BLOCK_TYPES.

    Args:
      encode, decode: its encoder, float32[n, 32] -> uint8[n, bytes of a block], and the decoder, which makes float32[n,
        32] of these bytes.
      steps, worst: a decoded number may differ from the original by `worst` steps, where a step is the largest
        magnitude of its block divided by `steps`; gguf_codes.allowed adds what rounding to f16 explains.
      exactly: called with (blocks, name of a dtype), encodes blocks that QAT rounded; None: QAT does not round to the
        type.
      f16: how much rounding a block's scale (and least number) to f16 adds to the allowed error, in units of 2^-11 of
        the largest magnitude; the argument of gguf_codes.allowed.
    """
    bound = functools.partial(gguf_codes.allowed, steps=steps, worst=worst, f16=f16)
    return BlockType(gguf_codes.NUMBERS, encode, decode, bound, exactly)


def _of_256(bits: int) -> BlockType:
    """Makes the BlockType with blocks of 256 numbers and codes of this many bits (4, 5 or 6), for BLOCK_TYPES: Q4_K,
    Q5_K or Q6_K, to which QAT does not round."""
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
    """How many numbers of a row are encoded as one block in a type. `encode` divides tensors by it, and gguf_types
    stores rows that are not whole blocks in another type. For the plain types F32, F16 and BF16, which have no blocks,
    it is the 32 numbers that are handled as one. kind: gguf's name of the type."""
    return BLOCK_TYPES[kind].numbers if kind in BLOCK_TYPES else _PLAIN_ROW


def grid_of(grid: str | None, kind: str) -> str | None:
    """The argument `grid` of `encode` for a tensor with this grid (Tensor.grid) that is stored in the type `kind`:
    plain types hold numbers of any."""
    return grid if kind in BLOCK_TYPES else None


def encode(name: str, array: Any, kind: str, grid: str | None = None) -> Iterator[Callable[[], np.ndarray]]:
    """Encodes an array [..., columns] of floats in a type of GGUF files, in runs of at most 2^26 consecutive numbers
    (2^24 in plain types), in the order of the file.

    Every value is compared with what its bytes decode to, by our decoder on the device; a sample of the blocks is also
    decoded by gguf's own reader on the host.

    Args:
      name: the tensor's name, for messages.
      array: the values. In a quantised type the columns must be whole blocks (`block_size`).
      kind: gguf's name of the type.
      grid: if quantisation-aware training (QAT) rounded the values to this type, which can only be Q8_0 or Q4_0
        (asserted), the name of the dtype in which it made the numbers, such as "bfloat16", by which it shortened the
        scales; they are then encoded exactly. None: they are rounded here.
    Yields:
      for each run a function without arguments that copies the run's bytes to the host and returns them, uint8[n]. A
        thread may call it while the device encodes the next run. It raises ArithmeticError for values that are not
        finite, too large for f16 (in the type F16), or further off than the type's rounding explains; with `grid`,
        ValueError for values that the bytes do not stand for exactly.
    """
    if isinstance(array, np.ndarray) and kind == "F32":  # rotary factors and adapters: the device would change nothing
        yield functools.partial(_unchanged, name, array)
        return
    array, block = jnp.asarray(array), block_size(kind)
    for part in _parts(array):
        for at, size, own in _runs(part.size, kind):
            blocks, sample = _cut(part, at, size, own, block)
            coded = _encoded(blocks, kind) if grid is None else _exactly(blocks, kind, grid)
            answers = _checked(blocks, coded, kind, grid is not None)
            yield functools.partial(_fetched, name, kind, coded, own, answers, sample, grid is not None)
            del blocks, coded, sample


def programs(array: jax.ShapeDtypeStruct, kind: str, grid: str | None) -> dict[tuple, Callable[[], jax.stages.Lowered]]:
    """The programs by which `encode` encodes an array with the shape, dtype and sharding of `array`: {key: a function
    that traces one, for its compilation ahead}, in the order in which they are called. Equal keys are the same program.
    kind, grid: as for `encode`."""
    found: dict[tuple, Callable[[], jax.stages.Lowered]] = {}
    block, dtype, where = block_size(kind), array.dtype, array.sharding
    rows = _rows_of_parts(array)
    for count in {min(rows, len(array)), len(array) % rows or rows}:
        part = jax.ShapeDtypeStruct((count, *array.shape[1:]), dtype, sharding=where)
        for _, size, own in _runs(part.size, kind):
            cut = functools.partial(_cut.lower, part, 0, size, own, block)
            found["cut", part.shape, str(dtype), size, own, block] = cut
            blocks = jax.ShapeDtypeStruct((size // block, block), dtype, sharding=where)
            encoder, given = (_encoded, (kind,)) if grid is None else (_exactly, (kind, grid))
            found["encoded", kind, grid, str(dtype), size] = functools.partial(encoder.lower, blocks, *given)
            checked = functools.partial(_lowered_check, blocks, kind, grid)
            found["checked", kind, grid, str(dtype), size] = checked
    return found


def _lowered_check(blocks: jax.ShapeDtypeStruct, kind: str, grid: str | None) -> jax.stages.Lowered:
    """Traces `_checked` for blocks of this form in the type `kind`, for `programs`; grid: as for `encode`."""
    form = _encoded.eval_shape(blocks, kind) if grid is None else _exactly.eval_shape(blocks, kind, grid)
    coded = jax.ShapeDtypeStruct(form.shape, form.dtype, sharding=blocks.sharding)
    return _checked.lower(blocks, coded, kind, grid is not None)


def _rows_of_parts(array: jax.Array | jax.ShapeDtypeStruct) -> int:
    """How many rows of an array `_parts` takes at a time."""
    return max(1, _PART // (array.size // len(array)))


def _parts(array: jax.Array) -> Iterator[jax.Array]:
    """Yields an array in slices along its first axis of at most 2^30 numbers each (one row, if a row has more), which
    `encode` encodes one after another, because positions within a slice are 32-bit integers."""
    rows = _rows_of_parts(array)
    for at in range(0, len(array), rows):
        yield array if rows >= len(array) else array[at : at + rows]


def _runs(numbers: int, kind: str) -> Iterator[tuple[int, int, int]]:
    """Divides the `numbers` values of a flat tensor into runs that are encoded one at a time in the type `kind`, and
    yields (start, size, how many of the values it contains) for each.

    Every size is one of _RUNS, so that the encoder is compiled for few sizes only; `_cut` pads a run that contains
    fewer values than its size. Each run has the largest size of which the values that are left fill two thirds, or the
    smallest if there is none: 3 * 2^24 values are a run of 2^26 in a quantised type, and three of 2^24 in a plain one.
    """
    sizes, at = _RUNS if kind in BLOCK_TYPES else _RUNS[1:], 0
    while at < numbers:
        size = max((size for size in sizes if 2 * size <= 3 * (numbers - at)), default=min(sizes))
        own = min(size, numbers - at)
        yield at, size, own
        at += own


@functools.partial(jax.jit, static_argnums=(2, 3, 4), compiler_options=UNTUNED)
def _cut(array: jax.Array, at: int, size: int, own: int, block: int) -> tuple[jax.Array, jax.Array]:
    """Cuts a run of consecutive numbers out of an array: [size / block, block], a block a row; and those of its blocks
    that the gguf package compares with what it decodes on the host, as a check of the encoders that does not use their
    code (_places). Only this small function is compiled for each shape of `array` and each `own`; the encoders, which
    get its result, are not.

    Args:
      array: the tensor or a slice of it, of any shape; it is read as a flat array.
      at: the position of the run's first number.
      size: numbers of the result; one of few sizes, for each of which the encoder is compiled.
      own: how many numbers are taken from the array; zeros follow up to `size`.
      block: numbers in a block.
    """
    run = lax.dynamic_slice(array.reshape(-1), (at,), (own,))
    blocks = jnp.pad(run, (0, size - own)).reshape(-1, block)
    return blocks, blocks[_places(len(blocks), block)]


@functools.cache
def _places(rows: int, block: int) -> np.ndarray:
    """The indices of the sampled blocks among the `rows` of a run, from its first to its last: of 2^16 numbers, or of
    one in 2^8 of a larger run than 2^24."""
    least, share = _SAMPLED
    return np.linspace(0, rows - 1, min(max(least, rows * block // share), rows * block) // block).astype(np.int32)


def _fetched(
    name: str,
    kind: str,
    coded: jax.Array,
    own: int,
    answers: jax.Array,
    sample: jax.Array,
    exact: bool,
) -> np.ndarray:
    """Copies the bytes of a run to the host, if its checks found no error. A run is a number of consecutive values of a
    tensor that were encoded at once; zeros may be appended to it. `encode` yields this function with its arguments, and
    the writer calls it in a thread.

    Args:
      name: the tensor's name, for messages.
      kind: gguf's name of the type.
      coded: the encoded run, on the device.
      own: how many of its numbers are the tensor's; the rest is padding.
      answers: the results of the checks on the device, which `_checked` returned.
      sample: some of its blocks, which `_cut` returned; what gguf's own reader decodes is compared with them here.
      exact: whether QAT rounded the values to the type, so that any difference is an error.
    Returns:
      the bytes of the first `own` numbers, uint8[n].
    Raises:
      ArithmeticError: values are not finite, too large for F16, or, without `exact`, further off than the type's
        rounding explains.
      ValueError: with `exact`, values are not those of the type, because they were changed after the training.
    """
    # Few copies, and all started at once: a thread that waits for one has to wait for Python's lock after it too.
    (finite, fits, near), wide = jax.device_get((answers, sample))
    whole, shape = copied(coded), (len(coded), block_size(kind))
    if not finite:
        raise _not_finite(name)
    if not fits:
        raise ArithmeticError(f"gguf: {name} has values above {LARGEST_F16:g}, too large for f16: use bf16")
    if not near or not _reader_agrees(wide.astype(np.float32), whole[_places(*shape)], kind, exact):
        if exact:
            raise ValueError(
                f"gguf: numbers of {name} are not on the grid of {kind} to which the model says its weights were "
                'rounded ("qat" in config.json): they were changed since; remove "qat" to have them rounded'
            )
        raise ArithmeticError(f"gguf: {name}: in {kind} its values are further off than that type's rounding explains")
    found = np.ascontiguousarray(whole).reshape(-1).view(np.uint8)
    return found[: found.size * own // (len(coded) * block_size(kind))]


def _unchanged(name: str, array: np.ndarray) -> np.ndarray:
    """The bytes of an array of numpy as float32, uint8[n], for `encode`. Raises ArithmeticError if a number is not
    finite. name: for the message."""
    wide = np.ascontiguousarray(array, np.float32).reshape(-1)
    if not np.isfinite(wide).all():
        raise _not_finite(name)
    return wide.view(np.uint8)


def _not_finite(name: str) -> ArithmeticError:
    """The error of a tensor of this name that has values that are not finite, as other exports say it."""
    return ArithmeticError(
        f"export: {name} has values that are not finite in float32, so the model is broken: take an earlier checkpoint "
        "of its training, or load it anew; save_pretrained writes it as it is"
    )


@functools.partial(jax.jit, static_argnums=1, compiler_options=UNTUNED)
def _encoded(array: jax.Array, kind: str) -> jax.Array:
    """Encodes an array of floats [rows, block], of which each row is one block, in the GGUF type `kind` (gguf's name of
    it), for `encode`. Returns [rows, block] in float32, float16 or bfloat16 for the plain types, and uint8[rows, bytes
    of a block] for quantised ones."""
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
    """Encodes an array of floats [rows, block] that QAT rounded to the GGUF type `kind`: uint8[rows, bytes of a block],
    which decode to the same numbers; that they do is checked by `_checked`, not here. Only Q8_0 and Q4_0 are types to
    which QAT rounds (asserted). grid: the name of the dtype in which QAT made the numbers, such as "bfloat16"."""
    encode = BLOCK_TYPES[kind].exactly
    assert encode is not None, kind
    return encode(array.astype(jnp.float32), grid)


@functools.partial(jax.jit, static_argnums=(2, 3), compiler_options=UNTUNED)
def _checked(array: jax.Array, coded: jax.Array, kind: str, exact: bool) -> jax.Array:
    """Decodes `coded`, the encoded form of `array` in the GGUF type `kind`, and compares the two, on the device.

    Args:
      array: floats [rows, block], each row one block.
      coded: what `_encoded` or `_exactly` made of it.
      kind: gguf's name of the type.
      exact: whether QAT rounded the array to the type, so that no difference is allowed.
    Returns:
      whether all values are finite, all fit into the type, and all decode to within the type's rounding: bool[3] on
        the device, by which `_fetched` decides. The second is about the range of F16, and True for other types.
    """
    wide = array.astype(jnp.float32)
    found = BLOCK_TYPES[kind].decode(coded) if kind in BLOCK_TYPES else coded.astype(jnp.float32)
    fits = (jnp.abs(wide) <= LARGEST_F16).all() if kind == "F16" else jnp.array(True)
    near = (jnp.abs(found - wide) <= _allowed(wide, kind, jnp, exact)).all()
    return jnp.stack([jnp.isfinite(wide).all(), fits, near])


def _reader_agrees(wide: np.ndarray, coded: np.ndarray, kind: str, exact: bool) -> bool:
    """Returns True if the gguf package decodes a sample of encoded blocks to the original values, each within the error
    that rounding to the type explains (`_allowed`). `_fetched` calls it in every export, for up to 2^16 numbers of each
    run of a tensor, as a check of our encoders by other code; False ends the export.

    wide: float32[rows, block], the original values, a block a row. coded: the same rows encoded: uint8[rows, bytes of a
    block], or for F32, F16 and BF16 an array of wide's shape in that type. kind: gguf's name of the type. exact: True:
    QAT rounded the values to the type, so that any difference gives False.
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    as_bytes = kind == "BF16" or kind in BLOCK_TYPES
    # As one row: the package decodes 16 rows at a time, which takes it ten times as long.
    row = (coded.view(np.uint8) if as_bytes else coded).reshape(1, -1)
    found = dequantize(row, GGMLQuantizationType[kind])
    return bool((np.abs(found.reshape(wide.shape) - wide) <= _allowed(wide, kind, np, exact)).all())


def _allowed(wide: Floats, kind: str, numpy: ModuleType, exact: bool) -> Floats:
    """The largest error of values `wide`, float32[rows, block], that rounding to the GGUF type `kind` explains. It is
    [rows, 1] for a quantised type, which has one bound for each block, and [rows, block] for a plain one. numpy: the
    module that computes it, numpy or jax.numpy. exact: whether QAT rounded the values to the type; the bound is then
    zero, [rows, block] for every type."""
    if exact:
        return numpy.zeros_like(wide)
    if kind in BLOCK_TYPES:
        return BLOCK_TYPES[kind].allowed(wide, numpy)
    if kind == "F32":
        return numpy.zeros_like(wide)
    return numpy.abs(wide) * np.float32(2.0**-11 if kind == "F16" else 2.0**-8) + np.float32(2.0**-25)
