"""Writes large files with several threads while the next tensor is computed, and reads them back to verify them."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxtune.models.placement.host_pieces import Piece
from jaxtune.system.sealed import checksum

CHUNK_BYTES = 16 << 20  # how much one thread writes or reads at a time; each chunk has a checksum
IN_FLIGHT_BYTES = 256 << 20  # host memory of tensors that wait to be written; a single larger tensor is allowed
_THREADS = min(8, os.cpu_count() or 1)

# Linux's system call, which Python has no function for; None on other systems.
_SYNC_FILE_RANGE = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _SYNC_FILE_RANGE is not None:
    _SYNC_FILE_RANGE.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_START_ONLY = 2  # SYNC_FILE_RANGE_WRITE: writes what is not on its way yet, and waits for nothing


class Sums:
    """Checksums of the bytes of one Writer.append, one for each chunk of about 16 MiB.

    sizes: bytes of each chunk; also an attribute, and size_bytes their sum.
    """

    def __init__(self, sizes: list[int], futures: list[Future[bytes]]):
        self.sizes, self.size_bytes = sizes, sum(sizes)
        self._futures = futures

    def values(self) -> list[bytes]:
        """The checksum of each chunk; waits for the writes and raises their OSError. A chunk that was left out after
        another failure has b"".
        """
        return [future.result() for future in self._futures]


class Writer:
    """A new file to which threads append data. Leaving its context waits for all writes, closes it and raises the first
    error; if the block failed, waiting chunks are dropped. Flush the file (system.files.sync) before giving it its
    name.

      advanced: called with numbers of written bytes, from any thread.
    """

    def __init__(self, file: Path, advanced: Callable[[int], Any] = lambda _: None):
        self._advanced = advanced
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="jaxtune-write")
        self._waiting: deque[Future[bytes]] = deque()
        self._sizes: deque[int] = deque()
        self._failed = threading.Event()
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="jaxtune-flush")
        self.size_bytes = 0

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind, error, trace) -> None:
        """Waits for all writes and raises their first error, unless the block raised one."""
        if kind is not None:
            self._failed.set()
        try:
            while self._waiting:
                self._collect(raises=kind is None)
        finally:
            self._failed.set()
            self._pool.shutdown()
            self._flusher.submit(os.close, self._descriptor)
            self._flusher.shutdown(wait=False)

    def append(self, data: bytes | np.ndarray) -> Sums:
        """Writes uint8[n] at the end of the file in the background, and returns its checksums. `data` must not change.
        Waits while more than 256 MiB are in flight; raises the OSError of an earlier write.
        """
        array = np.frombuffer(data, np.uint8)
        self._make_room(len(array))
        chunks = [array[start : start + CHUNK_BYTES] for start in range(0, len(array), CHUNK_BYTES)]
        return self._submit([(len(chunk), functools.partial(_itself, chunk)) for chunk in chunks], None)

    def append_pieces(self, pieces: Sequence[Piece]) -> Sums:
        """Writes pieces of a tensor, each a chunk, at the end of the file. Threads make them, so that several copy from
        the device at a time; returns when all are made, and the tensor can be freed. Raises as `append` does.
        """
        ready = threading.Semaphore(0)
        sums = self._submit(pieces, ready)
        for _ in pieces:
            ready.acquire()
        return sums

    def _make_room(self, size: int) -> None:
        while self._waiting and sum(self._sizes) + size > IN_FLIGHT_BYTES:
            self._collect()

    def _submit(self, pieces: Sequence[Piece], ready: threading.Semaphore | None) -> Sums:
        """ready: released for each piece that is made or could not be; None: nobody waits."""
        futures = []
        for size, make in pieces:
            if ready is not None:
                self._make_room(size)
            futures.append(self._pool.submit(self._write, [make], self.size_bytes, ready))
            self._waiting.append(futures[-1])
            self._sizes.append(size)
            self.size_bytes += size
        return Sums([size for size, _ in pieces], futures)

    def _collect(self, raises: bool = True) -> None:
        """Waits for the oldest write."""
        future = self._waiting.popleft()
        self._sizes.popleft()
        if raises:
            future.result()
        else:
            future.exception()

    def _write(self, make: list[Callable[[], np.ndarray]], offset: int, ready: threading.Semaphore | None) -> bytes:
        """Makes a chunk, writes it at the byte `offset`, and returns its checksum; b"" after any failure."""
        try:
            if self._failed.is_set():
                return b""
            chunk = memoryview(make.pop()())
        except BaseException:
            self._failed.set()
            raise
        finally:
            if ready is not None:
                ready.release()
        try:
            written = 0
            while written < len(chunk):
                written += os.pwrite(self._descriptor, chunk[written:], offset + written)
        except OSError:
            self._failed.set()
            raise
        self._flusher.submit(
            start_flush, self._descriptor, offset, len(chunk)
        )  # it waits while the disk has much to do
        self._advanced(len(chunk))
        return checksum([chunk])


def start_flush(descriptor: int, offset: int, size_bytes: int) -> None:
    """Has the kernel begin to write bytes of a file, so that the final flush, which stays needed and raises errors, is
    short. It may wait while the disk is busy. Linux only.

      offset, size_bytes: of the range in the file; descriptor: of the open file.
    """
    if _SYNC_FILE_RANGE is not None:
        _SYNC_FILE_RANGE(descriptor, offset, size_bytes, _START_ONLY)


def _itself(chunk: np.ndarray) -> np.ndarray:
    return chunk


def is_as_written(file: Path, offset: int, sums: Sums, advanced: Callable[[int], Any] = lambda _: None) -> bool:
    """Whether the file has the written bytes; False if it ends early. Waits for `sums` and raises their OSError.

    offset: bytes of the file before them.
    sums: sizes and checksums of the written pieces, in order.
    advanced: called with numbers of read bytes.
    """
    position, digests = offset, []
    data = _buffer(max(sums.sizes, default=0))
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for size in sums.sizes:
            view = memoryview(data)[:size]
            bytes_read = 0
            while bytes_read < size:
                count = os.preadv(descriptor, [view[bytes_read:]], position + bytes_read)
                if count == 0:
                    return False
                bytes_read += count
            position += size
            digests.append(checksum([view]))
            advanced(len(view))
    finally:
        os.close(descriptor)
    return digests == sums.values()


_thread_local = threading.local()


def _buffer(size_bytes: int) -> np.ndarray:
    """This thread's memory of at least `size_bytes`, reused because touching new memory takes as long as reading."""
    if len(buffer := getattr(_thread_local, "buffer", np.empty(0, np.uint8))) < size_bytes:
        buffer = _thread_local.buffer = np.empty(size_bytes, np.uint8)
    return buffer


def all_of[Item, Result](check: Callable[[Item], Result], items: list[Item]) -> list[Result]:
    """[check(item) for item in items] in at most eight threads; raises the first error in the order of `items`, and
    checks that have not started are dropped.
    """
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="jaxtune-read") as pool:
        return list(pool.map(check, items))
