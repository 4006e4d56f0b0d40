"""Calls of the user's functions: synchronous ones in this thread, asynchronous ones in the run's event loop."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from types import FrameType

from jaxtune.system import waiting
from jaxtune.train.user_code import processes
from jaxtune.train.user_code.errors import UserCodeError
from jaxtune.train.user_code.iterators import listed
from jaxtune.train.user_code.kept_process import kept_process
from jaxtune.train.user_code.limits import Over, limit
from jaxtune.train.user_code.loop import EventLoop, Outcome, Pending, TooLong

_LATE_SECONDS = 1.0  # by which a limit that interrupts Python code may be late
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Runs:
    number = 0  # of `running`, one within another
    loop: EventLoop | None = None


@contextlib.contextmanager
def running() -> Iterator[None]:
    """The time of a run; at the end of the outermost, event loop and processes end. Outside they last until the program
    ends.
    """
    _Runs.number += 1
    try:
        yield
    finally:
        _Runs.number -= 1
        if not _Runs.number:
            close()


@atexit.register
def close() -> None:
    loop, _Runs.loop = _Runs.loop, None
    if loop is not None:
        loop.close()
    processes.end_all()


def event_loop() -> EventLoop:
    if _Runs.loop is None or not _Runs.loop.is_open:
        _Runs.loop = EventLoop()
    return _Runs.loop


def is_async(function: Callable) -> bool:
    """Whether it is `async def`, a partial of one, or an object with such a __call__."""
    call = getattr(function, "__call__", None)  # noqa: B004 (its kind is asked)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def arguments(function: Callable, given: Mapping[str, object]) -> dict[str, object]:
    """Entries of `given` that are parameters of the function; all with **parameters."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(given)
    return {name: value for name, value in given.items() if name in {parameter.name for parameter in parameters}}


def name_of(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)


def begin(
    function: Callable, given: Mapping[str, object], name: str, seconds: float | None = None, *, lists: bool = False
) -> Pending:
    """As `call`, for an asynchronous function, without the wait."""
    return event_loop().start(lambda: _awaited(function(**given), lists), name, seconds)


async def _awaited(value: Awaitable[object], lists: bool) -> object:
    return _read(await value, lists)


def _read(value: object, lists: bool) -> object:
    return listed(value) if lists else value


def call(
    function: Callable, given: Mapping[str, object], name: str, seconds: float | None = None, *, lists: bool = False
) -> Outcome:
    """Calls a function of either kind and waits. Raises only a signal's exception; the function's own is in the
    outcome, as is TooLong after `seconds` (None: no limit). given: its keyword arguments. name: for messages. lists: an
    iterator is read to its end, within the limit; one of an isolated function always is.
    """
    if is_async(function):
        return begin(function, given, name, seconds, lists=lists).outcome()
    if isinstance(function, processes.Isolated):
        try:
            return Outcome(function.within(seconds, given))
        except TimeoutError:
            return Outcome(error=TooLong(name, seconds))
        except UserCodeError as error:
            return Outcome(error=error)
    with waiting.users_code(name), kept_process(name):
        outcome = _here(lambda: _read(function(**given), lists), name, seconds)
    value = outcome.value
    if isinstance(value, Awaitable):
        return event_loop().start(lambda: _awaited(value, lists), name, seconds).outcome()
    return outcome


def _here(function: Callable[[], object], name: str, seconds: float | None) -> Outcome:
    """Calls in this thread, within `seconds` (None: no limit); only a signal's exception is raised."""
    began = time.monotonic()
    outcome = Outcome()
    with _Signals() as signals:
        try:
            with limit(seconds):
                outcome = Outcome(function())
        except Over as error:
            outcome = Outcome(error=error)
        except BaseException as error:
            if signals.raised(error):
                raise
            outcome = Outcome(error=error)
    took = time.monotonic() - began
    if seconds is not None and (isinstance(outcome.error, Over) or took > seconds):
        late = f": it ended after {took:.1f} s, as C code kept Python's lock" if took > seconds + _LATE_SECONDS else ""
        return Outcome(error=TooLong(name, seconds, late))
    return outcome


class _Signals:
    """Notes signals within it, to tell Ctrl-C's KeyboardInterrupt from a function's own."""

    def __init__(self) -> None:
        self._arrived = False
        self._before: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._handler = self._handle

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._before[number] = handler
                    signal.signal(number, self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) is self._handler:  # the function may have set another one
                signal.signal(number, handler)

    def raised(self, error: BaseException) -> bool:
        """Whether an exception is a signal's: a run's own, or a handler's."""
        ours = any(kind.__module__.startswith("jaxtune.") for kind in type(error).__mro__)
        return (ours and not isinstance(error, ValueError)) or (self._arrived and not isinstance(error, Exception))

    def _handle(self, number: int, frame: FrameType | None) -> object:
        self._arrived = True
        return self._before[number](number, frame)
