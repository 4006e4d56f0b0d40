"""Large files: written by a few threads while what comes next is made, and read back by a few to be compared."""

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

CHUNK_BYTES = 16 << 20  # of a tensor that one thread writes, or reads, and sums up
IN_FLIGHT_BYTES = 256 << 20  # host memory of tensors that wait to be written, unless one alone is larger
_THREADS = min(8, os.cpu_count() or 1)


class Sums:
    """Checksums of bytes that were written, of each CHUNK_BYTES one; they are there when the file is closed."""

    def __init__(self, size_bytes: int, futures: list[Future[int]]):
        self.size_bytes = size_bytes
        self._futures = futures

    def values(self) -> list[int]:
        return [future.result() for future in self._futures]


class Writer:
    """A new file that grows at its end. Leaving the context waits until all is written, and raises what went wrong.

    advanced: told of bytes that are written, by any thread.
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
        return self

    def __exit__(self, kind, error, trace) -> None:
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
        """Writes bytes, uint8[n], after those before. They must stay as they are; they are let go once written."""
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
        future = self._waiting.popleft()
        self._sizes.popleft()
        if raises:
            future.result()
        else:
            future.exception()

    def _write(self, part: memoryview, at: int) -> int:
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
    """Whether a file has the bytes there that were written, by their checksums. advanced: told of bytes read."""
    size, found = sums.size_bytes, []
    data = np.empty(min(size, CHUNK_BYTES), np.uint8)  # not of zeros: to make those takes as long as to read
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
    """check(item) of each item, in a few threads; what they read waits for no other."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="jaxtune-read") as pool:
        return list(pool.map(check, items))
