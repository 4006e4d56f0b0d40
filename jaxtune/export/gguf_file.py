"""A GGUF file: written one tensor at a time, and read back."""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtune.export.gguf_tensors import HEADS, Tensor
from jaxtune.files import writing

# What weights can be kept in -> (gguf's name of it, the number of general.file_type).
OUTTYPES = {"f32": ("F32", 0), "f16": ("F16", 1), "bf16": ("BF16", 32), "q8_0": ("Q8_0", 7), "q4_0": ("Q4_0", 2)}
_BLOCK = 32  # numbers of a row that share a scale in q8_0 and q4_0
_LARGEST_F16 = 65504.0


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor as it was written. crc32: of its bytes."""

    shape: tuple[int, ...]
    kind: str
    crc32: int


def require_gguf() -> None:
    """Raises ValueError, with what to install, where the gguf package is missing."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ValueError("gguf: the gguf package is missing: pip install gguf") from None


def stored_type(tensor: Tensor, outtype: str) -> str:
    """gguf's name of the type that a tensor is kept in.

    Rows that are not whole blocks are kept in f16. Embedding and head are kept in q8_0 where the others are in q4_0:
    they are read once a token, and their errors reach the logits undamped.
    """
    if tensor.plain:
        return "F32"
    if outtype.startswith("q") and tensor.shape[-1] % _BLOCK:
        return "F16"
    return OUTTYPES["q8_0" if outtype == "q4_0" and tensor.name in HEADS else outtype][0]


def size_bytes(tensors: Sequence[Tensor], outtype: str) -> int:
    """Bytes of the tensors' data, with the padding between them."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    total = 0
    for tensor in tensors:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[stored_type(tensor, outtype)]]
        total += int(np.prod(tensor.shape, dtype=np.int64)) // block * size + 32
    return total


def _encode(tensor: Tensor, kind: str) -> np.ndarray:
    """The tensor's bytes, uint8[...], whose values are compared with its own.

    Raises:
      ArithmeticError: values that are not finite, too large for f16, or further off than the type's rounding.
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    wide = np.ascontiguousarray(tensor.fetch(), np.float32)
    if wide.shape != tensor.shape:
        raise ArithmeticError(f"gguf: {tensor.name} is {list(wide.shape)}, and was planned as {list(tensor.shape)}")
    if not np.isfinite(wide).all():
        raise ArithmeticError(f"gguf: {tensor.name} holds values that are not finite")
    if kind == "F16" and np.abs(wide).max(initial=0.0) > _LARGEST_F16:
        raise ArithmeticError(f"gguf: {tensor.name} has values above {_LARGEST_F16:g}, too large for f16: use bf16")
    number = GGMLQuantizationType[kind]
    stored = quantize(wide, number)
    error = np.abs(dequantize(stored, number).reshape(wide.shape) - wide)
    if not (error <= _allowed(wide, kind)).all():
        raise ArithmeticError(f"gguf: {tensor.name}: {kind} is further from the model's values than it rounds")
    return stored


def _allowed(wide: np.ndarray, kind: str) -> np.ndarray:
    """The largest error that a type's rounding explains, for each value."""
    if kind == "F32":
        return np.zeros_like(wide)
    if kind in ("F16", "BF16"):
        return np.abs(wide) * (2.0**-11 if kind == "F16" else 2.0**-8) + 2.0**-25
    # A block's scale is its largest value over 127, or over 8 (whose mirror image is cut off by a whole step), in f16.
    largest = np.abs(wide).reshape(*wide.shape[:-1], -1, _BLOCK).max(-1, keepdims=True)
    steps, worst = (127, 0.5) if kind == "Q8_0" else (8, 1.0)
    bound = largest * (worst * 1.001 / steps + 2.0**-11) + steps * 2.0**-25
    return np.broadcast_to(bound, (*bound.shape[:-1], _BLOCK)).reshape(wide.shape)


def _crc32(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def write(
    file: Path, architecture: str, fields: Mapping[str, Any], tensors: Sequence[Tensor], outtype: str
) -> dict[str, Stored]:
    """Writes a GGUF file; one tensor is in host memory at a time.

    Args:
      fields: metadata; an int is stored as uint32, a float as float32, a list as an array of what it holds.
      outtype: of OUTTYPES.
    Returns:
      what was written, by tensor, for `verify`.
    """
    import gguf

    writer = gguf.GGUFWriter(file, architecture)
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType[kinds[type(value)]])
    types = {tensor.name: stored_type(tensor, outtype) for tensor in tensors}
    for tensor in tensors:
        number = gguf.GGMLQuantizationType[types[tensor.name]]
        block, size = gguf.GGML_QUANT_SIZES[number]
        count = int(np.prod(tensor.shape, dtype=np.int64)) // block * size
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), count, number)
    written = {}
    with writing(file, size_bytes(tensors, outtype)), contextlib.closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            stored = _encode(tensor, types[tensor.name])
            writer.write_tensor_data(stored)
            written[tensor.name] = Stored(
                tensor.shape, types[tensor.name], zlib.crc32(stored.reshape(-1).view(np.uint8))
            )
    return written


def verify(file: Path, architecture: str, fields: Mapping[str, Any], written: Mapping[str, Stored]) -> None:
    """Reads a file with gguf's reader and compares every key, and every byte of every tensor.

    Raises:
      ArithmeticError: something is not as it was written.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        found = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        tensors = {
            tensor.name: Stored(
                tuple(int(size) for size in tensor.shape[::-1]),
                tensor.tensor_type.name,
                _crc32(tensor.data),
            )
            for tensor in reader.tensors
        }
    except Exception as error:  # a damaged file can be anything to the reader
        raise ArithmeticError(f"{file.name}: read back, it is no GGUF file: {type(error).__name__}: {error}") from error
    wanted = {"general.architecture": architecture, **fields}
    wrong = [key for key in sorted(wanted.keys() | found.keys()) if not _same(wanted.get(key), found.get(key))]
    wrong += [name for name in sorted(written.keys() | tensors.keys()) if written.get(name) != tensors.get(name)]
    if wrong:
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ArithmeticError(f"{file.name}: read back, not as it was written: {', '.join(wrong[:8])}{more}")


def _same(meant: Any, found: Any) -> bool:
    if isinstance(meant, list) and isinstance(found, list):
        if meant and isinstance(meant[0], float):
            return np.array_equal(np.asarray(meant, np.float32), np.asarray(found, np.float32))
        return meant == found
    if isinstance(meant, float) and isinstance(found, float):
        return np.float32(meant) == np.float32(found)
    return meant == found
