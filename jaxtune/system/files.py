"""Files that are complete or not there: atomic writing, under a temporary name that is renamed at the end
(`atomic_write`), and removal of what a killed process left. A lock (`hold`) tells that from what a living process
writes.

`temporary_path` makes such names, `create_temporary` a locked file of such a name, and `remove_temporary`
(`remove_left` for one path) removes what was left. There are also flushing to the disk (`sync`, `start_flush`), errors
of writing that name the file (`writing`), checksums of files (`fingerprints`), reading of regular files alone, where
others may have put a pipe or a device in their place (`read_plain`), and the check that a run can write its folder
(`require_makeable`). The module imports nothing of jaxtune, so every package may use it.
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

# Linux's system call, which Python has no function for; None on other systems.
_SYNC_FILE_RANGE = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _SYNC_FILE_RANGE is not None:
    _SYNC_FILE_RANGE.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_START_ONLY = 2  # SYNC_FILE_RANGE_WRITE: writes what is not on its way yet, and waits for nothing


def atomic_write(path: str | os.PathLike, data: bytes | str, mode: int = 0o644, durable: bool = True) -> None:
    """Writes a file atomically: whoever reads it, and a crash or a full disk at any moment, finds the whole old content
    or the whole new one.

    Args:
      path: the file. A symbolic link of that name is replaced, not followed. The folder must exist.
      data: the content; text is written as UTF-8.
      mode: permissions of the file, less the process's umask.
      durable: True: it returns when the data and the file's name are on disk. False: it does not wait, so a power
        failure may leave an incomplete file; this is for files that are verified when they are read, and for files of a
        folder that is flushed as a whole later (new_folder).
    Raises:
      OSError: the disk is full or the folder cannot be written; the old content is untouched (except where only the
        last step of `durable`, the flush of the folder, fails).
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
    """Returns a new hidden path in the folder of `path`, for a file or folder that is renamed to `path` when it is
    complete. Nothing is created or locked. If the process is killed, what it wrote there stays; `remove_temporary`
    recognises it by the form of the name, .NAME.PROCESS-RANDOM.tmp. Where another process may clean the folder so, the
    caller locks (`hold`) what it creates; for a file, `create_temporary` does both."""
    path = Path(path)
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def create_temporary(path: str | os.PathLike, mode: int = 0o666) -> tuple[Path, int]:
    """Creates an empty file under a temporary name beside `path` (`temporary_path`) and locks it (`hold`), so that no
    other process removes it as a leftover. The caller writes it, renames it to `path`, and then closes the descriptor,
    which ends the lock. Only `atomic_write` and the writer of a teacher's stored scores call it.

    Args:
      path: what the file will be renamed to. The folder must exist.
      mode: permissions of the file, less the process's umask.
    Returns:
      (the temporary path, a file descriptor for reading and writing)
    Raises:
      OSError: the file cannot be created.
    """
    while True:
        temporary = temporary_path(path)
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        if hold(descriptor) and temporary.exists():
            return temporary, descriptor
        os.close(descriptor)  # another process removes it, as a leftover, which it found before it was locked


