"""Room on a disk: what is free, what is needed, and what may go."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from jaxtune.system import processes
from jaxtune.system.files import discard


def nearest(folder: Path) -> Path:
    """The folder itself, or the nearest parent that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def free_bytes(folder: Path) -> int:
    """What the disk of a folder, which need not exist, has free."""
    return shutil.disk_usage(nearest(folder)).free


def lacks_room(folder: Path, need_bytes: int) -> str | None:
    """What is needed and what the disk of a folder has, if that is too little."""
    if (free := free_bytes(folder)) >= need_bytes:
        return None
    return f"it needs {_size(need_bytes)}, {folder} has {_size(free)} free; free some space or write to another disk"


def require_room(folder: Path, need_bytes: int) -> None:
    """ValueError if the disk has too few free bytes; in the first process, which alone writes large files."""
    if processes.first() and (lacking := lacks_room(folder, need_bytes)):
        raise ValueError(f"no room to write to {folder}: {lacking}")


def note_use(file: Path) -> None:
    """Marks a file as changed now, for `remove_oldest`; another user's may stay as it is."""
    with contextlib.suppress(OSError):
        os.utime(file)


def remove_oldest(paths: Iterable[Path], is_too_much: Callable[[int, int], bool], unused_seconds: float = 0.0) -> int:
    """Removes files and flat folders, the least recently changed first, and returns their bytes. Errors are ignored.

    is_too_much: (remaining bytes, removed bytes) -> whether more must go.
    unused_seconds: what changed since then stays.
    """
    entries = []
    for path in paths:
        with contextlib.suppress(OSError):  # another process removed it
            files = [*path.iterdir()] if path.is_dir() else [path]
            states = [file.stat() for file in files or [path]]
            entries.append((max(state.st_mtime for state in states), sum(state.st_size for state in states), path))
    remaining, removed = sum(size for _, size, _ in entries), 0
    for changed, size, path in sorted(entries):
        if not is_too_much(remaining, removed) or time.time() - changed < unused_seconds:
            break
        with contextlib.suppress(OSError):
            discard(path) if path.is_dir() else path.unlink()
            remaining, removed = remaining - size, removed + size
    return removed


def require_makeable(key: str, value: str) -> None:
    """Raises ValueError unless the folder `value` is writable or can be created. key: the setting's name."""
    folder = nearest(Path(value))
    if not folder.is_dir():
        raise ValueError(f"{key} = {value!r}: {folder} is a file; choose a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{key} = {value!r}: {folder} cannot be written to; choose another folder")


def _size(count_bytes: int) -> str:
    return f"{count_bytes / 1e9:,.2f} GB" if count_bytes >= 1e8 else f"{count_bytes / 1e6:,.2f} MB"
