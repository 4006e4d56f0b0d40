"""Output folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxtune.system import processes
from jaxtune.system.files import hold, remove_left, sync, unfinished_name


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
    temporary, held = _make_held(path)
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
        os.close(held)


def _make_held(path: Path) -> tuple[Path, int]:
    """A new folder beside `path`, and the descriptor that holds it."""
    while True:
        temporary = unfinished_name(path)
        temporary.mkdir()
        descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
        if hold(descriptor) and os.fstat(descriptor).st_nlink:
            return temporary, descriptor
        os.close(descriptor)  # somebody who removes what is left was quicker


def _remove_left(path: Path) -> None:
    """Removes what killed processes left of `path`; not what one that lives is writing."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        if left.is_dir() and not left.is_symlink():
            remove_left(left)
