"""Writes large files with several threads while the next tensor is computed, and reads them back to verify them. A
Writer writes a file and gives the checksums (Sums) of each part; is_as_written compares the finished file with them,
and all_of makes many such checks in several threads. safetensors files (shards.py) and GGUF files are written so, and
exports verify them."""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from jaxtune.models.placement.host_pieces import Piece
from jaxtune.system.files import start_flush

CHUNK_BYTES = 16 << 20  # how much one thread writes or reads at a time; each chunk has a checksum
IN_FLIGHT_BYTES = 256 << 20  # host memory of tensors that wait to be written; a single larger tensor is allowed
_THREADS = min(8, os.cpu_count() or 1)


class Sums:
    """The checksums of the bytes of one Writer.append, one for each chunk, of about 16 MiB. These bytes are a whole
    tensor of a safetensors file, or a part of one of a GGUF file. Writer.append returns the checksums while the bytes
    are still being written; is_as_written compares the finished file with them, in exports only: saving a model does
    not read it back.

    Args:
      sizes: the bytes of each chunk, in order; also an attribute. The attribute size_bytes is their sum.
      futures: for each chunk in order, the future of its checksum, which is done when the chunk is written.
    """

    def __init__(self, sizes: list[int], futures: list[Future[int]]):
        self.sizes, self.size_bytes = sizes, sum(sizes)
        self._futures = futures

    def values(self) -> list[int]:
        """The checksum (XXH3-64) of each chunk in order; waits until the bytes are written. If the write of one of
        these chunks failed, its OSError is raised; a chunk that was not written after another failure has 0."""
        return [future.result() for future in self._futures]


