"""Limits of time of synchronous functions in this process, without SIGALRM, which is the user's."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
import time
import types
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
        while time_limit.is_on or not time_limit.ended.is_set() or time_limit in _limits:
            with contextlib.suppress(Over):  # a second one, while the first is on its way
                _end(time_limit, is_main)


def _end(time_limit: _Limit, is_main: bool) -> None:
    time_limit.is_on = False
    time_limit.ended.set()
    if not is_main:
        with time_limit.lock:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(time_limit.thread), None)
    elif time_limit in _limits:
        _limits.remove(time_limit)


def _raise_over(_: int, frame: types.FrameType | None) -> None:
    if frame is not None and frame.f_code in _LEAVING:  # where it would keep a limit from ending
        return
    now_seconds = time.monotonic()
    if any(time_limit.is_on and time_limit.deadline <= now_seconds for time_limit in _limits):
        raise Over


_LEAVING = limit.__wrapped__.__code__, contextlib._GeneratorContextManager.__exit__.__code__


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
