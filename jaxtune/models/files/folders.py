"""Output folders that appear complete or not at all, even if the process is killed while it writes (`new_folder`), and
the checks before one is written: that nothing is there (`require_new`), and that the disk has room
(`require_space`)."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxtune.system import processes
from jaxtune.system.files import hold, remove_left, sync, temporary_path


def require_new(path: str | os.PathLike, what: str) -> Path:
    """Checks that an output folder can be created: returns the absolute `path`, with symbolic links resolved, if
    nothing exists there, or an empty folder, so that nothing is ever overwritten. Nothing is created. Saving a
    model and exporting call it before anything is written, and new_folder calls it again.

    what: the name of the calling function, such as "save_pretrained", with which the error message begins.

    Raises:
      ValueError: a file, a folder that is not empty, or a mount point.
    """
    path = Path(path).resolve()
    if path.is_mount():
        raise ValueError(f"{what}: {path} is where a disk is mounted, which no new folder can replace; name one in it")
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        kind = "folder that is not empty" if path.is_dir() else "file"
        raise ValueError(f"{what}: {path} is a {kind}; choose another path or remove it")
    return path


def require_space(folder: Path, need_bytes: int) -> None:
    """Raises ValueError where the disk of a folder, which need not exist yet, has fewer free bytes than need_bytes, so
    that nobody waits for a save that must fail. Saving a model and every kind of export call it, each with the size
    that it will write; saving an adapter does not. Only the first process of a run checks, because only it writes."""
    if not processes.first():
        return  # only the first process writes large files
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if need_bytes > free:
        raise ValueError(f"{folder}: {need_bytes:,} bytes to write, but only {free:,} bytes are free on that disk")


@contextlib.contextmanager
def new_folder(path: str | os.PathLike, what: str) -> Iterator[Path]:
    """Context manager that yields a temporary folder beside `path`, which is renamed to `path` if the block succeeds.
    The caller writes the files into it. Saving a model or adapter, exports, and the results at a run's end are written
    so.

    Its content is flushed to the disk before the rename, and missing parents of `path` are created. If the block fails,
    the temporary folder is removed, and the error is raised again. Temporary folders of the same `path` that killed
    processes left are removed first.

    Args:
      path: a folder that does not exist or is empty.
      what: the name of the calling function, such as "save_pretrained", with which the error message begins.

    Raises:
      ValueError: `path` is a file, a folder that is not empty, or a mount point.
    """
    path = require_new(path, what)
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
    """(a new temporary folder beside `path`, a file descriptor whose lock shows other processes that the folder is in
    use). new_folder writes into that folder. The lock lasts until the caller closes the descriptor; without it another
    process would remove the folder as a leftover."""
    while True:
        temporary = temporary_path(path)
        temporary.mkdir()
        descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
        if hold(descriptor) and os.fstat(descriptor).st_nlink:
            return temporary, descriptor
        os.close(descriptor)  # another process removed it as a leftover before it was locked


def _remove_left(path: Path) -> None:
    """Removes temporary folders beside the output folder `path` that killed processes left when they wrote it, but not
    those that a running process has locked. A folder that cannot be removed is left. new_folder calls it first."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        if left.is_dir() and not left.is_symlink():
            remove_left(left)
