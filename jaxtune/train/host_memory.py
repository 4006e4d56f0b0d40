"""Returns freed host memory to the operating system."""

from __future__ import annotations

import contextlib
import ctypes


def give_back() -> None:
    """Returns freed host memory to the operating system (glibc's malloc_trim).

    Compilers run in many threads, and glibc keeps the memory that each of them has freed in an arena of the thread:
    gigabytes after the programs of an 8B model. Allocations in other threads, such as those of a merge, would come on
    top of that. The function does nothing with another C library.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
