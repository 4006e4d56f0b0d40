"""Reads and writes safetensors files one tensor at a time: `read_header` lists the tensors of a file, `read_tensor`,
`read_bytes` and `over_devices` read one, `write_file` writes a file, and `is_as_written` verifies what was written.

The format is 8 bytes of little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, and the bytes
of the tensors. Files are read by positioned reads and not mapped, so that memory can be freed and threads can share the
work.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxtune.models.files import byte_files
from jaxtune.models.files.digests import Digest
from jaxtune.models.placement import partition
from jaxtune.system import processes
from jaxtune.system.files import writing

DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}
# The dtypes of all tensors that can be read, those of quantised weights included.
_STORED = DTYPES | {
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "BOOL": np.dtype(np.bool_),
    **{f"I{8 * size}": np.dtype(f"int{8 * size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"uint{8 * size}") for size in (1, 2, 4, 8)},
}
_DTYPE_NAMES = {dtype.name: name for name, dtype in _STORED.items()}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_READ_BYTES = 1 << 30  # Linux reads at most 2 GiB in one call


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """A tensor in a safetensors file, as the file's header describes it; its bytes have not been read."""

    name: str  # of the tensor in the file
    dtype: str  # safetensors' name of its dtype, such as "BF16"
    shape: tuple[int, ...]  # its dimensions
    file: Path  # the file that contains it
    offset: int  # its first byte in the file
    size_bytes: int  # the number of its bytes


def read_header(file: Path) -> dict[str, TensorEntry]:
    """{name: entry} of the tensors of a safetensors file, from its header alone. The safetensors library decides
    whether the header is valid. Whether the tensors have dtypes that can be used is left to check_entry.

    Raises:
      ValueError: a file that is truncated, too long or not safetensors, with its expected and actual size.
      OSError: the file cannot be read.
    """
    actual = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if actual < 8 or length > min(_MAX_HEADER_BYTES, actual - 8):
            raise ValueError(f"{file}: not a whole safetensors file: header of {length} bytes, file of {actual} bytes")
        raw = stream.read(length)
    start = 8 + length
    try:
        header = json.loads(raw)
        entries = {name: _entry(name, item, file, start) for name, item in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file}: its safetensors header is corrupt ({type(error).__name__}: {error})") from None
    expected = max((entry.offset + entry.size_bytes for entry in entries.values()), default=start)
    if expected != actual:
        kind = "truncated" if actual < expected else "too long"
        raise ValueError(f"{file}: {kind}: expected {expected} bytes, found {actual}; fetch the file again")
    try:
        with safe_open(file, framework="numpy"):  # maps the file and reads only the header
            pass
    except SafetensorError as error:
        for entry in entries.values():
            if entry.dtype in _STORED:
                check_size(entry)
        raise ValueError(f"{file}: its safetensors header is corrupt ({error}); fetch the file again") from None
    return entries


def _entry(name: str, item: Mapping[str, Any], file: Path, start: int) -> TensorEntry:
    """Makes the TensorEntry of one tensor from its item in the header of a safetensors file.

    Args:
      name: the tensor's name, the item's key in the header.
      item: its value there, {"dtype", "shape", "data_offsets"}.
      file: the file.
      start: the byte of the file at which the data of its tensors begin, from which data_offsets count.
    Raises:
      KeyError, TypeError, ValueError: an item that is not as the format says.
    """
    dtype, shape, (first, last) = item["dtype"], item["shape"], item["data_offsets"]
    if not isinstance(dtype, str):
        raise TypeError(f"dtype {dtype!r} of {name}")
    for number in (*shape, first, last):
        if type(number) is not int or number < 0:
            raise TypeError(f"shape {shape!r} and data_offsets {item['data_offsets']!r} of {name}")
    return TensorEntry(name, dtype, tuple(shape), file, start + first, last - first)


def check_entry(entry: TensorEntry) -> None:
    """Raises ValueError unless a tensor's entry can be read as an unquantised weight: its dtype is one of DTYPES (16-
    or 32-bit floats), and its size fits its shape."""
    if entry.dtype not in DTYPES:
        raise ValueError(
            f"{entry.file}: {entry.name} is stored as {entry.dtype}; supported: {', '.join(DTYPES)} "
            "(and, of quantised checkpoints, the formats that model.load_in names)"
        )
    check_size(entry)


def check_size(entry: TensorEntry) -> None:
    """Raises ValueError for a tensor's entry, of any kind, whose size in bytes does not fit its shape, or whose dtype
    cannot be read."""
    if entry.dtype not in _STORED:
        raise ValueError(f"{entry.file}: {entry.name} is stored as {entry.dtype}, which is not supported")
    want = math.prod(entry.shape) * _STORED[entry.dtype].itemsize
    if want != entry.size_bytes:
        raise ValueError(
            f"{entry.file}: {entry.name} {entry.shape} needs {want} bytes, its header gives {entry.size_bytes}"
        )


def read_bytes(entry: TensorEntry, start: int = 0, stop: int | None = None) -> np.ndarray:
    """The bytes of a tensor from `start` to before `stop` (None: to its end), uint8[n], whatever its dtype. entry:
    where the tensor is.

    Raises:
      ValueError: the file ends early.
    """
    size = (entry.size_bytes if stop is None else stop) - start
    data = np.empty(size, np.uint8)
    view, done = memoryview(data), 0
    descriptor = os.open(entry.file, os.O_RDONLY)
    try:
        while done < size:
            count = os.preadv(descriptor, [view[done : done + _READ_BYTES]], entry.offset + start + done)
            if count == 0:
                raise ValueError(f"{entry.file}: ended {size - done} bytes early while reading {entry.name}")
            done += count
    finally:
        os.close(descriptor)
    return data


