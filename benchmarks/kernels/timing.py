"""Times of functions that are called one after the other, with nothing between them but the queue."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import jax


def queued_ms(function: Callable, *arguments, count: int, wait: Callable = jax.block_until_ready) -> float:
    """Milliseconds of a call, of `count` queued together after one that is not timed."""
    wait(function(*arguments))
    begun = time.perf_counter()
    for _ in range(count):
        result = function(*arguments)
    wait(result)
    return (time.perf_counter() - begun) / count * 1e3


def median_ms(function: Callable, *arguments, count: int = 16, wait: Callable = jax.block_until_ready) -> float:
    """Of five `queued_ms`."""
    return round(statistics.median(queued_ms(function, *arguments, count=count, wait=wait) for _ in range(5)), 4)


def in_turns(ways: Mapping[str, Callable[[], float]], rounds: int = 5) -> dict[str, float]:
    """Median of what each of them returns, called in turns: the longer a GPU works, the slower it gets."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, measured in ways.items():
            times[name].append(measured())
    return {name: statistics.median(took) for name, took in times.items()}
