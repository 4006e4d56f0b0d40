"""Output folders that appear complete or not at all, even if the process is killed."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator
from pathlib import Path

from jaxtune.system import files


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


@contextlib.contextmanager
def new_folder(path: str | os.PathLike, caller: str) -> Iterator[Path]:
    """files.new_folder for what the user named: missing parents are created, and leftovers of killed processes removed.
    Raises ValueError as require_new does. Processes of one run must not share `path`: one alone writes
    (processes.written_by_first).
    """
    path = require_new(path, caller)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.remove_temporary(path.parent, glob.escape(path.name))
    with files.new_folder(path) as folder:
        yield folder
