"""Gives host memory back to the operating system after the XLA compiler has freed it.

Compiling runs in many threads, and glibc keeps what each of them frees: gigabytes for an 8B model. `give_back` is
called each time the programs of a train step were compiled, and before exports, which need host memory themselves.
"""

from __future__ import annotations

import contextlib
import ctypes


def give_back() -> None:
    """Gives the memory that this process has freed, but glibc still keeps, back to the operating system (malloc_trim).
    A run calls it each time the programs of its steps were compiled, and before it exports.

    glibc keeps the memory that each of the compiler's threads has freed in an arena of that thread. Other threads
    cannot use it, so what they allocate, for example in a merge, would come on top of it. With another C library the
    function does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
