"""Spares Python's garbage collector work."""

from __future__ import annotations

import contextlib
import gc

# Python freezes some hundred objects of its own when it starts; a caller who freezes has frozen far more.
_FROZEN_BY_PYTHON = 2_000
_depth = 0  # how many contexts have been entered and not left
_rests = False
_frozen = 0  # objects that `imported` froze


def rest_while_importing() -> None:
    """No garbage collection until `imported`, in a process that runs nothing else: what modules make stays."""
    global _rests
    _rests = gc.isenabled()
    gc.disable()


def imported() -> None:
    """Ends `rest_while_importing`; collections skip what there is by now. Does nothing without it."""
    global _rests, _frozen
    if _rests:
        _rests = False
        gc.freeze()
        _frozen = gc.get_freeze_count()
        gc.enable()


def collect_seldom() -> None:
    """Garbage collections of a process start at 20,000 new objects, not 700: JAX calls Python at each, which is a tenth
    of the time in which a command imports, traces and plans. Arrays in cycles that nothing reaches live longer.
    """
    young, *older = gc.get_threshold()
    if 0 < young < 20_000:
        gc.set_threshold(20_000, *older)


@contextlib.contextmanager
def frozen_heap():
    """A context whose garbage collections skip objects that exist at its start: after compiling several hundred
    thousand, which a full collection in a step would visit. Does nothing in a nested context, or if the caller has
    frozen objects.
    """
    global _depth
    _depth += 1
    try:
        # The number of frozen objects is looked at last: Python counts them one by one.
        if _depth > 1 or gc.get_freeze_count() > _frozen + _FROZEN_BY_PYTHON:
            yield
            return
        gc.collect()
        gc.freeze()
        try:
            yield
        finally:
            gc.unfreeze()
    finally:
        _depth -= 1


@contextlib.contextmanager
def uncollected():
    """A context without garbage collection, which takes a fifth of tracing and lowering and finds little (20 MB for 48
    layers).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
