"""What the user's functions change in the run's process, and the run needs as it was. The current folder is not among
that: a run's paths are absolute.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import jax

from jaxtune.system.terminal import say

_STREAMS = "stdout", "stderr"
_said: set[tuple[str, str]] = set()


@contextlib.contextmanager
def kept_process(name: str) -> Iterator[None]:
    """Sets back, and says once, what a function of this name changes: the streams, and JAX's 64-bit numbers."""
    streams, wide = {key: getattr(sys, key) for key in _STREAMS}, jax.config.jax_enable_x64
    try:
        yield
    finally:
        changed = [key for key, stream in streams.items() if getattr(sys, key) is not stream]
        for key in changed:
            setattr(sys, key, streams[key])
        if jax.config.jax_enable_x64 != wide:
            jax.config.update("jax_enable_x64", wide)
            _say(name, "changed jax_enable_x64, which is set back")
        for key in changed:
            _say(name, f"replaced sys.{key}, which is set back")
        for key, other in zip(_STREAMS, reversed(_STREAMS), strict=True):
            if getattr(getattr(sys, key), "closed", False):
                setattr(sys, key, getattr(sys, other))
                _say(name, f"closed sys.{key}: what the run says there goes to sys.{other}")


def _say(name: str, what: str) -> None:
    if (name, what) not in _said:
        _said.add((name, what))
        say(f"warning: {name} {what}", file=sys.stderr)