class Writer:
    """A new file to which threads append data, used as a context manager; safetensors and GGUF files are written by it.
    Leaving the context waits for all writes, closes the file and raises the first error. If the block itself failed,
    chunks that wait are not written, and only its error is raised. All is then on its way to the disk: callers may read
    it back meanwhile, and flush the file (system.files.sync) before they give it its name. `size_bytes` is the number
    of bytes that were appended so far.

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
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="jaxtune-flush")
        self.size_bytes = 0

    def __enter__(self) -> Writer:
        """Returns this writer."""
        return self

    def __exit__(self, kind, error, trace) -> None:
        """Waits for the writes and ends their threads. The first error of a write is raised if the block succeeded
        (`kind` is None); otherwise the block's own error continues, and chunks that wait are not written. The file is
        closed once all of it is on its way to the disk, which this method does not wait for."""
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
        """Writes the bytes (uint8[n]) at the end of the file, in the background, and returns their checksums, which are
        complete when the bytes are written. GGUF files are appended to by parts of tensors.

        The caller must not change `data` afterwards; the reference to it is dropped once it is written. The method
        waits for earlier writes while they and `data` are more than IN_FLIGHT_BYTES (256 MiB); if such a write failed,
        its OSError is raised.
        """
        whole = np.frombuffer(data, np.uint8)
        self._make_room(len(whole))
        parts = [whole[start : start + CHUNK_BYTES] for start in range(0, len(whole), CHUNK_BYTES)]
        return self._submit([(len(part), functools.partial(_itself, part)) for part in parts], None)

    def append_pieces(self, pieces: Sequence[Piece]) -> Sums:
        """Writes pieces of a tensor (pieces_of), one after another, at the end of the file, and returns the checksums
        of all, each piece being a chunk. Safetensors files are appended to by whole tensors so.

        The threads that write the pieces make them first, so that several copy a tensor from its device at the same
        time. The method returns when all are made: the tensor can then be freed. Errors of earlier writes are raised as
        by `append`; an error of a piece's function is raised like one of its write.
        """
        made = threading.Semaphore(0)
        sums = self._submit(pieces, made)
        for _ in pieces:
            made.acquire()
        return sums

    def _make_room(self, size: int) -> None:
        """Waits for the oldest writes until, with `size` bytes more, at most IN_FLIGHT_BYTES wait to be written."""
        while self._waiting and sum(self._sizes) + size > IN_FLIGHT_BYTES:
            self._collect()

    def _submit(self, pieces: Sequence[Piece], made: threading.Semaphore | None) -> Sums:
        """Lets the threads write the pieces at the end of the file, for `append` and `append_pieces`, and returns their
        checksums. made: is released for each piece that has been made, or that could not be; None: nobody waits."""
        futures = []
        for size, make in pieces:
            if made is not None:
                self._make_room(size)
            futures.append(self._pool.submit(self._write, [make], self.size_bytes, made))
            self._waiting.append(futures[-1])
            self._sizes.append(size)
            self.size_bytes += size
        return Sums([size for size, _ in pieces], futures)

    def _collect(self, raises: bool = True) -> None:
        """Waits for the oldest write of a chunk that nobody has waited for yet, before more is appended and when the
        context is left. If that write failed, its error is raised, unless `raises` is False."""
        future = self._waiting.popleft()
        self._sizes.popleft()
        if raises:
            future.result()
        else:
            future.exception()

    def _write(self, make: list[Callable[[], np.ndarray]], at: int, made: threading.Semaphore | None) -> int:
        """Makes one chunk of the data and writes it at the byte `at` of the file, in a thread, has the kernel begin to
        write it to the disk, calls `advanced`, and returns the chunk's checksum (XXH3-64). After the making or the
        write of any chunk, or the context's block, has failed, it writes nothing and returns 0, because the file is
        useless then.

        make: has the function that makes the chunk, which is taken out, so that it holds no tensor while the chunk is
        written. made: is released once the chunk is made; None: nobody waits. Raises OSError if the write fails, and
        what the function raises.
        """
        try:
            if self._failed.is_set():
                return 0
            part = memoryview(make.pop()())
        except BaseException:
            self._failed.set()
            raise
        finally:
            if made is not None:
                made.release()
        try:
            done = 0
            while done < len(part):
                done += os.pwrite(self._descriptor, part[done:], at + done)
        except OSError:
            self._failed.set()
            raise
        self._flusher.submit(start_flush, self._descriptor, at, len(part))  # it waits while the disk has much to do
        self._advanced(len(part))
        return xxhash.xxh3_64_intdigest(part)


def _itself(part: np.ndarray) -> np.ndarray:
    """A chunk that need not be made."""
    return part


def is_as_written(file: Path, offset: int, sums: Sums, advanced: Callable[[int], Any] = lambda _: None) -> bool:
    """Whether a file has, from the byte `offset` on, the bytes that were written, by their checksums; False if it ends
    early. It reads the file and waits for `sums`, those that Writer.append returned for these bytes; the OSError of a
    failed write is raised. Exports verify by it what they wrote: a tensor of a safetensors file by one call, one of a
    GGUF file by one call for each part that was appended. advanced: called with the number of bytes that were read, for
    a progress bar."""
    at, found = offset, []
    data = _buffer(max(sums.sizes, default=0))
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for size in sums.sizes:
            view = memoryview(data)[:size]
            done = 0
            while done < size:
                count = os.preadv(descriptor, [view[done:]], at + done)
                if count == 0:
                    return False
                done += count
            at += size
            found.append(xxhash.xxh3_64_intdigest(view))
            advanced(len(view))
    finally:
        os.close(descriptor)
    return found == sums.values()


_own = threading.local()


def _buffer(size_bytes: int) -> np.ndarray:
    """Memory of at least this many bytes, into which this thread reads; it gets the same each time, as long as that is
    large enough, because touching new memory takes as long as reading."""
    if len(found := getattr(_own, "buffer", np.empty(0, np.uint8))) < size_bytes:
        found = _own.buffer = np.empty(size_bytes, np.uint8)
    return found


def all_of[Item, Result](check: Callable[[Item], Result], items: list[Item]) -> list[Result]:
    """[check(item) for item in items], computed by at most eight threads at a time. If checks fail, the error of the
    first of them in the order of `items` is raised, and checks that have not started by then are left out. With it
    exports read back and verify the tensors that they wrote."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="jaxtune-read") as pool:
        return list(pool.map(check, items))
