"""The memory of this process's host: how much it may use and XLA may pin, and giving it back to the operating system
after XLA compiled in many threads: glibc keeps what each of them freed, gigabytes for an 8B model.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections.abc import Iterator
from pathlib import Path

PINNED_SHARE = 0.7  # share of the host's memory that may be pinned
# The environment variable that limits the GiB that XLA pins; its default is 64.
_PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
# Of these GiB, what loading and resuming pinned before the first step, in pieces too small for what a step pins: 2.1
# when a full 8B was resumed.
_STAGED_GIB = 3


def give_back() -> None:
    """Returns freed memory to the operating system (malloc_trim): other threads, such as a merge's, cannot reuse it.
    Does nothing with another C library.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def size_bytes() -> float:
    """Bytes of host memory that this process may use: the machine's, or the container's or job's limit. What else runs
    there is not subtracted.
    """
    return float(min([machine_bytes(), *_group_limits()]))


def machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def _group_limits() -> Iterator[int]:
    """Memory limits of this process's control groups and those around them (versions 1 and 2)."""
    lines = []
    with contextlib.suppress(OSError):  # no Linux
        lines = _OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    for line in ["0::/", "1:memory:/", *lines]:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (_GROUPS / "memory", "memory.limit_in_bytes") if controllers else (_GROUPS, "memory.max")
        group = root / path.strip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                with contextlib.suppress(OSError, ValueError):  # not limited: "max"
                    limit = int((folder / name).read_text(encoding="ascii"))
                    yield limit


def allow_pinned() -> None:
    """Lets XLA pin as much host memory as plans count on (70 %) and loading needs; its default is 64 GiB. Call it
    before JAX starts its devices, when XLA reads the environment variable. A limit there stays.
    """
    os.environ.setdefault(_PINNED_LIMIT, str(math.ceil(size_bytes() * PINNED_SHARE / 2**30) + _STAGED_GIB))


def pinned_limit_bytes() -> float:
    """Bytes that XLA lets all devices of this process pin, without what loading pins."""
    return max(int(os.environ.get(_PINNED_LIMIT, 64)) - _STAGED_GIB, 0) * 2.0**30
