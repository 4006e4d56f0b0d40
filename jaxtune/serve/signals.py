"""Signals that end the server before it serves: exit code 0, whatever it is at. Standard library alone."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SECONDS = 5.0  # for what began to be undone; a compile, which nothing interrupts, may take longer


@contextlib.contextmanager
def handled(handler) -> Iterator[None]:
    """The handler gets all signals within it; a SIGHUP that is ignored, as under nohup, stays so. Only in the main
    thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [n for n in NUMBERS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def ending_start() -> Iterator[None]:
    """A signal within it raises SystemExit(0), and five seconds later ends the process; a second one does at once, with
    128 plus its number. Others' handlers, set within it, count instead.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = False

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal came
        if came:
            leave(128 + number)
        came = True
        raise SystemExit(0)

    def watch() -> None:
        while number := theirs.recv(1):  # also while the main thread is in a call that does not return to Python
            if signal.getsignal(number[0]) is stop:
                over.wait(_SECONDS)
                if not over.is_set():
                    leave(0)

    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    over = threading.Event()
    threading.Thread(target=watch, name="jaxtune serve: signals", daemon=True).start()
    earlier = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
    try:
        with handled(stop):
            yield
    finally:
        if not came:  # else threads that compile may last longer than the main one
            over.set()
        signal.set_wakeup_fd(earlier)
        ours.close()


def leave(code: int) -> None:
    """Ends the process without waiting for its threads."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
