"""Handling of the signals SIGTERM, SIGINT and SIGHUP, which stop a run. A step in progress is finished and the state
saved; a wait ends at once, and the state of the last step is saved. During other work, such as loading and compiling,
the run ends at once by the exception `Interrupted`."""

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
    """Raised when a signal arrives during work that loses nothing when it is interrupted: within StopSignal.at_once, or
    in the user's code that a run waits for (waiting.users_code). The message is the name of the signal. The train
    command then exits with EXIT_SAVED, and jaxtune export with 128 plus the signal's number."""


class StopSignal:
    """A context in which the first SIGTERM, SIGINT or SIGHUP only sets `requested`, and a second SIGTERM or SIGINT ends
    the process immediately. The train command and `jaxtune export` enter one, and so does Trainer.train if it is given
    none.

    SIGHUP means that the terminal was closed or the connection was lost. Both the shell and the system send it, often
    in addition to SIGTERM, so it is not counted: the second signal is the second SIGTERM or SIGINT. If it is ignored
    (nohup), it stays ignored.

    The training loop reads `requested` after every step, between the batches of an evaluation, and while it waits; if
    it is set, the loop saves, and the process leaves with `EXIT_SAVED`, so that the same command continues. Inside
    `at_once`, for work that loses nothing when it is interrupted (loading, tokenising, compiling; after the steps, if
    the last state is saved, export and answers), the first signal raises Interrupted instead, and so it does in the
    user's code that a run waits for. Inside `deferred`, within `at_once`, it again only sets `requested`.

    Python drops an exception that is raised during a finaliser or a callback of the garbage collector; the signal is
    then sent again. On exit, the previous handlers are restored. Outside of the main thread, where Python allows no
    signal handlers, the context does nothing and `requested` stays False.

    Attributes:
      signals: the three signals.
      requested: whether a signal has arrived; it stays True after the context.
      signal_name: the name of the first signal, such as "SIGTERM"; None before it.
      saying: what follows a signal now, for the line that it prints.
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
        """Installs the signal handlers and the hook for dropped exceptions, and returns this object; in another thread
        than the main one, it installs nothing."""
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._handle) for number in handled(self.signals)}
            self._hook, sys.unraisablehook = sys.unraisablehook, self._send_again
            self._open_wakeup()
        return self

    def __exit__(self, *exc) -> None:
        """Restores the handlers and the hook that were there before, and drops a signal that was to be sent again. An
        exception (`exc`) passes."""
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
        if (other := signal.set_wakeup_fd(write, warn_on_full_buffer=False)) != -1:  # of somebody else, who needs it
            signal.set_wakeup_fd(other, warn_on_full_buffer=False)
            os.close(read)
            os.close(write)
            self._wakeup = None

    def arrived(self) -> bool:
        """Whether a signal has arrived, even if the main thread has not come to handle it. For other threads."""
        if self.requested or self._wakeup is None:
            return self.requested
        with contextlib.suppress(OSError):  # BlockingIOError: there is none
            for number in os.read(self._wakeup[0], 4096):
                if number in self._old and not self.requested:
                    self.requested, self.signal_name = True, signal.Signals(number).name
        return self.requested

    def insist(self) -> None:
        """Has the handler raise once more in the user's code that went on after a signal. For other threads."""
        if self.signal_name is not None:
            self._insisted += 1
            signal.pthread_kill(threading.main_thread().ident or 0, signal.Signals[self.signal_name])

    @contextlib.contextmanager
    def announced(self, saying: str) -> Iterator[None]:
        """A context in which `saying` is what follows a signal."""
        before, self.saying = self.saying, saying
        try:
            yield
        finally:
            self.saying = before

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """A context in which a signal raises Interrupted; a signal that arrived before it raises on entering. It is for
        work that loses nothing, such as loading, compiling and export."""
        with self._mode(True):
            yield

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """A context in which a signal only sets `requested`, for the steps of a run, which are saved after it.
        Trainer.train enters it, because the train command is within `at_once`. If this context is within an `at_once`,
        the signal raises Interrupted when this context ends without an exception."""
        with self._mode(False):
            yield

    @contextlib.contextmanager
    def _mode(self, raises: bool) -> Iterator[None]:
        """A context in which signals raise Interrupted (`raises` is True), or only set `requested` (False). If signals
        raise in it and one has already arrived, entering it raises; if they raise outside of it, leaving it without an
        exception does. `at_once` and `deferred` are this context."""
        before, self._raises = self._raises, raises
        try:
            self._raise_pending()
            yield
        finally:
            self._raises = before
        self._raise_pending()

    def _raise_pending(self) -> None:
        """Raises Interrupted if a signal has arrived and the present context is one in which signals raise, when the
        context changes (`_mode`) or a signal is sent again."""
        if self._raises and self.requested:
            raise Interrupted(self.signal_name)

    def _send_again(self, unraisable: sys.UnraisableHookArgs) -> None:
        """The sys.unraisablehook within the context: Python calls it about an exception that it drops, as in a
        finaliser. If that is an Interrupted, which the first signal raised within `at_once`, the signal would have no
        effect, so it is sent again after 0.05 s. Other exceptions go to the previous hook. unraisable: has the
        exception (exc_value)."""
        if not isinstance(unraisable.exc_value, Interrupted):
            assert self._hook is not None
            self._hook(unraisable)
            return
        number = signal.Signals[str(unraisable.exc_value)]
        self._again = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), number))  # after the finaliser has ended
        self._again.daemon = True
        self._again.start()

    def _handle(self, number: int, frame: object) -> None:
        """The handler of all three signals: the class says what the first and the second one do."""
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
    """The signals among `numbers` that should get a handler: all except a SIGHUP that is ignored, as under nohup, so
    that it stays ignored. StopSignal and the launch command install their handlers for these."""
    return [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


def _write(text: str) -> None:
    """Writes a text to stderr without buffers, because it is called in signal handlers. Errors are ignored, as the
    terminal may be gone."""
    # It does not use print, because the handler may interrupt a print, and buffered streams are not reentrant.
    with contextlib.suppress(OSError):  # the terminal may be gone; the signal counts all the same
        os.write(2, text.encode())
