"""Files that are complete or not there.

A file is written under a temporary name, .NAME.PROCESS-RANDOM.tmp, and renamed at the end. A lock (`hold`) tells what a
living process writes from the leftovers of a killed one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]  # jaxtune's folder

# Linux's system call, which Python has no function for; None on other systems.
_SYNC_FILE_RANGE = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _SYNC_FILE_RANGE is not None:
    _SYNC_FILE_RANGE.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_START_ONLY = 2  # SYNC_FILE_RANGE_WRITE: writes what is not on its way yet, and waits for nothing


def atomic_write(path: str | os.PathLike, data: bytes | str, mode: int = 0o644, durable: bool = True) -> None:
    """Writes a file so that readers, also after a crash or on a full disk, find the whole old or the whole new content.

    Raises OSError; the old content is then untouched, unless only the folder's flush failed. A symbolic link is
    replaced.

      data: a text is written as UTF-8.
      mode: permissions, less the umask.
      durable: wait until data and name are on disk. Without, a power failure may leave an incomplete file: for files
        that are verified when read, or flushed with their folder.
    """
    path = Path(path)
    data = data.encode() if isinstance(data, str) else data
    temporary, descriptor = create_temporary(path, mode)
    try:
        with writing(path, len(data)), open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(descriptor)
            os.replace(
                temporary, path
            )  # while it is locked, so that no process takes it for the leftover of a dead one
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        sync(path.parent)


def temporary_path(path: str | os.PathLike) -> Path:
    """A new hidden path beside `path` for `remove_temporary`, not created. Lock (`hold`) what you create there."""
    path = Path(path)
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def create_temporary(path: str | os.PathLike, mode: int = 0o666) -> tuple[Path, int]:
    """Creates and locks an empty temporary file beside `path`: (its path, read-write descriptor). Write it, rename it
    to `path`, then close the descriptor, which ends the lock. Raises OSError.
    """
    while True:
        temporary = temporary_path(path)
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        if hold(descriptor) and temporary.exists():
            return temporary, descriptor
        os.close(descriptor)  # another process removes it, as a leftover, which it found before it was locked


@contextlib.contextmanager
def writing(path: str | os.PathLike, count_bytes: int) -> Iterator[None]:
    """A context in which an OSError without a file name, as of write, gets this one and the size: the user learns which
    disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        # NumPy's error has no code, only words on how much of an array was written.
        reason = f"{error.strerror or error}, with {count_bytes:,} bytes to write"
        raise OSError(error.errno or errno.EIO, reason, os.fspath(path)) from None


def hold(descriptor: int) -> bool:
    """Locks an open file or folder (flock) until the descriptor closes or the process ends. False if it is locked
    elsewhere; does not wait. True also where there are no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def remove_left(path: Path) -> None:
    """Removes a temporary file or folder unless a living process has locked it (`hold`). Errors are ignored; a symbolic
    link is removed itself.
    """
    with contextlib.suppress(OSError):
        if path.is_symlink():
            path.unlink()
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not hold(descriptor):
                return
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        finally:
            os.close(descriptor)


def read_plain(path: str | os.PathLike) -> bytes:
    """The content of a regular file. Raises OSError for anything else: where others may write, a pipe could block a
    read forever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{os.fspath(path)} is not a regular file")
        return file.read()


_TEMPORARY = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.tmp")


def remove_temporary(folder: str | os.PathLike) -> None:
    """Removes temporary files and folders (`temporary_path`) of killed processes; those of living ones are locked."""
    for leftover in Path(folder).glob(".*.tmp"):
        if _TEMPORARY.fullmatch(leftover.name):
            remove_left(leftover)


def sync(path: str | os.PathLike) -> None:
    """Waits until the disk has the content of a file, or the names in a folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def start_flush(descriptor: int, offset: int, size_bytes: int) -> None:
    """Has the kernel begin to write bytes of a file, so that the final flush, which stays needed and raises errors, is
    short. It may wait while the disk is busy. Linux only.

      offset, size_bytes: of the range in the file; descriptor: of the open file.
    """
    if _SYNC_FILE_RANGE is not None:
        _SYNC_FILE_RANGE(descriptor, offset, size_bytes, _START_ONLY)


def fingerprints(paths: Iterable[Path]) -> dict[Path, dict[str, Any]]:
    """{path: {"bytes": size, "crc32": eight hexadecimal digits}}, in order, read by eight threads. Raises OSError.

    CRC-32 finds accidental changes only, at 4 GB/s a core where SHA-256 runs at 1.7.
    """
    paths = list(paths)
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(paths, pool.map(_fingerprint, paths), strict=True))


def _fingerprint(path: Path) -> dict[str, Any]:
    checksum, count = 0, 0
    buffer = bytearray(2**22)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while n := file.readinto(buffer):
            checksum, count = zlib.crc32(view[:n], checksum), count + n
    return {"bytes": count, "crc32": f"{checksum:08x}"}


def require_makeable(key: str, value: str) -> None:
    """Raises ValueError unless the folder `value` is writable or can be created. key: the setting's name."""
    target = Path(value).absolute()
    nearest = next(folder for folder in (target, *target.parents) if folder.exists())
    if not nearest.is_dir():
        raise ValueError(f"{key} = {value!r}: {nearest} is a file; choose a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"{key} = {value!r}: {nearest} cannot be written to; choose another folder")
