"""Waits during which signals, the clock and the disk are still looked at.

`listening` says what looking does; every wait of a run goes through `result`, `look` or `users_code`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait

from jaxtune.system.lock_alarm import LockAlarm

logger = logging.getLogger(__name__)
_SLICE_SECONDS = 0.2
_MOST_SLICE_SECONDS = 2.0  # the most that one slice counts: in a longer one this process itself was stopped
SILENT_SECONDS = 10.0  # a longer wait, or longer code of the user's, is reported once
# From a signal until the watchdog saves in place of the main thread: in the user's code, and in work of this package
# that has no look for so long, such as a compilation.
GRACE_SECONDS, LONG_GRACE_SECONDS = 3.0, 10.0
_INSIST_SECONDS = 1.0  # between two interrupts of code that swallows them
_IDLE_SECONDS = 5.0  # after which the watchdog sleeps
HOW_TO_ISOLATE = "objective.reward_isolation=process runs rewards in a process that can be stopped"


@dataclasses.dataclass(eq=False)
class _Listener:
    look: Callable[[], None]
    arrived: Callable[[], bool]
    insist: Callable[[], None]
    leave: Callable[[BaseException], None] | None
    signalled: float | None = None  # when the watchdog first saw a signal
    insisted: float = 0.0
    thread: int = dataclasses.field(default_factory=threading.get_ident)
    lock: contextlib.AbstractContextManager = dataclasses.field(default_factory=threading.RLock)
    looking: bool = False

    def looks(self) -> None:
        with self.lock:
            if self.looking:  # a callback of a save may wait, too
                return
            self.looking = True
            try:
                self.look()
            finally:
                self.looking = False


@dataclasses.dataclass(eq=False)
class _Code:
    name: str
    began: float = dataclasses.field(default_factory=time.monotonic)


_listeners: list[_Listener] = []
_codes: list[_Code] = []
_needed: list[Future] = []
_reported: set[str] = set()
_silent: dict[str, float] = {}  # seconds after which a kind of wait is reported the next time
_alarm = LockAlarm()
_awake = threading.Event()
_watchdog: threading.Thread | None = None


@contextlib.contextmanager
def listening(
    look: Callable[[], None],
    arrived: Callable[[], bool] = lambda: False,
    insist: Callable[[], None] = lambda: None,
    leave: Callable[[BaseException], None] | None = None,
) -> Iterator[None]:
    """Within it, waits of this thread call `look` about five times a second; what it raises ends the wait.

    look: saves what is due, and raises after a signal. While synchronous user code runs, a watchdog thread calls it.
    arrived: whether a signal arrived, handled by Python or not.
    insist: interrupts user code that went on after a signal.
    leave: ends the process with what `look` raised, if user code does not return after a signal.
    """
    listener, codes = _Listener(look, arrived, insist, leave), len(_codes)
    _listeners.append(listener)
    if leave is not None:
        _wake_watchdog()
    try:
        yield
    finally:
        with listener.lock:  # a save by the watchdog ends first
            _listeners.remove(listener)
        del _codes[codes:]


def look() -> None:
    """One look, for loops that work between waits, such as a sampler's rounds."""
    if _listeners and _listeners[-1].thread == threading.get_ident():
        _listeners[-1].looks()


@contextlib.contextmanager
def needing(future: Future) -> Iterator[None]:
    """Within it, work that is in vain without the future's result ends by `raise_failed` once that has failed."""
    _needed.append(future)
    try:
        yield
    finally:
        _needed.remove(future)


class Handover[T]:
    """A result that is taken once: the future that brings it does not keep it."""

    def __init__(self, value: T):
        self._values = [value]

    def take(self) -> T:
        return self._values.pop()


def failed() -> BaseException | None:
    """Why something that is needed has failed."""
    done = [future for future in _needed if future.done() and not future.cancelled()]
    return next((error for future in done if (error := future.exception()) is not None), None)


def raise_failed() -> None:
    if (error := failed()) is not None:
        raise error


def needed[T](future: Future[T]) -> T:
    """Its result, unless what is needed beside it fails before."""
    while not wait([future], _SLICE_SECONDS).done:
        raise_failed()
    return future.result()


def result[T](
    future: Future[T], description: str, timeout_seconds: float | None = None, poll: Callable[[], None] = look
) -> T:
    """What the future returns or raises. Raises TimeoutError; `future.done()` tells it from the future's own.

    description: such as "rows of step 3", for a line after ten seconds.
    timeout_seconds: without time in which this process was stopped (Ctrl-Z); None: no limit.
    poll: called about five times a second.
    """
    waited, last, reported, kind = 0.0, time.monotonic(), False, re.sub(r"\d+", "#", description)
    while True:
        now = time.monotonic()
        waited, last = waited + min(now - last, _MOST_SLICE_SECONDS), now
        seconds = _SLICE_SECONDS if timeout_seconds is None else min(_SLICE_SECONDS, timeout_seconds - waited)
        if wait([future], max(seconds, 0.0)).done:
            return future.result()
        if seconds <= 0:
            raise TimeoutError(f"{description}: not there after {timeout_seconds} s")
        poll()
        if not reported and waited > (limit := _silent.get(kind, SILENT_SECONDS)):
            reported, _silent[kind] = True, 2 * limit  # a wait of every step is not reported at every step
            logger.warning("waiting for %s, for %.0f s now", description, waited)


