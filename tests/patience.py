"""Bounds against hanging: the only clocks by which a test may fail. No machine that is right takes as long."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

SECONDS = 600.0


def wait_until(
    true: Callable[[], object],
    goes_on: Callable[[], object] = lambda: True,
    told: Callable[[], object] = lambda: "",
) -> None:
    """Waits until `true()`, as long as `goes_on()`: whether that can still come. told: what a failure tells."""
    until = time.monotonic() + SECONDS
    while not true():
        assert goes_on(), ("it ended before it became true", told())
        assert time.monotonic() < until, ("it never became true", told())
        time.sleep(0.01)


def nested(*seconds: float) -> bool:
    """Whether times are in order of which each was measured within the next."""
    return sorted(seconds) == [*seconds]


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
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            yield time.sleep(0.01)
        self.over = True

    def in_a_lock(self) -> None:
        """As a thread waits that no signal reaches, until `wake`."""
        self.over = not self._woken.wait(SECONDS)

    def wake(self) -> None:
        self._woken.set()
