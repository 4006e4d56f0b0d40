"""Reads and writes the tensors of safetensors files, one at a time: `read_tensor`, `read_bytes` and `over_devices` read
one, and `entry_digest` computes the digest of a divided one, a part of a base model's identity. `plan_shards` divides
tensors among files, `write_file` writes a file and returns a Written for each tensor, by which `is_as_written` verifies
what was written. headers.py reads the headers.

Models are loaded, saved and exported by these functions, and adapters' files are read and written. Files are read by
positioned reads and not mapped, so that memory can be freed and threads can share the work.
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
    """The bytes of a tensor from `start` to before `stop` (None: to its end), counted from the tensor's first byte:
    uint8[n], whatever its dtype. The loader reads by it, also parts of tensors that are divided over devices, and
    read_tensor does. entry: where the tensor is.

    Raises:
      ValueError: the file ends early.
      OSError: the file cannot be read.
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
    """Reads the whole tensor of an entry from its file: a numpy array in its stored dtype and shape, with memory of its
    own. The caller has checked dtype and size (check_entry or check_size). Tensors of quantised weights, of adapters'
    files and passthrough tensors are read by it. Raises ValueError if the file ends early."""
    return read_bytes(entry).view(STORED[entry.dtype]).reshape(entry.shape)


def entry_digest(
    name: str, entry: TensorEntry, read: Callable[[int, int], np.ndarray], known: bytes | None = None
) -> Digest:
    """The digest of a tensor in files that `entry` describes; the digests of all tensors, joined, identify a base model
    with its config. The loader calls it for tensors that are divided over devices, which it never has in memory in one
    piece; it digests others in memory (Digest.of).

    name: the name that the digest covers, the model's name of the tensor, which the file's may differ from. read:
    (start, stop) -> the tensor's bytes from start to before stop, uint8; its errors are raised. known: `Digest.whole`
    of the tensor if it is cached (DigestCache, whose entries are valid while the files are unchanged), which is taken
    over unchecked; then only the bytes for `Digest.sampled` are read, to compute that. None: every byte is read.
    """
    return Digest.read(name, STORED[entry.dtype], entry.shape, entry.size_bytes, read, known)


def over_devices(
    entry: TensorEntry, sharding: jax.sharding.Sharding, read: Callable[[int, int], np.ndarray]
) -> jax.Array:
    """The tensor of an entry in its stored dtype, divided over devices as `sharding` says: along its first axis, and
    possibly others.

    Each part along the first axis is read separately, and only once, even if several devices of this process have it.
    Other processes' parts are not read, so that no process needs memory for the whole tensor. Where other axes are
    divided too, whole rows are read and cut.

    The loader calls it for tensors that are divided. read: (start, stop) -> the tensor's bytes from start to before
    stop, uint8; its errors are raised, such as ValueError for a file that ends early."""
    parts: dict[tuple[int, int], np.ndarray] = {}
    row = entry.size_bytes // entry.shape[0]

    def part(index):
        """The part of the tensor that a device gets; index: a slice for each of its axes."""
        first, last, _ = index[0].indices(entry.shape[0])
        if (first, last) not in parts:
            bytes_ = read(first * row, last * row)
            parts[first, last] = bytes_.view(STORED[entry.dtype]).reshape(last - first, *entry.shape[1:])
        return parts[first, last][(slice(None), *index[1:])]

    return jax.make_array_from_callback(entry.shape, sharding, part)


def plan_shards(sizes_bytes: Iterable[tuple[str, int]], max_shard_bytes: int) -> list[list[str]]:
    """Divides tensors, in order, into shards (lists of names) of at most max_shard_bytes; a larger tensor gets its own
    shard. A shard is one of the files into which the weights of a checkpoint are divided.

    sizes_bytes: (name, bytes) of each tensor. What write_checkpoint must keep in one file, such as the codes and scales
    of a weight, it gives as one.
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
    """Writes one safetensors file while the tensors are computed, and returns {tensor's name: what was written}.
    Checkpoints and adapters are written by it.

    `fetch(name)` is called once for each tensor, in file order, and threads write it while the next one is computed.
    With several processes all must call it: the first one writes, and the others take part in computing the tensors.
    The same tensors and metadata in the same order give the same bytes, which the safetensors library does not
    guarantee for metadata. After an error an incomplete file is left.

    Args:
      file: is created or overwritten, in a folder that exists.
      tensors: (name, shape, dtype), in file order.
      fetch: name -> np.ndarray or jax.Array of that shape and dtype, which may be divided over processes.
      metadata: strings for the header, in addition to its "format": "pt".
      advanced: called, from any thread, with the number of bytes that were written.
    Raises:
      ValueError: a tensor that does not have the planned shape or dtype.
      OSError: a write failed, such as on a full disk.
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt", **metadata}}  # transformers requires the format
    at = 0
    for name, shape, dtype in tensors:
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype.name], "shape": list(shape), "data_offsets": [at, at + size]}
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
    """A tensor that was written to a file, with what is needed to verify the file (is_as_written), as only exports do;
    write_file returns one for each tensor."""

    shape: tuple[int, ...]  # its dimensions
    dtype: np.dtype  # its dtype
    sums: byte_files.Sums  # checksums of its bytes


def is_as_written(entry: TensorEntry, written: Written, advanced: Callable[[int], Any] = lambda _: None) -> bool:
    """Whether a file contains the tensor that was written: its shape, dtype and, by their checksums, all bytes; False
    also if the file ends early. An export verifies by it the folder that it has just written (export/folders.py).

    entry: the tensor as the file's header has it. written: what write_file returned for it. advanced: called with the
    number of bytes that were read.
    """
    if entry.shape != written.shape or STORED.get(entry.dtype) != written.dtype:
        return False
    return byte_files.is_as_written(entry.file, entry.offset, written.sums, advanced)