def until(happened: Callable[[], bool], seconds: float, every_seconds: float = _SLICE_SECONDS) -> bool:
    """Asks again and again until it is true or the time is over; the last answer."""
    deadline = time.monotonic() + seconds
    while not (is_true := happened()) and time.monotonic() < deadline:
        look()
        time.sleep(every_seconds)
    return is_true


@contextlib.contextmanager
def users_code(name: str) -> Iterator[None]:
    """Around synchronous user code in the main thread. The first signal raises out of it, and the look at its end saves
    and raises. name: for messages.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    code = _Code(name)
    _codes.append(code)
    _wake_watchdog()
    _alarm.set(_words_of_the_lock(name), SILENT_SECONDS)
    try:
        yield
    finally:
        if code in _codes:
            _codes.remove(code)
        if _codes:
            _alarm.set(_words_of_the_lock(_codes[-1].name), SILENT_SECONDS)
        else:
            _alarm.clear()
        look()  # in place of what the signal raised, or of what the code made of it


@contextlib.contextmanager
def own_work() -> Iterator[None]:
    """Around this package's work that user code asked for, such as a save: no signal raises out of it, and the watchdog
    does not look beside it, unless a signal has waited for LONG_GRACE_SECONDS.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    codes = list(_codes)
    del _codes[:]
    _alarm.clear()
    try:
        if (listener := _last(_listeners)) is not None:
            with listener.lock:  # a look of the watchdog's ends first, and no other begins
                pass
        yield
    finally:
        _codes[:] = codes
        if codes:
            _alarm.set(_words_of_the_lock(codes[-1].name), SILENT_SECONDS)


def interruptible() -> str | None:
    """The name of the user code that a signal may raise out of now; else None."""
    codes, listeners = _codes, _listeners
    return codes[-1].name if codes and listeners and not listeners[-1].looking else None


def _words_of_the_lock(name: str) -> str:
    return (
        f"jaxtune: {name} has kept Python's lock for {SILENT_SECONDS:.0f} s. Until it returns, nothing in this process "
        f"can act: no signal, no save, no time limit. {HOW_TO_ISOLATE}"
    )


def _wake_watchdog() -> None:
    global _watchdog
    if _watchdog is None or not _watchdog.is_alive():  # it is not, in a forked process
        _watchdog = threading.Thread(target=_watch, name="watchdog", daemon=True)
        _watchdog.start()
    if not _awake.is_set():
        _awake.set()


def _watch() -> None:
    """The watchdog: does what the main thread cannot while it is in user code."""
    idle = time.monotonic()
    while True:
        time.sleep(_SLICE_SECONDS)
        now = time.monotonic()
        code, listener = _last(_codes), _last(_listeners)
        if code is not None:
            _alarm.again()
            if not _codes:  # it has ended meanwhile
                _alarm.clear()
            if now - code.began > SILENT_SECONDS and code.name not in _reported:
                _reported.add(code.name)
                logger.warning("%s has run for %.0f s", code.name, now - code.began)
        if listener is not None:
            _listen(listener, code, now)
        if code is not None or listener is not None:
            idle = now
        elif now - idle > _IDLE_SECONDS:
            _awake.clear()
            if not _codes and not _listeners:
                _awake.wait()
            idle = time.monotonic()


def _last[T](items: list[T]) -> T | None:
    return next(iter(items[-1:]), None)  # in one step: another thread may take the item away


def _listen(listener: _Listener, code: _Code | None, now: float) -> None:
    """Looks for a signal once, and leaves the wait if its grace period is over."""
    if not listener.arrived():
        if code is not None:
            _look_within(listener, code)
        return
    listener.signalled = since = listener.signalled or now
    if listener.leave is not None and now - since > (LONG_GRACE_SECONDS if code is None else GRACE_SECONDS):
        if (error := _look_within(listener, code)) is not None:
            work_name = "the work in progress" if code is None else code.name
            logger.warning("%s does not return after the signal; the run leaves without it", work_name)
            listener.leave(error)
    elif code is not None and now - max(since, listener.insisted) > _INSIST_SECONDS:
        listener.insisted = now
        listener.insist()


def _look_within(listener: _Listener, code: _Code | None) -> BaseException | None:
    """Looks in place of the main thread, while that is in `code` or in `listening`; the error that looking raised."""
    with listener.lock:  # the main thread waits for it at the end of its code
        if listener not in _listeners or (code is not None and code not in _codes):
            return None
        try:
            listener.looks()
        except BaseException as error:
            return error
    return None


class Worker:
    """A daemon thread that runs tasks in order, as a context. After an error it is joined for two seconds only: its
    task may never end.
    """

    def __init__(self, name: str):
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Worker:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self._tasks.put(None)
        self._thread.join(None if kind is None else 2.0)

    def submit[T](self, function: Callable[..., T], *arguments: object) -> Future[T]:
        """Queues a task; the future gets its result or any exception, SystemExit too. After the context has ended it
        never runs.
        """
        future: Future[T] = Future()

        def task() -> None:
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)

        self._tasks.put(task)
        return future

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
