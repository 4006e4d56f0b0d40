"""Gives host memory back to the operating system after XLA compiled in many threads: glibc keeps what each of them
freed, gigabytes for an 8B model.
"""

from __future__ import annotations

import contextlib
import ctypes


def give_back() -> None:
    """Returns freed memory to the operating system (malloc_trim): other threads, such as a merge's, cannot reuse it.
    Does nothing with another C library.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
