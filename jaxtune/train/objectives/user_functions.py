"""Functions of the user's code, such as rewards and tools: loading one that a recipe names as file.py:name
(`load_from_file`), choosing its `arguments`, telling whether it is async (`is_async`, by what `called` returns), and
calling it in another thread, so that the run can stop waiting for it (`EventLoop`, `in_thread`). `in_words` makes text
of what it raised."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from pathlib import Path

from jaxtune.train.config import ConfigError


def load_from_file(name: str, key: str) -> Callable:
    """The function or class that a recipe names as `file.py:name`, a reward function, a tool, a factory of environments
    or a rollout function. Each call runs the file anew, as the module jaxtune_user_FILE (FILE: the file's name without
    .py), which dataclasses and pickle look up in sys.modules.

    Args:
      name: the name; a relative path is looked for in the current folder, as the recipe's other paths are.
      key: the config key that has the name, for errors.
    Raises:
      ConfigError: the name has another form, there is no such file or function, or running the file raises an
        exception.
    """
    path, separator, wanted = name.rpartition(":")
    if not separator:
        raise ConfigError(f"{key}: {name!r} must be file.py:name, a Python file and what it defines")
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{key}: {name!r}: there is no file {file}")
    spec = importlib.util.spec_from_file_location(f"jaxtune_user_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise ConfigError(f"{key}: {file} does not run: {in_words(error)}") from error
    found = getattr(module, wanted, None)
    if not callable(found):
        own = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise ConfigError(f"{key}: {file} has no function {wanted!r}; it has {', '.join(own) or 'none'}")
    return found


def called(function: Callable) -> Callable:
    """Returns what a call of `function` runs: the function or method itself, or the method __call__ of any other
    callable object. Only that method shows whether a callable object is async; `is_async` looks at it.
    `EventLoop.start` calls the result for an async function. Nothing is called here."""
    return function if inspect.isroutine(function) else function.__call__


def is_async(function: Callable) -> bool:
    """Whether a function is `async def`, or a callable object has such a method __call__, so that calling it returns a
    coroutine, which an event loop must run. A functools.partial of an async function counts as not async. Rewards and
    tools are called by it in an event loop or in a thread."""
    return inspect.iscoroutinefunction(called(function))


def arguments(function: Callable, given: Mapping[str, object]) -> dict[str, object]:
    """The keyword arguments with which to call a user's function, so that it may leave out those that it does not need:
    the entries of `given`, {name: value}, that are names of its parameters, or all if it has **parameters. Reward
    functions and the `reset` of environments are called so, but not tools."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(given)
    return {name: value for name, value in given.items() if name in {parameter.name for parameter in parameters}}


def in_words(error: BaseException | None) -> str:
    """An exception as the text "Type: message", for error messages; "unknown" if `error` is None."""
    return "unknown" if error is None else f"{type(error).__name__}: {error}"


class EventLoop:
    """A context manager with an asyncio event loop in a daemon thread. In it, reward functions and tools of the user's
    code run while the run's own thread waits for the results, so that a call can time out; those that are not async get
    threads of their own."""

    def __enter__(self) -> EventLoop:
        """Starts the event loop in its thread, and returns this object."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="user's functions", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stops the event loop; calls that still run, in it or in threads, are not waited for."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def run(self, coroutine: Coroutine) -> Future:
        """Runs a coroutine in the event loop, and returns at once the future of its result or exception. It may be
        called from any thread, while the context is open. Sampling with tools calls `Tools.answer` by it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def start(self, function: Callable, given: Mapping[str, object]) -> Future:
        """Calls a function with the keyword arguments `given`, and returns at once the future of what it returns or
        raises: an async function runs in the event loop, any other in a new daemon thread, so that the run can stop
        waiting for it. If a function does not take these arguments, the future has the TypeError. RewardFunctions calls
        reward functions by it; tools are called in `Tools._called`."""

        async def call() -> object:
            """Calls the async function in the event loop, so that an error of the call itself is the future's too."""
            return await awaited(called(function)(**given))

        return self.run(call()) if is_async(function) else in_thread(function, given)


async def awaited(coroutine: Awaitable[object]) -> object:
    """Awaits a coroutine of the user's code in the event loop, and returns its result. A SystemExit in it, which would
    end the event loop's thread, is raised as a RuntimeError; `in_thread` does the same. Async reward functions and
    async tools are called by it."""
    try:
        return await coroutine
    except SystemExit as error:
        raise RuntimeError(in_words(error)) from error


def in_thread(function: Callable, given: Mapping[str, object]) -> Future:
    """Calls a function that is not async, with the keyword arguments `given`, in a new daemon thread, and returns at
    once the future of its result or exception, which cannot be cancelled. A thread of an executor would keep Python
    from exiting while the function runs; a daemon thread does not. Reward functions and tools that are not async are
    called by it."""
    result: Future = Future()

    result.set_running_or_notify_cancel()  # from here on nobody can cancel it, and the result can always be set

    def run() -> None:
        """Calls the user's function in the thread, and gives what it returns or raises to the future."""
        try:
            result.set_result(function(**given))
        except SystemExit as error:  # of the function, and not of the run
            result.set_exception(RuntimeError(in_words(error)))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="user's function", daemon=True).start()
    return result
