"""The Python files of jaxtune: other code compiles to other programs."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

from jaxtune.system import timing

_ROOT = Path(__file__).parents[1]
_lock = threading.Lock()  # of the only reading: hundreds of files take a second on a slow disk


class _Read(NamedTuple):
    digests: dict[str, bytes]  # {path below the package: SHA-256}
    are_loaded: bool


@functools.cache
def digest(folder: str = "") -> str:
    """SHA-256 of all files of jaxtune, or of those in a folder of it, as they were when they were first read here."""
    digests, within = _read().digests, f"{folder}/" if folder else ""
    chosen = [(path, digests[path]) for path in sorted(digests) if path.startswith(within)]
    return hashlib.sha256(repr(chosen).encode()).hexdigest()


def are_loaded() -> bool:
    """Whether no file had changed since this process began when they were read, so that it runs what `digest` is of."""
    return _read().are_loaded


def are_unchanged() -> bool:
    """`are_loaded`, and none has changed until now."""
    return are_loaded() and all(path.stat().st_mtime < _began() for path in _ROOT.rglob("*.py"))


def _read() -> _Read:
    with _lock:
        return _read_once()


@functools.cache
def _read_once() -> _Read:
    digests, newest = {}, 0.0
    for path in _ROOT.rglob("*.py"):
        with path.open("rb", buffering=0) as file:
            newest = max(newest, os.fstat(file.fileno()).st_mtime)
            digests[str(path.relative_to(_ROOT))] = hashlib.sha256(file.read()).digest()
    return _Read(digests, newest < _began())


def _began() -> float:
    """When this process did, as time.time()."""
    return time.time() - (time.monotonic() - timing.process_start())
