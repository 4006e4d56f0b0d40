"""Exceptions of one process that the other processes of its run raise too, sent as JSON."""

from __future__ import annotations

import os

# The classes of exceptions that `exception_of` can make; `described` takes the first one of which it is an instance.
_KINDS = (OSError, ValueError, TypeError, LookupError, MemoryError, RuntimeError)


def described(error: BaseException) -> list:
    """[class name, arguments] of an exception like `error`, of the nearest class in _KINDS, else RuntimeError. An
    OSError keeps number, text and file, so that the command line shows a plain message.
    """
    if isinstance(error, OSError) and error.errno is not None:
        file = [] if error.filename is None else [os.fsdecode(error.filename)]
        return [OSError.__name__, [error.errno, error.strerror or "", *file]]
    kind = next((kind for kind in _KINDS if isinstance(error, kind)), RuntimeError)
    return [kind.__name__, [str(error)]]


def exception_of(description: list) -> Exception:
    """The exception that `described` described, to be raised here."""
    name, arguments = description
    return next(kind for kind in _KINDS if kind.__name__ == name)(*arguments)
