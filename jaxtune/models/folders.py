"""Output folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxtune.files import sync, unfinished_name


def require_new(path: str | os.PathLike, what: str) -> Path:
    """`path`, if it does not exist or is an empty folder; ValueError otherwise: nothing is ever overwritten."""
    path = Path(path).absolute()
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        kind = "folder that is not empty" if path.is_dir() else "file"
        raise ValueError(f"{what}: {path} is a {kind}; choose another path or remove it")
    return path


@contextlib.contextmanager
def new_folder(path: str | os.PathLike, what: str) -> Iterator[Path]:
    """A temporary folder beside `path`, which takes its name when the block ends well and vanishes when it fails."""
    path = require_new(path, what)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = unfinished_name(path)
    temporary.mkdir()
    try:
        yield temporary
        for entry in [*temporary.rglob("*"), temporary]:
            sync(entry)
        os.replace(temporary, path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
