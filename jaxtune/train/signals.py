"""Stop at a step's end instead of in its middle."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import Any

# EX_TEMPFAIL of sysexits.h. A scheduler may start the same command again.
EXIT_SAVED = 75


class StopSignal:
    """Context in which the first SIGTERM or SIGINT only sets `requested`; the second ends the process at once.

    The loop finishes its step, saves and leaves with `EXIT_SAVED`: "saved, and can be resumed". Old handlers come
    back on exit. Outside the main thread, where Python takes no handlers, it does nothing and `requested` stays False.
    """

    signals = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.requested = False
        self.signal_name: str | None = None
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._handle) for number in self.signals}
        return self

    def __exit__(self, *exc) -> None:
        for number, handler in self._old.items():
            # None: a handler that was not set from Python cannot be set from it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._old = {}

    def _handle(self, number: int, frame: object) -> None:
        name = signal.Signals(number).name
        if self.requested:
            _write(f"\n{name} again: leaving at once, without a save.\n" + ("\x1b[?25h" if sys.stderr.isatty() else ""))
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.requested = True
        self.signal_name = name
        _write(f"\n{name}: finishing this step, then saving. Again to leave at once.\n")


def _write(text: str) -> None:
    # Not print: the handler may interrupt a print, and buffered streams cannot be entered twice.
    with contextlib.suppress(OSError):  # the terminal is gone; the signal still counts
        os.write(2, text.encode())
