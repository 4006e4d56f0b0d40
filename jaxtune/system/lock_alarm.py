"""An alarm that speaks while C code holds Python's lock, when no Python thread can."""

from __future__ import annotations

import ctypes
import sys

_THREAD = 2  # SIGEV_THREAD: the function is called in a new thread, which takes no lock of Python's
_MONOTONIC = 1  # CLOCK_MONOTONIC


class _Event(ctypes.Structure):
    """Linux's sigevent: 64 bytes on 64-bit machines."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_char * 32),
    )


class _Times(ctypes.Structure):
    """itimerspec."""

    _fields_ = (
        ("interval_seconds", ctypes.c_long),
        ("interval_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


class LockAlarm:
    """Writes a text to stderr unless `again` or `clear` comes in time, by a POSIX timer that calls the C library's
    `warnx`; silent on other systems.
    """

    def __init__(self) -> None:
        self._timer: ctypes.c_void_p | None = None
        self._text = ctypes.create_string_buffer(1024)
        self._library = None
        self._nanoseconds = 0

    def set(self, text: str, seconds: float) -> None:
        """Starts the alarm: `text` (at most 1,023 bytes) after `seconds`, counted from now or from the last `again`."""
        if self._library is None and not self._make():
            return
        encoded = text.encode("utf-8", "replace").replace(b"%", b"%%")[:1023]
        halved = (len(encoded) - len(encoded.rstrip(b"%"))) % 2  # a cut may leave one sign of two, which warnx reads
        self._text.value = encoded[: len(encoded) - halved]
        self._nanoseconds = int(seconds * 1e9)
        self._start(self._nanoseconds)

    def again(self) -> None:
        """Restarts the time, if the alarm is set."""
        if self._nanoseconds:
            self._start(self._nanoseconds)

    def clear(self) -> None:
        """Stops the alarm."""
        self._nanoseconds = 0
        if self._timer is not None:
            self._start(0)

    def _make(self) -> bool:
        """Makes the timer; False where there is none (another system, or no resources)."""
        self._library = ctypes.CDLL(None)
        if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) != 8:
            return False
        function = ctypes.cast(self._library.warnx, ctypes.c_void_p)
        event = _Event(ctypes.addressof(self._text), 0, _THREAD, function.value)
        timer = ctypes.c_void_p()
        if self._library.timer_create(_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) == 0:
            self._timer = timer
        return self._timer is not None

    def _start(self, nanoseconds: int) -> None:
        if self._timer is None or self._library is None:
            return
        times = _Times(0, 0, *divmod(nanoseconds, 1_000_000_000))
        self._library.timer_settime(self._timer, 0, ctypes.byref(times), None)
