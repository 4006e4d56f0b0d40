"""Output folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxtune import processes
from jaxtune.files import sync, unfinished_name


def require_new(path: str | os.PathLike, what: str) -> Path:
    """`path`, or what it links to, if it does not exist or is an empty folder; ValueError otherwise: nothing is ever
    overwritten."""
    path = Path(path).resolve()
    if path.is_mount():
        raise ValueError(f"{what}: {path} is where a disk is mounted, which no new folder can replace; name one in it")
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        kind = "folder that is not empty" if path.is_dir() else "file"
        raise ValueError(f"{what}: {path} is a {kind}; choose another path or remove it")
    return path


def require_space(folder: Path, need_bytes: int) -> None:
    """Raises ValueError where the disk of a folder, which need not exist yet, has less room than that."""
    if not processes.first():
        return  # which writes nothing large
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if need_bytes > free:
        raise ValueError(f"{folder}: {need_bytes:,} bytes to write, but only {free:,} bytes are free on that disk")


@contextlib.contextmanager
def new_folder(path: str | os.PathLike, what: str) -> Iterator[Path]:
    """A temporary folder beside `path`, which takes its name when the block ends well and vanishes when it fails.

    Those that killed processes left of the same `path` are removed first.
    """
    path = require_new(path, what)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(path)
    temporary = unfinished_name(path)
    temporary.mkdir()
    held = _hold(temporary)
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
        if held is not None:
            os.close(held)


def _hold(folder: Path) -> int | None:
    """A lock on a folder, as a descriptor that holds it while it is open; None where another process has it.

    It goes with its process, however that ends, which a process id in a name cannot tell.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_left(path: Path) -> None:
    """Removes what killed processes left of `path`; not what one that lives is writing."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        if not left.is_dir() or left.is_symlink():
            continue
        held = _hold(left)
        if held is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(held)
