"""Output folders that appear complete or not at all, even if the process is killed."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxtune.system import processes
from jaxtune.system.files import hold, remove_left, sync, temporary_path


def require_new(path: str | os.PathLike, caller: str) -> Path:
    """The absolute path, symbolic links resolved. Raises ValueError for a file, a folder that is not empty or a mount
    point. caller: the caller, for errors.
    """
    path = Path(path).resolve()
    if path.is_mount():
        raise ValueError(
            f"{caller}: {path} is where a disk is mounted, which no new folder can replace; name one in it"
        )
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        kind = "folder that is not empty" if path.is_dir() else "file"
        raise ValueError(f"{caller}: {path} is a {kind}; choose another path or remove it")
    return path


def require_space(folder: Path, need_bytes: int) -> None:
    """Raises ValueError if the disk of a folder, which need not exist, has too few free bytes. Only the first process
    checks.
    """
    if not processes.first():
        return  # only the first process writes large files
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if need_bytes > free:
        raise ValueError(f"{folder}: {need_bytes:,} bytes to write, but only {free:,} bytes are free on that disk")


@contextlib.contextmanager
def new_folder(path: str | os.PathLike, caller: str) -> Iterator[Path]:
    """Yields a temporary folder beside `path`. If the block succeeds it is flushed and renamed to `path`, otherwise
    removed. Missing parents are created, and leftovers of killed processes removed. Raises ValueError as require_new
    does. Processes of one run must not share `path`: one alone writes (processes.written_by_first).
    """
    path = require_new(path, caller)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(path)
    temporary, lock = _make_locked(path)
    try:
        yield temporary
        for entry in [*temporary.rglob("*"), temporary]:
            sync(entry)
        os.replace(temporary, path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _make_locked(path: Path) -> tuple[Path, int]:
    """(temporary folder beside `path`, descriptor whose lock keeps processes from removing it as a leftover)."""
    while True:
        temporary = temporary_path(path)
        temporary.mkdir()
        descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
        if hold(descriptor) and os.fstat(descriptor).st_nlink:
            return temporary, descriptor
        os.close(descriptor)  # another process removed it as a leftover before it was locked


def _remove_left(path: Path) -> None:
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        if leftover.is_dir() and not leftover.is_symlink():
            remove_left(leftover)
