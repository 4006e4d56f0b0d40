"""Reads and writes the tensors of safetensors files one at a time, by positioned reads, so that memory can be freed and
threads share the work.
"""

from __future__ import annotations

import dataclasses
import json
import os
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtune.models.files import byte_files
from jaxtune.models.files.digests import Digest
from jaxtune.models.files.headers import DTYPE_NAMES, STORED, TensorEntry
from jaxtune.models.placement.host_pieces import pieces_of
from jaxtune.system import processes
from jaxtune.system.files import writing

_READ_BYTES = 1 << 30  # Linux reads at most 2 GiB in one call


def read_bytes(entry: TensorEntry, start: int = 0, stop: int | None = None) -> np.ndarray:
    """A tensor's bytes from `start` to before `stop`, uint8[n]. Raises ValueError if the file ends early.

    entry: where a file has the tensor.
    start, stop: bytes from its first number; None: to the end.
    """
    size = (entry.size_bytes if stop is None else stop) - start
    data = np.empty(size, np.uint8)
    view, bytes_read = memoryview(data), 0
    descriptor = os.open(entry.file, os.O_RDONLY)
    try:
        while bytes_read < size:
            count = os.preadv(
                descriptor, [view[bytes_read : bytes_read + _READ_BYTES]], entry.offset + start + bytes_read
            )
            if count == 0:
                raise ValueError(f"{entry.file}: ended {size - bytes_read} bytes early while reading {entry.name}")
            bytes_read += count
    finally:
        os.close(descriptor)
    return data


def read_tensor(entry: TensorEntry) -> np.ndarray:
    """The tensor in its stored dtype and shape, in memory of its own. Dtype and size must be checked (check_size).
    Raises ValueError if the file ends early.
    """
    return read_bytes(entry).view(STORED[entry.dtype]).reshape(entry.shape)


def entry_digest(
    name: str, entry: TensorEntry, read: Callable[[int, int], np.ndarray], cached: bytes | None = None
) -> Digest:
    """The digest of a tensor in files.

    name: the model's.
    entry: its dtype, shape and size.
    read: (start, stop) -> these of the tensor's bytes, uint8.
    cached: its cached `Digest.whole`, trusted; None: every byte is read.
    """
    return Digest.read(name, STORED[entry.dtype], entry.shape, entry.size_bytes, read, cached)


def over_devices(
    entry: TensorEntry, sharding: jax.sharding.Sharding, read: Callable[[int, int], np.ndarray]
) -> jax.Array:
    """The tensor in its stored dtype, divided over devices. This process reads only its own parts along the first axis,
    each once, and cuts rows along other axes.

      entry: the tensor's dtype and shape.
      sharding: of the array.
      read: (start, stop) -> these of the tensor's bytes, uint8.
    """
    sections: dict[tuple[int, int], np.ndarray] = {}
    row = entry.size_bytes // entry.shape[0]

    def section(index):
        """index: a slice for each axis."""
        first, last, _ = index[0].indices(entry.shape[0])
        if (first, last) not in sections:
            bytes_ = read(first * row, last * row)
            sections[first, last] = bytes_.view(STORED[entry.dtype]).reshape(last - first, *entry.shape[1:])
        return sections[first, last][(slice(None), *index[1:])]

    return jax.make_array_from_callback(entry.shape, sharding, section)


def plan_shards(sizes_bytes: Iterable[tuple[str, int]], max_shard_bytes: int) -> list[list[str]]:
    """Divides (name, bytes) in order into shards of at most max_shard_bytes; a larger tensor gets its own."""
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
    """Writes a safetensors file while its tensors are computed: {name: what was written}. All processes must call it;
    the first one writes. Equal tensors and metadata give equal bytes. After an error an incomplete file is left.

      tensors: (name, shape, dtype), in file order.
      fetch: name -> that array, possibly divided over processes; called once each, in order.
      metadata: texts by name, in the file's header.
      advanced: called with numbers of written bytes, from any thread.

    Raises ValueError for another shape or dtype than planned, OSError for a failed write.
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt", **metadata}}  # transformers requires the format
    offset = 0
    for name, shape, dtype in tensors:
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype.name], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    written, total_bytes = {}, 8 + len(raw) + offset
    with (
        writing(file, total_bytes),
        byte_files.Writer(file if processes.first() else Path(os.devnull), advanced) as out,
    ):
        out.append(len(raw).to_bytes(8, "little") + raw)
        for name, shape, dtype in tensors:
            array = fetch(name)
            if array.shape != tuple(shape) or array.dtype != dtype:
                raise ValueError(f"{name}: planned as {dtype.name}{shape}, found {array.dtype.name}{array.shape}")
            pieces = pieces_of(array, byte_files.CHUNK_BYTES)
            del array
            written[name] = Written(tuple(shape), dtype, out.append_pieces(pieces))
            del pieces
    return written


@dataclasses.dataclass(frozen=True)
class Written:
    """A tensor that was written, with what verifies it."""

    shape: tuple[int, ...]  # its dimensions
    dtype: np.dtype  # its dtype
    sums: byte_files.Sums  # checksums of its bytes


def is_as_written(entry: TensorEntry, written: Written, advanced: Callable[[int], Any] = lambda _: None) -> bool:
    """Whether a file contains the written tensor: shape, dtype and all bytes by checksums.

    entry: where the file has it.
    written: what write_file returned for it.
    advanced: called with numbers of read bytes.
    """
    if entry.shape != written.shape or STORED.get(entry.dtype) != written.dtype:
        return False
    return byte_files.is_as_written(entry.file, entry.offset, written.sums, advanced)
