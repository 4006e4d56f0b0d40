"""With what the tests run."""

from __future__ import annotations

import functools
import platform
import sys
from importlib import metadata
from pathlib import Path


@functools.cache
def versions() -> str:
    """The interpreter, the system, the processor and every package that is installed."""
    found = sorted({f"{one.metadata['Name']}=={one.version}" for one in metadata.distributions()})
    return " ".join([sys.version, platform.platform(), instructions(), *found])


def instructions() -> str:
    """What the processor can do, by which XLA compiles; empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
