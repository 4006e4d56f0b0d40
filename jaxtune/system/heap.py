"""Contexts in which Python's garbage collector leaves out the objects that exist already (`frozen_heap`), in which a
run makes its steps, or does not run at all (`uncollected`), in which programs are lowered."""

from __future__ import annotations

import contextlib
import gc

# Python freezes some hundred objects of its own when it starts; a caller who freezes has frozen far more.
_FROZEN_BY_PYTHON = 2_000
_depth = 0  # how many contexts have been entered and not left


@contextlib.contextmanager
def frozen_heap():
    """A context in which garbage collections do not visit the objects that exist when it begins, after one full
    collection (gc.freeze, and gc.unfreeze at the end). After a run has compiled its programs these are several hundred
    thousand, nearly all of which live as long as the run, and a full collection in the middle of a step would visit
    each of them. It does nothing within another such context, or if the caller has frozen objects already."""
    global _depth
    _depth += 1
    try:
        # The number of frozen objects is looked at last: Python counts them one by one.
        if _depth > 1 or gc.get_freeze_count() > _FROZEN_BY_PYTHON:
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
    """A context without Python's garbage collection, which takes a fifth of the time of tracing and lowering. Tracing
    leaves few unreachable objects (20 MB in a step of 48 layers) and keeps many that each collection visits. Only
    `Engine.compile` lowers in it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
