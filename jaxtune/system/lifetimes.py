"""Ends background work with its owner, at the latest before Python ends: a device or a thread that calls back into an
interpreter that is gone aborts the process.
"""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from collections.abc import Callable

import jax

del jax  # imported because its own work at exit, registered by then, must come after that of `_end_all`
_BREATH_SECONDS = 0.02  # in which callbacks of work that has just ended get Python's lock
_ends: list[weakref.finalize] = []


def end_with(owner: object, end: Callable[..., object], *arguments: object) -> Callable[[], object]:
    """Has a cleanup run once: when the returned function is called, when its owner is freed, or when Python ends (last
    registered first).

      owner: any object that can have weak references.
      end: the cleanup.
      arguments: of `end`. Neither they nor a bound `end` may refer to the owner, which would then live until Python
        ends.
    """
    _ends[:] = [earlier for earlier in _ends if earlier.alive]
    finalizer = weakref.finalize(owner, end, *arguments)
    finalizer.atexit = False  # weakref's own comes before or after that of JAX
    _ends.append(finalizer)
    return finalizer


def _end_all() -> None:
    open_ends = [end for end in reversed(_ends) if end.alive]
    for end in open_ends:
        with contextlib.suppress(Exception):  # such as of a device that has failed
            end()
    if _ends:
        time.sleep(_BREATH_SECONDS)


# The first finalizer of a process registers weakref's work at exit, after which the call of a finalizer does nothing:
# that too must come after `_end_all`.
weakref.finalize(end_with, _end_all).detach()
atexit.register(_end_all)
