"""The Python files of jaxtune: other code compiles to other programs."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jaxtune.system import timing

_ROOT = Path(__file__).parents[1]
_BEGAN = time.time() - (time.monotonic() - timing.process_start())  # this process did, as time.time()
_lock = threading.Lock()  # of the only reading: hundreds of files take a second on a slow disk


class _File(NamedTuple):
    changed_ns: int
    size: int


class _Sources(NamedTuple):
    """By paths below the package; none if they cannot be read."""

    files: dict[str, _File]
    digests: dict[str, bytes]  # SHA-256


@functools.cache
def digest(folder: str = "") -> str:
    """SHA-256 of all files of jaxtune, or of those in a folder of it, as they were when they were first read here. It
    tells nothing without `are_loaded`.
    """
    digests = _first_read().digests
    chosen = [(path, digests[path]) for path in sorted(digests) if _is_within(path, folder)]
    return hashlib.sha256(repr(chosen).encode()).hexdigest()


def are_loaded(folder: str = "") -> bool:
    """Whether no file of `digest` had changed since this process began when they were read. Modules that are imported
    later may be others. False without files, as of a zipped package.
    """
    chosen = [file for path, file in _first_read().files.items() if _is_within(path, folder)]
    return bool(chosen) and max(file.changed_ns for file in chosen) < _BEGAN * 1e9


def are_unchanged(folder: str = "") -> bool:
    """`are_loaded`, and until now none has changed, gone or come: this process runs what `digest` is of. Some
    milliseconds.
    """
    if not are_loaded(folder):
        return False
    chosen = {path: file for path, file in _first_read().files.items() if _is_within(path, folder)}
    try:
        return dict(_files(_ROOT / folder)) == chosen
    except OSError:
        return False


def _is_within(path: str, folder: str) -> bool:
    return not folder or path.startswith(f"{folder}/")


def _first_read() -> _Sources:
    with _lock:
        return _read()


@functools.cache
def _read() -> _Sources:
    files, digests = {}, {}
    try:
        for path, _ in _files(_ROOT):
            with open(_ROOT / path, "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                files[path] = _File(status.st_mtime_ns, status.st_size)
                digests[path] = hashlib.sha256(file.read()).digest()
    except OSError:  # removed meanwhile, perhaps
        return _Sources({}, {})
    return _Sources(files, digests)


def _files(folder: Path) -> Iterator[tuple[str, _File]]:
    """Those in the folder and below. Links that lead nowhere, such as an editor's locks, are none."""
    folders, above = [str(folder)], len(str(_ROOT)) + 1
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name != "__pycache__":
                        folders.append(entry.path)
                elif entry.name.endswith(".py") and entry.is_file():
                    status = entry.stat()
                    yield entry.path[above:], _File(status.st_mtime_ns, status.st_size)


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # a thread that reads does not go on in a child