def read_tensor(entry: TensorEntry) -> np.ndarray:
    """Reads the tensor of an entry from its file: a numpy array in its stored dtype, with memory of its own. The caller
    has checked dtype and size (check_entry or check_size). Raises ValueError if the file ends early."""
    return read_bytes(entry).view(_STORED[entry.dtype]).reshape(entry.shape)


def entry_digest(
    name: str, entry: TensorEntry, read: Callable[[int, int], np.ndarray], known: bytes | None = None
) -> Digest:
    """The digest of the tensor of a file that `entry` describes, by which a base model is identified.

    name: the name that the digest covers, the model's name of the tensor, which the file's may differ from. read:
    (start, stop) -> the tensor's bytes from start to before stop, uint8. known: `Digest.whole` of the tensor if it is
    cached, so that only samples are read; None: every byte is read.
    """
    return Digest.read(name, _STORED[entry.dtype], entry.shape, entry.size_bytes, read, known)


def over_devices(
    entry: TensorEntry, sharding: jax.sharding.Sharding, read: Callable[[int, int], np.ndarray]
) -> jax.Array:
    """The tensor of an entry in its stored dtype, divided over devices as `sharding` says: along its first axis, and
    possibly others.

    Each part along the first axis is read separately, and only once, even if several devices of this process have it.
    Other processes' parts are not read, so that no process needs memory for the whole tensor. Where other axes are
    divided too, whole rows are read and cut.

    read: (start, stop) -> the tensor's bytes from start to before stop, uint8.
    """
    parts: dict[tuple[int, int], np.ndarray] = {}
    row = entry.size_bytes // entry.shape[0]

    def part(index):
        first, last, _ = index[0].indices(entry.shape[0])
        if (first, last) not in parts:
            bytes_ = read(first * row, last * row)
            parts[first, last] = bytes_.view(_STORED[entry.dtype]).reshape(last - first, *entry.shape[1:])
        return parts[first, last][(slice(None), *index[1:])]

    return jax.make_array_from_callback(entry.shape, sharding, part)


def plan_shards(sizes_bytes: Iterable[tuple[str, int]], max_shard_bytes: int) -> list[list[str]]:
    """Divides tensors, in order, into shards (lists of names) of at most max_shard_bytes; a larger one gets its own.

    sizes_bytes: (name, bytes) of each tensor.
    """
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes_bytes:
        if not shards or size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def write_file(
    file: Path,
    tensors: list[tuple[str, tuple[int, ...], np.dtype]],
    fetch: Callable[[str], Any],
    metadata: Mapping[str, str] = types.MappingProxyType({}),
    advanced: Callable[[int], Any] = lambda _: None,
) -> dict[str, Written]:
    """Writes one safetensors file while the tensors are computed, and returns what was written by tensor name.

    `fetch(name)` computes each tensor in turn, and threads write it while the next one is computed. With several
    processes all must call it: the first one writes, and the others take part in computing the tensors. The same
    content gives the same bytes, which the safetensors library does not guarantee for metadata.

    Args:
      file: is created or overwritten, in a folder that exists.
      tensors: (name, shape, dtype), in file order.
      fetch: name -> np.ndarray or jax.Array of that shape and dtype, which may be divided over processes.
      metadata: strings for the header, in addition to the format.
      advanced: called, from any thread, with the number of bytes that were written.
    Raises:
      ValueError: a tensor that does not have the planned shape or dtype.
      OSError: a write failed, such as on a full disk.
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt", **metadata}}  # transformers requires the format
    at = 0
    for name, shape, dtype in tensors:
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype.name], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    written, whole = {}, 8 + len(raw) + at
    with (
        writing(file, whole),
        byte_files.Writer(file if processes.first() else Path(os.devnull), advanced) as out,
    ):
        out.append(len(raw).to_bytes(8, "little") + raw)
        for name, shape, dtype in tensors:
            array = np.asarray(partition.on_host(fetch(name)), order="C")
            if array.shape != tuple(shape) or array.dtype != dtype:
                raise ValueError(f"{name}: planned as {dtype.name}{shape}, found {array.dtype.name}{array.shape}")
            written[name] = Written(tuple(shape), dtype, out.append(array.reshape(-1).view(np.uint8)))
            del array
    return written


@dataclasses.dataclass(frozen=True)
class Written:
    """A tensor that was written to a file, with what is needed to verify the file (is_as_written)."""

    shape: tuple[int, ...]  # its dimensions
    dtype: np.dtype  # its dtype
    sums: byte_files.Sums  # checksums of its bytes


def is_as_written(entry: TensorEntry, written: Written, advanced: Callable[[int], Any] = lambda _: None) -> bool:
    """Whether a file contains the tensor that was written: its shape, dtype and, by their checksums, all bytes.

    entry: the tensor as the file's header has it. written: what write_file returned for it. advanced: called with the
    number of bytes that were read.
    """
    if entry.shape != written.shape or _STORED.get(entry.dtype) != written.dtype:
        return False
    return byte_files.is_as_written(entry.file, entry.offset, written.sums, advanced)
