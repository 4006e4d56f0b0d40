"""Bounds against hanging: the only clocks by which a test may fail. No machine that is right takes as long."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

SECONDS = 600.0


def until() -> float:
    """When to give up, by time.monotonic()."""
    return time.monotonic() + SECONDS


def wait_until(
    true: Callable[[], object],
    goes_on: Callable[[], object] = lambda: True,
    told: Callable[[], object] = lambda: "",
) -> None:
    """Waits until `true()`, as long as `goes_on()`: whether that can still come. told: what a failure tells."""
    end = until()
    while True:
        may_come = goes_on()  # before the look, or it may end in between
        if true():
            return
        assert may_come, ("it ended before it became true", told())
        assert time.monotonic() < end, ("it never became true", told())
        time.sleep(0.01)


def in_order(*times: float) -> bool:
    """Whether readings of a clock are in order, or times of which each was measured within the next."""
    return sorted(times) == [*times]


class Sleep:
    """What something else must end. over: whether nothing did."""

    def __init__(self):
        self.over, self._woken = False, threading.Event()

    def __call__(self, *_: object, **__: object) -> None:
        time.sleep(SECONDS)
        self.over = True

    async def later(self, *_: object, **__: object) -> None:
        await asyncio.sleep(SECONDS)
        self.over = True

    def pieces(self) -> Iterator[None]:
        """Between short sleeps, so that Python code runs."""
        end = until()
        while time.monotonic() < end:
            yield time.sleep(0.01)
        self.over = True

    def in_a_lock(self) -> None:
        """As a thread waits that no signal reaches, until `wake`."""
        self.over = not self._woken.wait(SECONDS)

    def wake(self) -> None:
        self._woken.set()
