"""Headers of safetensors files: 8 bytes of little-endian length, JSON {name: {dtype, shape, data_offsets}}, then the
tensors' bytes. JAX is not imported, so that looking at a model's folder is quick.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxtune.system.files import require_plain

DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}
# The dtypes of all tensors that can be read, those of quantised weights included.
STORED = DTYPES | {
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "BOOL": np.dtype(np.bool_),
    **{f"I{8 * size}": np.dtype(f"int{8 * size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"uint{8 * size}") for size in (1, 2, 4, 8)},
}
DTYPE_NAMES = {dtype.name: name for name, dtype in STORED.items()}
_REMEDY = "fetch the file again"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """A tensor in a safetensors file, by the header. Subclasses stand for several tensors of files that are one of the
    model.
    """

    name: str  # of the tensor in the file
    dtype: str  # safetensors' name of its dtype, such as "BF16"
    shape: tuple[int, ...]  # its dimensions
    file: Path  # the file that contains it
    offset: int  # its first byte in the file
    size_bytes: int  # the number of its bytes


def read_header(file: Path) -> dict[str, TensorEntry]:
    """{name: entry}, without the file's metadata. Dtypes that cannot be used are left to check_entry and check_size.

    Raises ValueError for a file that is truncated, too long or not safetensors, or no file.
    """
    try:
        require_plain(file)
    except OSError as error:
        raise ValueError(f"{error}; {_REMEDY}") from None
    actual = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if actual < 8 or length > min(_MAX_HEADER_BYTES, actual - 8):
            sizes = f"header of {length} bytes, file of {actual} bytes"
            raise ValueError(f"{file}: not a whole safetensors file: {sizes}; {_REMEDY}")
        raw = stream.read(length)
    start = 8 + length
    try:
        header = json.loads(raw)
        entries = {name: _entry(name, item, file, start) for name, item in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{file}: its safetensors header is corrupt ({type(error).__name__}: {error}); {_REMEDY}"
        ) from None
    expected = max((entry.offset + entry.size_bytes for entry in entries.values()), default=start)
    if expected != actual:
        kind = "truncated" if actual < expected else "too long"
        raise ValueError(f"{file}: {kind}: expected {expected} bytes, found {actual}; {_REMEDY}")
    try:
        with safe_open(file, framework="numpy"):  # maps the file and reads only the header
            pass
    except SafetensorError as error:
        for entry in entries.values():
            if entry.dtype in STORED:
                check_size(entry)
        raise ValueError(f"{file}: its safetensors header is corrupt ({error}); {_REMEDY}") from None
    return entries


def _entry(name: str, item: Mapping[str, Any], file: Path, start: int) -> TensorEntry:
    """KeyError, TypeError or ValueError for an item against the format."""
    dtype, shape, (first, last) = item["dtype"], item["shape"], item["data_offsets"]
    if not isinstance(dtype, str):
        raise TypeError(f"dtype {dtype!r} of {name}")
    for number in (*shape, first, last):
        if type(number) is not int or number < 0:
            raise TypeError(f"shape {shape!r} and data_offsets {item['data_offsets']!r} of {name}")
    return TensorEntry(name, dtype, tuple(shape), file, start + first, last - first)


def check_entry(entry: TensorEntry) -> None:
    """Raises ValueError unless the tensor is an unquantised weight (16- or 32-bit floats) of its shape's size."""
    if entry.dtype not in DTYPES:
        raise ValueError(
            f"{entry.file}: {entry.name} is stored as {entry.dtype}; supported: {', '.join(DTYPES)} "
            "(and, of quantised checkpoints, the formats that model.load_in names)"
        )
    check_size(entry)


def check_size(entry: TensorEntry) -> None:
    """Raises ValueError if the size does not fit the shape, or the dtype cannot be read."""
    if entry.dtype not in STORED:
        raise ValueError(f"{entry.file}: {entry.name} is stored as {entry.dtype}, which is not supported")
    want = math.prod(entry.shape) * STORED[entry.dtype].itemsize
    if want != entry.size_bytes:
        raise ValueError(
            f"{entry.file}: {entry.name} {entry.shape} needs {want} bytes, its header gives {entry.size_bytes}"
        )
