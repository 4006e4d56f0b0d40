"""Texts about exceptions of the user's code. Standard library alone."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

_OURS = (
    str(Path(__file__).resolve().parents[2]) + os.sep,
    os.path.join(sysconfig.get_path("stdlib"), "asyncio") + os.sep,
)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_FRAMES = 12  # of a traceback, the last ones


class UserCodeError(ValueError):
    """A function of the user's failed, or its result is unusable. The text has name, exception, place and traceback."""


class Elsewhere(UserCodeError):
    """An exception in a process of its own. words: as `in_words`; place: as `place`; trace: as `trace`."""

    def __init__(self, words: str, place: str = "", trace: str = ""):
        super().__init__(words)
        self.words, self.place, self.trace = words, place, trace


def in_words(error: BaseException) -> str:
    """Gives "Type: message", also of an exception whose text fails."""
    if isinstance(error, Elsewhere):
        return error.words
    try:
        text = str(error)
    except BaseException as failed:
        text = f"its text fails with {type(failed).__name__}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def place(error: BaseException) -> str:
    """Gives " (file.py, line 7)", the last frame outside of installed libraries, or ""."""
    if isinstance(error, Elsewhere):
        return error.place
    frames = [frame for frame in traceback.extract_tb(error.__traceback__, -_FRAMES) if is_users(frame.filename)]
    user_frames = [frame for frame in frames if not is_library(frame.filename)] or frames
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}, line {error.lineno})"
    return f" ({user_frames[-1].filename}, line {user_frames[-1].lineno})" if user_frames else ""


def trace(error: BaseException) -> str:
    """The traceback with its causes, without frames of jaxtune and asyncio around the user's."""
    if isinstance(error, Elsewhere):
        return error.trace
    exception = traceback.TracebackException.from_exception(error, limit=-3 * _FRAMES)
    pending: list[traceback.TracebackException | None] = [exception]
    while pending:
        if (node := pending.pop()) is not None:
            users = [frame for frame in node.stack if is_users(frame.filename)]
            node.stack[:] = (users or node.stack)[-_FRAMES:]
            pending += [node.__cause__, node.__context__]
    return "".join(exception.format()).rstrip()


def described(what: str, error: BaseException, *lines: str) -> str:
    """The text "WHAT: Type: message (file, line)", further lines, and the traceback."""
    return "\n".join([f"{what}: {in_words(error)}{place(error)}", *lines, trace(error)]).rstrip()


def is_users(file: str) -> bool:
    return not file.startswith(_OURS)


def is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES)
