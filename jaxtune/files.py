"""Files that are whole or not there. Every room may use this; it imports nothing of ours."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def atomic_write(path: str | os.PathLike, data: bytes | str, mode: int = 0o644, durable: bool = True) -> None:
    """Writes a file that a reader, a crash or a full disk sees whole: as it was before, or as it is now.

    Args:
      path: a link of that name is replaced, not followed. Its folder must exist.
      data: text is written as UTF-8.
      mode: permissions of the file, less the process's umask.
      durable: wait until the disk holds it. Without, a power cut may leave less than all of it: for what is checked
        when it is read.
    Raises:
      OSError: the disk is full or the folder cannot be written; what was there before is untouched.
    """
    path = Path(path)
    temporary = unfinished_name(path)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(descriptor, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            if durable:
                os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        sync(path.parent)


def unfinished_name(path: str | os.PathLike) -> Path:
    """A new hidden name beside `path`, for what shall get that name once it is whole."""
    path = Path(path)
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


_UNFINISHED = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.tmp")


def remove_unfinished(folder: str | os.PathLike) -> None:
    """Removes the unfinished files and folders that a killed process left in `folder`; the caller is its one writer."""
    for left in Path(folder).glob(".*.tmp"):
        if not _UNFINISHED.fullmatch(left.name):
            continue
        with contextlib.suppress(OSError):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            else:
                left.unlink()


def sync(path: str | os.PathLike) -> None:
    """Has the disk keep what was written to a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fingerprints(paths: Iterable[Path]) -> dict[Path, dict[str, Any]]:
    """{"bytes": size, "crc32": eight hexadecimal digits} of each file. CRC-32 guards against accidents, and runs at
    4 GB/s a core where SHA-256 runs at 1.7."""
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
    """Refuses the setting `key` where no folder of that name can be made. Raises ValueError."""
    wanted = Path(value).absolute()
    there = next(folder for folder in (wanted, *wanted.parents) if folder.exists())
    if not there.is_dir():
        raise ValueError(f"{key} = {value!r}: {there} is a file; name a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{key} = {value!r}: {there} cannot be written to; name another folder")
