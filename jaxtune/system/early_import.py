"""Imports packages in a thread before they are needed, while the main thread waits for files or the device."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable


def begin(load: Callable[[], object]) -> threading.Thread:
    """Calls `load`, which imports or reads, in a thread that an ending process does not wait for. Its errors are
    dropped: whoever needs the modules imports them again.
    """

    def run() -> None:
        with contextlib.suppress(Exception):
            load()

    thread = threading.Thread(target=run, name="import", daemon=True)
    thread.start()
    return thread


def begin_modules(*names: str) -> None:
    """`begin` for modules by name, one after the other; those that are not installed are left out."""

    def load() -> None:
        for name in names:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)

    begin(load)