@contextlib.contextmanager
def writing(path: str | os.PathLike, count_bytes: int) -> Iterator[None]:
    """A context for writing a file. An OSError within it that names no file (those of write and flush name none) is
    raised as an OSError of the same number (EIO if it has none) that names this file and has the number of bytes in its
    message, so that the user learns which disk is full. An OSError that names a file passes unchanged.
    `atomic_write` and the writers of safetensors, GGUF and tokenizer files and of the cache of rows enter it.

    Args:
      path: the file that is written.
      count_bytes: the number of bytes that are written in all.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        # NumPy's error has no code, only words on how much of an array was written.
        what = f"{error.strerror or error}, with {count_bytes:,} bytes to write"
        raise OSError(error.errno or errno.EIO, what, os.fspath(path)) from None


def hold(descriptor: int) -> bool:
    """Locks an open file or folder (flock, exclusive) for as long as the descriptor is open, without waiting. Returns
    False if it is locked already through another descriptor, as by another process; else True, also on a file system
    without locks, where nothing is locked. A process locks what it writes, so that `remove_left` does not take it for
    the leftover of a dead one, and no second process writes the same file. The temporary files of
    `create_temporary` and the temporary folders of new_folder are locked by it, and the file of answers of `jaxtune
    generate`; a run's folder is not (train/folder/folder_lock.py). The lock ends with its process, however the process
    ends."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def remove_left(path: Path) -> None:
    """Removes a temporary file or folder that a killed process left, unless a living process is writing it: such a
    process has locked it by `hold`. A symbolic link is removed itself, not what it points to. On a file system without
    locks, everything is removed. Errors are ignored, because the path may be gone already. `remove_temporary` calls
    it, and so do the writers of model folders and of a teacher's stored scores, before they write."""
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
    """Returns the content of a regular file; symbolic links are followed. It is for folders that others may write to:
    meta.json in the cache of tokenised rows and the file of kernels' block sizes are read by it. In place of the file
    there may be a named pipe or a device, on which an ordinary read could wait forever; here it raises an error.

    Raises:
      OSError: the path is not a regular file, or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{os.fspath(path)} is not a regular file")
        return file.read()


_TEMPORARY = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.tmp")


def remove_temporary(folder: str | os.PathLike) -> None:
    """Removes temporary files and folders (with names from `temporary_path`) that killed processes left in `folder`. A
    run calls it once, on its output folder, before it trains; no other folder is cleaned by it. Those that a living
    process is writing stay, such as an export into a run's folder: it has locked them (`hold`). On a file system
    without locks they are removed, too."""
    for left in Path(folder).glob(".*.tmp"):
        if _TEMPORARY.fullmatch(left.name):
            remove_left(left)


def sync(path: str | os.PathLike) -> None:
    """Waits until the disk has what was written to the file `path`, or, if it is a folder, the names of its files.
    Afterwards a power failure does not lose them. Writers of checkpoints, results and model folders call it for what
    they have written before they rename it, and for the folder that contains it afterwards. Raises OSError if the path
    cannot be opened or the disk fails."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def start_flush(descriptor: int, at: int, size_bytes: int) -> None:
    """Has the kernel begin to write a part of an open file to the disk, so that a flush at the end waits for little. It
    does not wait until the part is there, but while the disk has much to do, it waits until it takes the part on. The
    flush at the end is still needed, and raises the disk's errors; where the system has no such call, it does it all.

    Args:
      descriptor: of the file.
      at: the part's first byte.
      size_bytes: its bytes.
    """
    if _SYNC_FILE_RANGE is not None:
        _SYNC_FILE_RANGE(descriptor, at, size_bytes, _START_ONLY)


def fingerprints(paths: Iterable[Path]) -> dict[Path, dict[str, Any]]:
    """Returns {path: {"bytes": size, "crc32": eight hexadecimal digits}} for the files `paths`, in their order; eight
    threads read them. Checkpoints and results record the values when they are written, so that a later change of a file
    is noticed, and the processes of a run compare files by them. CRC-32 detects accidental changes only, and runs at 4
    GB/s per core where SHA-256 runs at 1.7. Raises OSError for a file that cannot be read."""
    paths = list(paths)
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(paths, pool.map(_fingerprint, paths), strict=True))


def _fingerprint(path: Path) -> dict[str, Any]:
    """Returns {"bytes": size, "crc32": eight hexadecimal digits} of the file `path`, which is read in blocks of 4 MiB.
    `fingerprints` calls it in threads."""
    checksum, count = 0, 0
    buffer = bytearray(2**22)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while n := file.readinto(buffer):
            checksum, count = zlib.crc32(view[:n], checksum), count + n
    return {"bytes": count, "crc32": f"{checksum:08x}"}


def require_makeable(key: str, value: str) -> None:
    """Checks, without creating anything, that the folder `value` exists or can be created, and can be written to;
    returns nothing. `jaxtune train` calls it for the key `output` before a run begins, so that the run does not fail
    when it saves its result.

    Args:
      key: the name of the setting that has this value, for the message.
      value: the folder.
    Raises:
      ValueError: a file is in the way, or the folder, or the nearest existing one above it, in which it would be
        created, cannot be written to.
    """
    wanted = Path(value).absolute()
    there = next(folder for folder in (wanted, *wanted.parents) if folder.exists())
    if not there.is_dir():
        raise ValueError(f"{key} = {value!r}: {there} is a file; choose a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{key} = {value!r}: {there} cannot be written to; choose another folder")
