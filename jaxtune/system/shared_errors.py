"""Errors of one process that others raise too: what JSON can say of an exception, and the exception made from it."""

from __future__ import annotations

import os

# The classes of exceptions that can be made anew from what was said of them.
_KINDS = (OSError, ValueError, TypeError, LookupError, MemoryError, RuntimeError)


def described(error: Exception) -> list:
    """What JSON can say of an exception, for `made`: [name of its class among _KINDS, RuntimeError if it is of none;
    list of the class's arguments]. An OSError keeps its number and file, by which messages tell it from others."""
    if isinstance(error, OSError) and error.errno is not None:
        file = [] if error.filename is None else [os.fsdecode(error.filename)]
        return [OSError.__name__, [error.errno, error.strerror or "", *file]]
    kind = next((kind for kind in _KINDS if isinstance(error, kind)), RuntimeError)
    return [kind.__name__, [str(error)]]


def made(description: list) -> Exception:
    """The exception that another process described as `description`, to be raised in this one."""
    name, arguments = description
    return next(kind for kind in _KINDS if kind.__name__ == name)(*arguments)
