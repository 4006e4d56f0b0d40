"""Limits of time of synchronous functions in this process, without SIGALRM, which is the user's."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
import time
from collections.abc import Iterator

_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2 - 9) + 9  # nobody's
_AGAIN_SECONDS = 1.0  # what swallowed the exception gets another one


class Over(BaseException):
    """Raised in a function at its limit."""


class _Limit:
    def __init__(self, seconds: float, thread: int):
        self.deadline, self.thread, self.is_on = time.monotonic() + seconds, thread, True
        self.lock, self.ended = threading.Lock(), threading.Event()


_limits: list[_Limit] = []  # of the main thread


@contextlib.contextmanager
def limit(seconds: float | None) -> Iterator[None]:
    """Raises Over, a BaseException, within it after that time and again each second until it is left, where Python code
    runs or waits. C code that keeps the GIL is not interrupted, nor any wait outside the main thread.
    """
    if seconds is None:
        yield
        return
    time_limit, is_main = _Limit(seconds, threading.get_ident()), threading.current_thread() is threading.main_thread()
    if is_main:
        if signal.getsignal(_SIGNAL) is not _raise_over:
            signal.signal(_SIGNAL, _raise_over)  # for good: one that comes late must not end the process
        _limits.append(time_limit)
    threading.Thread(target=_watch, args=(time_limit, is_main), name="limit", daemon=True).start()
    try:
        yield
    finally:
        time_limit.is_on = False
        time_limit.ended.set()
        if is_main:
            _limits.remove(time_limit)
        else:
            with time_limit.lock:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(time_limit.thread), None)


def _raise_over(*_: object) -> None:
    now_seconds = time.monotonic()
    if any(time_limit.is_on and time_limit.deadline <= now_seconds for time_limit in _limits):
        raise Over


def _watch(time_limit: _Limit, is_main: bool) -> None:
    seconds = max(0.0, time_limit.deadline - time.monotonic())
    while not time_limit.ended.wait(seconds):
        seconds = _AGAIN_SECONDS
        if is_main:
            signal.pthread_kill(time_limit.thread, _SIGNAL)
            continue
        with time_limit.lock:
            if time_limit.is_on:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(time_limit.thread), ctypes.py_object(Over))
