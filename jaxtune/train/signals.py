"""Signals: nothing under way is lost, and nothing waits long."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# EX_TEMPFAIL of sysexits.h. A scheduler may start the same command again.
EXIT_SAVED = 75
_AGAIN_SECONDS = 0.05


class Interrupted(KeyboardInterrupt):
    """A signal came where there was nothing to save first; the message names it."""


class StopSignal:
    """Context in which the first SIGTERM, SIGINT or SIGHUP only sets `requested`; the second SIGTERM or SIGINT ends the
    process at once.

    SIGHUP says that the terminal was closed or the connection dropped. The shell and the system both send it, and the
    end of a session comes with SIGTERM beside it: it is never a second wish. Where it is ignored (nohup), it stays so.

    The loop asks for `requested` after every step and between the batches of an evaluation, saves and leaves with
    `EXIT_SAVED`: "the same command goes on from there". Inside `at_once`, where nothing would be lost (loading,
    tokenising, compiling, generation, export), the first signal raises Interrupted instead; inside `held`, within it,
    it only sets `requested` again. Python drops what is raised while it runs a finaliser or a callback of the garbage
    collector: the signal then comes once more. Old handlers come back on exit. Outside the main thread, where Python
    takes no handlers, it does nothing and `requested` stays False.
    """

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __init__(self) -> None:
        self.requested = False
        self.signal_name: str | None = None
        self._wished = False  # by SIGTERM or SIGINT
        self._raises = False
        self._again: threading.Timer | None = None  # which sends a signal that Python dropped once more
        self._old: dict[int, Any] = {}
        self._hook: Callable[[sys.UnraisableHookArgs], object] | None = None

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._handle) for number in handled(self.signals)}
            self._hook, sys.unraisablehook = sys.unraisablehook, self._send_again
        return self

    def __exit__(self, *exc) -> None:
        for number, handler in self._old.items():
            # None: a handler that was not set from Python cannot be set from it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._old = {}
        if self._hook is not None:
            sys.unraisablehook, self._hook = self._hook, None
        if self._again is not None:
            self._again.cancel()

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """A signal raises Interrupted, also one that came before."""
        with self._mode(True):
            yield

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A signal only sets `requested`; if nobody has acted on it, the end of an `at_once` around raises it."""
        with self._mode(False):
            yield

    @contextlib.contextmanager
    def _mode(self, raises: bool) -> Iterator[None]:
        before, self._raises = self._raises, raises
        try:
            self._raise_what_came()
            yield
        finally:
            self._raises = before
        self._raise_what_came()

    def _raise_what_came(self) -> None:
        if self._raises and self.requested:
            raise Interrupted(self.signal_name)

    def _send_again(self, unraisable: sys.UnraisableHookArgs) -> None:
        """In place of sys.unraisablehook."""
        if not isinstance(unraisable.exc_value, Interrupted):
            assert self._hook is not None
            self._hook(unraisable)
            return
        number = signal.Signals[str(unraisable.exc_value)]
        self._again = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), number))  # once that code is done
        self._again.daemon = True
        self._again.start()

    def _handle(self, number: int, frame: object) -> None:
        name = signal.Signals(number).name
        if self._again is not None:
            self._again = None
            self._raise_what_came()
            return
        again = self.requested and self._wished and number != signal.SIGHUP
        self._wished = self._wished or number != signal.SIGHUP
        if again:
            _write(f"\n{name} again: leaving at once, without a save.\n" + ("\x1b[?25h" if os.isatty(2) else ""))
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.requested:
            return
        self.requested = True
        self.signal_name = name
        if self._raises:
            _write(f"\n{name}: leaving. Again to leave at once.\n")
            raise Interrupted(name)
        _write(f"\n{name}: finishing this step, then saving. Again to leave at once.\n")


def handled(numbers: Iterable[int]) -> list[int]:
    """Those of some signals that shall get a handler: not a SIGHUP that is ignored, as nohup has it."""
    return [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


def _write(text: str) -> None:
    # Not print: the handler may interrupt a print, and buffered streams cannot be entered twice.
    with contextlib.suppress(OSError):  # the terminal is gone; the signal still counts
        os.write(2, text.encode())
