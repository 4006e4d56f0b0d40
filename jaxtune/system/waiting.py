"""Waits that hear: while a run waits for rows, answers, rewards or a disk, signals, the clock and the disk are looked
at. `listening` says what looking does, and every wait of a run goes through `result`, `look` or `users_code`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait

logger = logging.getLogger(__name__)
_SLICE_SECONDS = 0.2
_SILENT_SECONDS = 10.0  # a longer wait says once what it waits for
_looks: list[Callable[[], None]] = []


@contextlib.contextmanager
def listening(look: Callable[[], None]) -> Iterator[None]:
    """Within it, waits call `look` about five times a second; what it raises ends the wait."""
    _looks.append(look)
    try:
        yield
    finally:
        _looks.remove(look)


def look() -> None:
    """One look, for loops that have work between their waits, such as the rounds of a sampler."""
    if _looks:
        _looks[-1]()


def result[T](future: Future[T], what: str, timeout_seconds: float | None = None) -> T:
    """What the future returns or raises. what: "rows of step 3", for the line after ten seconds. Raises TimeoutError
    after `timeout_seconds`; a TimeoutError of the future's own is told from it by `future.done()`."""
    began, told = time.monotonic(), False
    while True:
        waited = time.monotonic() - began
        left = _SLICE_SECONDS if timeout_seconds is None else min(_SLICE_SECONDS, timeout_seconds - waited)
        if wait([future], max(left, 0.0)).done:
            return future.result()
        if left <= 0:
            raise TimeoutError(f"{what}: not there after {timeout_seconds} s")
        look()
        if not told and waited > _SILENT_SECONDS:
            told = True
            logger.warning("waiting for %s", what)


@contextlib.contextmanager
def users_code(name: str) -> Iterator[None]:
    """Around synchronous code of the user's in the main thread. name: of the function, for messages."""
    del name
    yield
