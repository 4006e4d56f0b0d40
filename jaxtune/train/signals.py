"""SIGTERM, SIGINT and SIGHUP stop a run: a step in progress is finished and saved, a wait ends at once, and work that
loses nothing, such as loading, is interrupted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxtune.system import waiting

# The exit code of a run that a signal stopped, and that was saved if there was anything to save: EX_TEMPFAIL of
# sysexits.h. A scheduler may start the same command again.
EXIT_SAVED = 75
FINISHING = "finishing this step, then saving"
_AGAIN_SECONDS = 0.05  # the delay before a signal whose exception Python dropped is sent again


class Interrupted(KeyboardInterrupt):
    """A signal arrived during work that loses nothing: in StopSignal.at_once, or in the user's code. The message is its
    name.
    """


class StopSignal:
    """A context in which the first signal sets `requested`, and a second SIGTERM or SIGINT ends the process at once.

    SIGHUP (terminal closed) often comes in addition to SIGTERM, so it is not a second one; ignored (nohup), it stays
    so. In `at_once` and in user's code that a run waits for, the first signal raises Interrupted; in `deferred`, within
    it, it only sets `requested`. Python drops exceptions of finalisers; the signal is then sent again. Outside the main
    thread nothing is handled.

    `signal_name`: of the first signal. `saying`: what follows one now.
    """

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the signals that are handled

    def __init__(self) -> None:
        self.requested = False
        self.signal_name: str | None = None
        self._stop_asked = False  # whether SIGTERM or SIGINT has arrived
        self._raises = False
        self.saying = FINISHING
        self._handled = False  # whether the handler has run; `requested` may be True before
        self._insisted = 0  # signals on their way that `insist` sent
        self._wakeup: tuple[int, int] | None = None  # a pipe that has the number of a signal before Python handles it
        self._again: threading.Timer | None = None  # sends a signal again whose exception Python dropped
        self._old: dict[int, Any] = {}
        self._hook: Callable[[sys.UnraisableHookArgs], object] | None = None

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._handle) for number in handled(self.signals)}
            self._hook, sys.unraisablehook = sys.unraisablehook, self._send_again
            self._open_wakeup()
        return self

    def __exit__(self, *exc) -> None:
        for number, handler in self._old.items():
            # None means that the previous handler was not set from Python, and so cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._old = {}
        if self._hook is not None:
            sys.unraisablehook, self._hook = self._hook, None
        if self._again is not None:
            self._again.cancel()
        if self._wakeup is not None:
            signal.set_wakeup_fd(-1)
            for descriptor in self._wakeup:
                os.close(descriptor)
            self._wakeup = None

    def _open_wakeup(self) -> None:
        self._wakeup = read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        if (earlier := signal.set_wakeup_fd(write, warn_on_full_buffer=False)) != -1:  # of somebody else, who needs it
            signal.set_wakeup_fd(earlier, warn_on_full_buffer=False)
            os.close(read)
            os.close(write)
            self._wakeup = None

    def arrived(self) -> bool:
        """Whether a signal has arrived, even if the main thread has not handled it. For other threads."""
        if self.requested or self._wakeup is None:
            return self.requested
        with contextlib.suppress(OSError):  # BlockingIOError: there is none
            for number in os.read(self._wakeup[0], 4096):
                if number in self._old and not self.requested:
                    self.requested, self.signal_name = True, signal.Signals(number).name
        return self.requested

    def insist(self) -> None:
        """Raises once more in user's code that went on after a signal. For other threads."""
        if self.signal_name is not None:
            self._insisted += 1
            signal.pthread_kill(threading.main_thread().ident or 0, signal.Signals[self.signal_name])

    @contextlib.contextmanager
    def announced(self, saying: str) -> Iterator[None]:
        before, self.saying = self.saying, saying
        try:
            yield
        finally:
            self.saying = before

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """A context of work that loses nothing, in which a signal raises Interrupted; an earlier one raises on
        entering.
        """
        with self._mode(True):
            yield

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """A context in which a signal only sets `requested`. Within `at_once` it raises Interrupted when this context
        ends without an exception.
        """
        with self._mode(False):
            yield

    @contextlib.contextmanager
    def _mode(self, raises: bool) -> Iterator[None]:
        before, self._raises = self._raises, raises
        try:
            self._raise_pending()
            yield
        finally:
            self._raises = before
        self._raise_pending()

    def _raise_pending(self) -> None:
        if self._raises and self.requested:
            raise Interrupted(self.signal_name)

    def _send_again(self, unraisable: sys.UnraisableHookArgs) -> None:
        """sys.unraisablehook: sends the signal of a dropped Interrupted again; the rest goes to the previous hook."""
        if not isinstance(unraisable.exc_value, Interrupted):
            assert self._hook is not None
            self._hook(unraisable)
            return
        number = signal.Signals[str(unraisable.exc_value)]
        self._again = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), number))  # after the finaliser has ended
        self._again.daemon = True
        self._again.start()

    def _handle(self, number: int, frame: object) -> None:
        """The handler: the first signal asks for a stop, a second one ends the process, unless it is SIGHUP."""
        name = signal.Signals(number).name
        if self._again is not None:  # the one that `_send_again` sends
            self._again = None
            self._raise_pending()
            return
        if self._insisted:
            self._insisted -= 1
            if waiting.interruptible() is not None:
                raise Interrupted(name)
            return
        again = self._handled and self._stop_asked and number != signal.SIGHUP
        self._stop_asked = self._stop_asked or number != signal.SIGHUP
        if again:
            _write(f"\n{name} again: leaving at once, without a save.\n" + ("\x1b[?25h" if os.isatty(2) else ""))
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self._handled:
            return
        self._handled = self.requested = True
        self.signal_name = name
        if self._raises:
            _write(f"\n{name}: leaving. Again to leave at once.\n")
            raise Interrupted(name)
        code = waiting.interruptible()
        stopping = "" if code is None else f"stopping {code}, "
        _write(f"\n{name}: {stopping}{self.saying}. Again to leave at once.\n")
        if code is not None:
            raise Interrupted(name)


def handled(numbers: Iterable[int]) -> list[int]:
    """`numbers` without a SIGHUP that is ignored, as under nohup, so that it stays so."""
    return [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


def _write(text: str) -> None:
    """Writes to stderr unbuffered: the handler may interrupt a print, and buffered streams are not reentrant."""
    # It does not use print, because the handler may interrupt a print, and buffered streams are not reentrant.
    with contextlib.suppress(OSError):  # the terminal may be gone; the signal counts all the same
        os.write(2, text.encode())
