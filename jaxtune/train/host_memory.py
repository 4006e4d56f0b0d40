"""Host memory that was freed, and that the system does not have back yet."""

from __future__ import annotations

import contextlib
import ctypes


def give_back() -> None:
    """Returns freed host memory to the system.

    Compilers run in many threads, and glibc keeps what each of them has freed in an arena of its own: gigabytes after
    the programs of an 8B. What allocates in other threads, such as a merge, would take its memory beside that. Does
    nothing where the C library is another.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
