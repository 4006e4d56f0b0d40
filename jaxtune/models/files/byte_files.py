"""Writes large files with several threads while the next tensor is computed, and reads them back to verify them. A
Writer writes a file and gives the checksums (Sums) of each part; is_as_written compares the finished file with them,
and all_of makes many such checks in several threads. safetensors files (shards.py) and GGUF files are written so, and
exports verify them."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

CHUNK_BYTES = 16 << 20  # how much one thread writes or reads at a time; each chunk has a checksum
IN_FLIGHT_BYTES = 256 << 20  # host memory of tensors that wait to be written; a single larger tensor is allowed
_THREADS = min(8, os.cpu_count() or 1)


class Sums:
    """The checksums of the bytes of one Writer.append, one for each chunk of CHUNK_BYTES (16 MiB). These bytes are a
    whole tensor of a safetensors file, or a part of one of a GGUF file. Writer.append returns the checksums while the
    bytes are still being written; is_as_written compares the finished file with them, in exports only: saving a model
    does not read it back.

    Args:
      size_bytes: the number of bytes; also an attribute.
      futures: for each chunk in order, the future of its checksum, which is done when the chunk is written.
    """

    def __init__(self, size_bytes: int, futures: list[Future[int]]):
        self.size_bytes = size_bytes
        self._futures = futures

    def values(self) -> list[int]:
        """The checksum (XXH3-64) of each chunk in order; waits until the bytes are written. If the write of one of
        these chunks failed, its OSError is raised; a chunk that was not written after another failure has 0."""
        return [future.result() for future in self._futures]


class Writer:
    """A new file to which threads append data, used as a context manager; safetensors and GGUF files are written by it.
    Leaving the context waits for all writes, closes the file and raises the first error. If the block itself failed,
    chunks that wait are not written, and only its error is raised. `size_bytes` is the number of bytes that were
    appended so far.

    Args:
      file: is created or overwritten.
      advanced: called with the number of bytes that were written, from any thread, for a progress bar.
    """

    def __init__(self, file: Path, advanced: Callable[[int], Any] = lambda _: None):
        self._advanced = advanced
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="jaxtune-write")
        self._waiting: deque[Future[int]] = deque()
        self._sizes: deque[int] = deque()
        self._failed = threading.Event()
        self.size_bytes = 0

    def __enter__(self) -> Writer:
        """Returns this writer."""
        return self

    def __exit__(self, kind, error, trace) -> None:
        """Waits for the writes, ends the threads and closes the file. The first error of a write is raised if the block
        succeeded (`kind` is None); otherwise the block's own error continues, and chunks that wait are not written."""
        if kind is not None:
            self._failed.set()
        try:
            while self._waiting:
                self._collect(raises=kind is None)
        finally:
            self._failed.set()
            self._pool.shutdown()
            os.close(self._descriptor)

    def append(self, data: bytes | np.ndarray) -> Sums:
        """Writes the bytes (uint8[n]) at the end of the file, in the background, and returns their checksums, which are
        complete when the bytes are written. Safetensors files are appended to by whole tensors after the header, and
        GGUF files by parts of tensors.

        The caller must not change `data` afterwards; the reference to it is dropped once it is written. The method
        waits for earlier writes while they and `data` are more than IN_FLIGHT_BYTES (256 MiB); if such a write failed,
        its OSError is raised.
        """
        while self._waiting and sum(self._sizes) + len(data) > IN_FLIGHT_BYTES:
            self._collect()
        view = memoryview(data)
        futures = []
        for start in range(0, len(data), CHUNK_BYTES):
            part = view[start : start + CHUNK_BYTES]
            futures.append(self._pool.submit(self._write, part, self.size_bytes + start))
            self._waiting.append(futures[-1])
            self._sizes.append(len(part))
        self.size_bytes += len(data)
        return Sums(len(data), futures)

    def _collect(self, raises: bool = True) -> None:
        """Waits for the oldest write of a chunk that nobody has waited for yet, before more is appended and when the
        context is left. If that write failed, its error is raised, unless `raises` is False."""
        future = self._waiting.popleft()
        self._sizes.popleft()
        if raises:
            future.result()
        else:
            future.exception()

    def _write(self, part: memoryview, at: int) -> int:
        """Writes one chunk of the data (`part`, at most CHUNK_BYTES) at the byte `at` of the file, in a thread, calls
        `advanced`, and returns the chunk's checksum (XXH3-64). After the write of any chunk, or the context's block,
        has failed, it writes nothing and returns 0, because the file is useless then. Raises OSError if the write
        fails."""
        if self._failed.is_set():
            return 0
        try:
            done = 0
            while done < len(part):
                done += os.pwrite(self._descriptor, part[done:], at + done)
        except OSError:
            self._failed.set()
            raise
        self._advanced(len(part))
        return xxhash.xxh3_64_intdigest(part)


def is_as_written(file: Path, offset: int, sums: Sums, advanced: Callable[[int], Any] = lambda _: None) -> bool:
    """Whether a file has, from the byte `offset` on, the bytes that were written, by their checksums; False if it ends
    early. It reads the file and waits for `sums`, those that Writer.append returned for these bytes; the OSError of a
    failed write is raised. Exports verify by it what they wrote: a tensor of a safetensors file by one call, one of a
    GGUF file by one call for each part that was appended. advanced: called with the number of bytes that were read, for
    a progress bar."""
    size, found = sums.size_bytes, []
    data = np.empty(min(size, CHUNK_BYTES), np.uint8)  # filling it with zeros would take as long as reading
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for start in range(0, size, CHUNK_BYTES):
            view = memoryview(data)[: min(CHUNK_BYTES, size - start)]
            done = 0
            while done < len(view):
                count = os.preadv(descriptor, [view[done:]], offset + start + done)
                if count == 0:
                    return False
                done += count
            found.append(xxhash.xxh3_64_intdigest(view))
            advanced(len(view))
    finally:
        os.close(descriptor)
    return found == sums.values()


def all_of[Item, Result](check: Callable[[Item], Result], items: list[Item]) -> list[Result]:
    """[check(item) for item in items], computed by at most eight threads at a time. If checks fail, the error of the
    first of them in the order of `items` is raised, and checks that have not started by then are left out. With it
    exports read back and verify the tensors that they wrote."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="jaxtune-read") as pool:
        return list(pool.map(check, items))
