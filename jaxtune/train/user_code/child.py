"""The process of isolated functions: answers calls in its main thread until the run ends. Standard library alone, so
that it starts in hundredths of a second and has no device.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtune.train.user_code import errors, frames, modules

if TYPE_CHECKING:
    import asyncio

_PR_SET_PDEATHSIG = 1
_runner: asyncio.Runner | None = None


def serve(descriptor: int, parent: int) -> None:
    """Answers messages from the socket `descriptor`: a function's reference and pickled arguments (None: load it only).
    Dies with `parent`.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the run decides; SIG_IGN would pass to the function's own processes
    connection = socket.socket(fileno=descriptor)
    functions: dict[bytes, Callable] = {}
    while (message := frames.receive(connection)) is not None:
        reference, arguments = pickle.loads(message)
        frames.send(connection, _answer(functions, reference, arguments))
        sys.stdout.flush()


def _answer(functions: dict[bytes, Callable], reference: bytes, payload: bytes | None) -> bytes:
    """(True, pickled result) or (False, texts of the exception)."""
    try:
        if reference not in functions:
            functions[reference] = _loaded(reference)
        if payload is None:
            return pickle.dumps((True, b""))
        sent, logs = pickle.loads(payload)
        logged: list[tuple[str, tuple, dict]] = []
        arguments = pickle.loads(sent) | {name: _log(name, logged) for name in logs}
        value = functions[reference](**arguments)
        if isinstance(value, Awaitable):
            value = _awaited(value)
        return pickle.dumps((True, pickle.dumps((value, logged))))
    except BaseException as error:
        return pickle.dumps((False, (errors.in_words(error), errors.place(error), errors.trace(error))))


def _log(name: str, logged: list[tuple[str, tuple, dict]]) -> Callable[..., None]:
    """Stands for a function of the run: keeps its calls."""
    return lambda *arguments, **named: logged.append((name, arguments, named))


def _awaited(value: Awaitable[object]) -> object:
    import asyncio

    global _runner
    if _runner is None:
        _runner = asyncio.Runner()

    async def awaited() -> object:
        return await value

    return _runner.run(awaited())


def _loaded(reference: bytes) -> Callable:
    location = pickle.loads(reference)
    if isinstance(location, tuple):
        path, module, name = location
        return getattr(modules.module_of(Path(path), module), name)
    return location
