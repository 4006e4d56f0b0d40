"""Spares Python's garbage collector work."""

from __future__ import annotations

import contextlib
import gc

# Python freezes some hundred objects of its own when it starts; a caller who freezes has frozen far more.
_FROZEN_BY_PYTHON = 2_000
_SELDOM = 20_000
_depth = 0  # how many contexts have been entered and not left
_rests: tuple[int, int, int] | None = None  # the thresholds before `rest_while_importing`
_frozen = 0  # objects that `imported` froze, and Python
_looked: int | None = None  # `_promotions` at the last `settle`; None: a look at all is due


def rest_while_importing() -> None:
    """No garbage collection until `imported`, in a process that runs nothing else: what modules make stays. A module
    may disable collections meanwhile, or set thresholds, for good.
    """
    global _rests
    if gc.isenabled() and gc.get_threshold()[0] > 0:
        _rests = gc.get_threshold()
        gc.set_threshold(0, *_rests[1:])


def imported() -> None:
    """Ends `rest_while_importing`; collections skip what there is by now. Does nothing without it."""
    global _rests, _frozen
    if _rests is not None:
        gc.freeze()
        _frozen = gc.get_freeze_count()
        if gc.get_threshold()[0] == 0:
            gc.set_threshold(*_rests)
        _rests = None


def collect_seldom() -> None:
    """Garbage collections of a process start at 20,000 new objects, not 700: JAX calls Python at each, which is a tenth
    of the time in which a command imports, traces and plans. Arrays in cycles that nothing reaches live longer.
    """
    global _rests
    if _rests is not None:
        _rests = max(_rests[0], _SELDOM), *_rests[1:]
        return
    young, *older = gc.get_threshold()
    if 0 < young < _SELDOM:
        gc.set_threshold(_SELDOM, *older)


def _is_ours() -> bool:
    """Whether no `frozen_heap` is entered, and the caller has frozen no objects, which Python counts one by one."""
    return _depth == 0 and gc.get_freeze_count() <= (_frozen or _FROZEN_BY_PYTHON)


def _promotions() -> int:
    """Collections after which an object may be of the oldest generation."""
    return sum(generation["collections"] for generation in gc.get_stats()[1:])


def settle() -> None:
    """For a thread that waits anyway: looks for garbage, a tenth of a second and more after tracing, so that the next
    `frozen_heap` need only look at what is younger.
    """
    global _looked
    if _looked != _promotions() and _is_ours():
        gc.collect()
        _looked = _promotions()


def unsettle() -> None:
    """At the start of a run: what an earlier one left may be of the oldest generation."""
    global _looked
    _looked = None


@contextlib.contextmanager
def frozen_heap():
    """A context whose garbage collections skip objects that exist at its start: after compiling several hundred
    thousand, which a full collection in a step would visit. Does nothing in a nested context, or if the caller has
    frozen objects.
    """
    global _depth, _frozen, _looked
    is_ours = _is_ours()
    _depth += 1
    try:
        if not is_ours:
            yield
            return
        gc.collect(1 if _looked == _promotions() else 2)
        _looked = None
        gc.freeze()
        try:
            yield
        finally:
            gc.unfreeze()
            _frozen = 0
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
