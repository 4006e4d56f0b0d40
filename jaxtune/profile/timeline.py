"""Intervals of device time, in which no moment counts twice."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from jaxtune.profile.trace import COLLECTIVE, TO_DEVICE, TO_HOST, Event

TRANSFERS = (TO_HOST, TO_DEVICE, COLLECTIVE)


def charge(events: Sequence[Event]) -> None:
    """Sets every event's self_ns, in place: the ns booked on it alone, which sum to one device's busy time.

    A moment is booked on the running event that started first, because a dependent launch waits for it. A transfer gets
    only moments in which nothing else ran, nor a transfer that started before it.
    """
    compute = sorted((e for e in events if e.kind not in TRANSFERS), key=lambda e: (e.start_ns, e.end_ns))
    reached = float("-inf")
    for event in compute:
        event.self_ns = max(0.0, event.end_ns - max(event.start_ns, reached))
        reached = max(reached, event.end_ns)
    busy = union([(e.start_ns, e.end_ns) for e in compute])
    starts = [start for start, _ in busy]
    reached = float("-inf")
    for event in sorted((e for e in events if e.kind in TRANSFERS), key=lambda e: (e.start_ns, e.end_ns)):
        start = max(event.start_ns, reached)
        event.self_ns = max(0.0, event.end_ns - start - _overlap(start, event.end_ns, busy, starts))
        reached = max(reached, event.end_ns)


def union(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint intervals in order that cover the same moments."""
    out: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            if end > out[-1][1]:
                out[-1] = (out[-1][0], end)
        elif end > start:
            out.append((start, end))
    return out


def length(intervals: Sequence[tuple[float, float]]) -> float:
    """The sum of the lengths; of disjoint intervals the time that they cover."""
    return sum(end - start for start, end in intervals)


def _overlap(start: float, end: float, busy: list[tuple[float, float]], starts: list[float]) -> float:
    """How much of an interval the disjoint, ordered `busy` covers; `starts` are their starts."""
    total, index = 0.0, max(0, bisect.bisect_right(starts, start) - 1)
    while index < len(busy) and busy[index][0] < end:
        total += max(0.0, min(end, busy[index][1]) - max(start, busy[index][0]))
        index += 1
    return total


def gaps(events: Sequence[Event], start: float, end: float) -> list[tuple[float, float]]:
    """The intervals in which no event ran, in order, in ns.

    events: in any order, also beyond the interval.
    start, end: of the interval, in ns.
    """
    busy = union(
        [(max(e.start_ns, start), min(e.end_ns, end)) for e in events if e.end_ns > start and e.start_ns < end]
    )
    out, reached = [], start
    for busy_start, busy_end in busy:
        if busy_start > reached:
            out.append((reached, busy_start))
        reached = max(reached, busy_end)
    if end > reached:
        out.append((reached, end))
    return out


def find_period(names: Sequence[str]) -> int:
    """The smallest number, at most half the length, after which a sequence repeats throughout; else its length."""
    for period in range(1, len(names) // 2 + 1):
        if all(names[i] == names[i + period] for i in range(len(names) - period)):
            return period
    return len(names)
