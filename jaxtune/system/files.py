"""Files and folders that are complete or not there.

They are written under a temporary name, .NAME.PROCESS-RANDOM.tmp, and renamed at the end. A lock (`hold`) tells what a
living process writes from the leftovers of a killed one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

PACKAGE = Path(__file__).parents[1]  # jaxtune's folder

_TEMPORARY = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.tmp")
_REPLACED = re.compile(r"\.(.+)\.\d+-[0-9a-f]{8}\.replaced\.tmp")


# ---- reading and writing


def read_text(path: str | os.PathLike) -> str:
    """A user's file in UTF-8, without the mark that editors on Windows put before it. OSError, UnicodeDecodeError."""
    return Path(path).read_text(encoding="utf-8-sig")


def atomic_write(path: str | os.PathLike, data: bytes | str, mode: int = 0o644, durable: bool = True) -> None:
    """Writes a file so that readers, also after a crash or on a full disk, find the whole old or the whole new content.

    Raises OSError; the old content is then untouched, unless only the folder's flush failed. A symbolic link is
    replaced.

      data: a text is written as UTF-8.
      mode: permissions, less the umask.
      durable: wait until data and name are on disk. Without, a power failure may leave an incomplete file: for files
        that are verified when read, or flushed with their folder.
    """
    data = data.encode() if isinstance(data, str) else data
    with writing(path, len(data)), new_file(path, mode, durable) as (_, file):
        file.write(data)
        file.flush()


@contextlib.contextmanager
def new_file(path: str | os.PathLike, mode: int = 0o666, durable: bool = True) -> Iterator[tuple[Path, BinaryIO]]:
    """A context with a locked temporary file beside `path`: (its path, the file, open for reading and writing). It is
    renamed to `path` at the end, and removed after an error. mode, durable: of `atomic_write`.
    """
    temporary, descriptor = _create(Path(path), lambda new: os.open(new, _NEW_FILE, mode))
    with open(descriptor, "w+b") as file:
        try:
            yield temporary, file
            file.flush()
            if durable:
                os.fsync(descriptor)
            put(temporary, Path(path), durable)  # locked, so that no process takes it for the leftover of a dead one
        except BaseException:
            file.raw.close()  # without its buffer, which a full disk would refuse again
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A context with a `temporary_folder` that is flushed, and `put` at `path`, unless an error ends the context."""
    with temporary_folder(path) as folder:
        yield folder
        for entry in [*folder.rglob("*"), folder]:
            sync(entry)
        put(folder, path)


@contextlib.contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """A context with a new locked folder beside `path`, whose parents exist. It is removed at the end, unless `put`
    gave it a name.
    """
    temporary, lock = _create(path, _new_folder)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(lock)


def put(temporary: Path, path: Path, durable: bool = True) -> None:
    """Gives a complete file or folder its name, in place of what has it. Killed between two renames, a replaced folder
    gets its name back by `remove_temporary`. Raises OSError; what was there then stays.
    """
    replaced: list[Path] = []
    try:
        while not _renamed(temporary, path):
            aside = temporary_path(path).with_suffix(".replaced.tmp")
            with contextlib.suppress(FileNotFoundError):  # another process moved it
                os.rename(path, aside)
                replaced.append(aside)
    except BaseException:
        if replaced and not path.exists():
            os.rename(replaced[-1], path)
        raise
    if durable:
        sync(path.parent)  # before what was replaced goes
    for folder in replaced:
        with contextlib.suppress(OSError):
            discard(folder)


def _renamed(temporary: Path, path: Path) -> bool:
    """False if a folder that is not empty, or a link, has the name of a folder."""
    try:
        os.replace(temporary, path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) or (error.errno == errno.ENOTDIR and path.is_symlink()):
            return False
        raise
    return True


def put_back(replaced: Path, path: Path) -> None:
    """Gives a folder that was to be replaced its name again, or removes it if `path` is there. Raises OSError."""
    discard(replaced) if path.exists() else os.rename(replaced, path)


def discard(folder: Path) -> None:
    """Removes a folder, or a link to one, of which no part is ever under its name. Raises OSError."""
    temporary = temporary_path(folder)
    os.rename(folder, temporary)
    temporary.unlink() if temporary.is_symlink() else shutil.rmtree(temporary)


def temporary_path(path: str | os.PathLike) -> Path:
    """A new hidden path beside `path` for `remove_temporary`, not created. Lock (`hold`) what you create there."""
    path = Path(path)
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def _new_folder(path: Path) -> int:
    path.mkdir()
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # another process removed it as a leftover
        return _new_folder(path)


def _create(path: Path, create: Callable[[Path], int]) -> tuple[Path, int]:
    """(new temporary path beside `path`, descriptor whose lock keeps processes from removing it as a leftover)."""
    while True:
        temporary = temporary_path(path)
        descriptor = create(temporary)
        if hold(descriptor) and temporary.exists():
            return temporary, descriptor
        os.close(descriptor)  # another process removes it, as a leftover, which it saw before it was locked


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


def sync(path: str | os.PathLike) -> None:
    """Waits until the disk has the content of a file, or the names in a folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_plain(path: str | os.PathLike, most_bytes: int = 2**29) -> bytes:
    """The content of a regular file. Raises OSError for anything else, or a larger one: where others may write, a pipe
    could block a read forever, and a file without data be as long as it says.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        _require_plain(path, os.fstat(descriptor), most_bytes)
        return file.read()


def require_plain(path: str | os.PathLike, most_bytes: int | None = None) -> None:
    """Raises OSError unless the path is, or links to, a regular file of at most `most_bytes`. It is not opened."""
    _require_plain(path, os.stat(path), most_bytes)


def _require_plain(path: str | os.PathLike, status: os.stat_result, most_bytes: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{os.fspath(path)} is not a regular file")
    if most_bytes is not None and status.st_size > most_bytes:
        raise OSError(f"{os.fspath(path)} has {status.st_size:,} bytes; at most {most_bytes:,} are read")


# ---- leftovers of killed processes


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


def remove_temporary(folder: str | os.PathLike, pattern: str = "*", idle_seconds: float = 0.0) -> None:
    """Removes temporary files and folders of killed processes; those of living ones are locked. A folder that one of
    them was replacing gets its name back. Errors are ignored.

      pattern: of the final names, for Path.glob.
      idle_seconds: without a write, for folders that hosts share, where locks may not reach.
    """
    for leftover in Path(folder).glob(f".{pattern}.*tmp"):
        with contextlib.suppress(OSError):
            if name := _REPLACED.fullmatch(leftover.name):
                put_back(leftover, leftover.with_name(name[1]))
            elif _TEMPORARY.fullmatch(leftover.name):
                _remove_left(leftover, idle_seconds)


def _remove_left(path: Path, idle_seconds: float) -> None:
    """Removes a temporary file, folder or link unless a living process has locked it."""
    if path.is_symlink():
        path.unlink()
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        written = max(entry.lstat().st_mtime for entry in (path, *path.glob("*"))) if idle_seconds else 0.0
        if not hold(descriptor) or time.time() - written < idle_seconds:
            return
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    finally:
        os.close(descriptor)
