"""Exceptions of one process that the other processes of its run raise too: `described` returns a list of JSON values
that says what an exception is, with the nearest of Python's own classes in _KINDS, and `made` makes an exception of
that class from the list. processes.py sends the list as JSON from one process to another."""

from __future__ import annotations

import os

# The classes of exceptions that `made` can make; `described` takes the first one that an exception is an instance of.
_KINDS = (OSError, ValueError, TypeError, LookupError, MemoryError, RuntimeError)


def described(error: BaseException) -> list:
    """Returns what another process needs to raise an exception like `error` (`made`), as JSON values: [name of its
    class, list of the arguments of that class]. The class is the first one in _KINDS, Python's own base classes such as
    ValueError, that it is an instance of, and RuntimeError if there is none. The arguments are its message, or for an
    OSError with a number that number, its text and, if it names one, the file: the command line shows an OSError that
    names a file as a plain message, and most others with a traceback (cli.py)."""
    if isinstance(error, OSError) and error.errno is not None:
        file = [] if error.filename is None else [os.fsdecode(error.filename)]
        return [OSError.__name__, [error.errno, error.strerror or "", *file]]
    kind = next((kind for kind in _KINDS if isinstance(error, kind)), RuntimeError)
    return [kind.__name__, [str(error)]]


def made(description: list) -> Exception:
    """Returns an exception like the one that another process described as `description`, the list that `described`
    returned, for the caller to raise in this process. It is of a class in _KINDS, or of the subclass of OSError that
    Python takes for the number, such as FileNotFoundError."""
    name, arguments = description
    return next(kind for kind in _KINDS if kind.__name__ == name)(*arguments)
