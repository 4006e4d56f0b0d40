"""The process of isolated functions: answers calls in its main thread until the run ends. Standard library alone, so
that it starts in hundredths of a second and has no device.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtune.system import children
from jaxtune.train.user_code import errors, modules
from jaxtune.train.user_code.iterators import listed

if TYPE_CHECKING:
    import asyncio

_runner: asyncio.Runner | None = None


def serve(descriptor: int, parent: int) -> None:
    """Answers messages from the socket `descriptor`: a number, which the answer repeats, a function's reference and
    pickled arguments (None: load it only). Dies with `parent`.
    """
    if (connection := children.attach(descriptor, parent)) is None:
        return
    functions: dict[bytes, Callable] = {}
    own = os.getpid()
    while (message := children.receive(connection)) is not None:
        number, reference, arguments = pickle.loads(message)
        answer = _answer(functions, reference, arguments)
        with contextlib.suppress(Exception):  # the function may have closed it
            sys.stdout.flush()
        if os.getpid() != own:  # a fork of the function's came back
            os._exit(0)
        children.send(connection, pickle.dumps((number, *answer)))


def _answer(functions: dict[bytes, Callable], reference: bytes, payload: bytes | None) -> tuple[bool, object]:
    """(True, pickled result) or (False, texts of the exception)."""
    try:
        if reference not in functions:
            functions[reference] = _loaded(reference)
        if payload is None:
            return True, b""
        sent, logs = pickle.loads(payload)
        logged: list[tuple[str, tuple, dict]] = []
        arguments = pickle.loads(sent) | {name: _log(name, logged) for name in logs}
        value = functions[reference](**arguments)
        if isinstance(value, Awaitable):
            value = _awaited(value)
        return True, pickle.dumps((listed(value), logged))
    except BaseException as error:
        return False, (errors.in_words(error), errors.place(error), errors.trace(error))


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
