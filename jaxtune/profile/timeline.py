"""Intervals of device time: `charge` books each moment on one event, `union` and `length` measure when something ran,
and `gaps` finds when nothing did; the report's times are made with them. `find_period` gives the number of programs
after which a sequence of them repeats, which is a step. TRANSFERS are the kinds of events that compute can hide."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from jaxtune.profile.trace import COLLECTIVE, TO_DEVICE, TO_HOST, Event

TRANSFERS = (TO_HOST, TO_DEVICE, COLLECTIVE)


def charge(events: Sequence[Event]) -> None:
    """Sets every event's self_ns, in place: the ns that are booked on it alone, from which the report sums its times.
    They sum to the busy time of the device (`events` are those of one), because no moment counts twice.

    Events overlap when they are launched dependently or on several streams. A moment is booked on the one that started
    first among those running, because a dependent launch waits for it. A transfer (a copy over the host link, or a
    collective) gets only moments in which nothing else ran: no kernel, memset or copy within the device, and no
    transfer that started before it.
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
    """Merges (start, end) intervals, which may overlap: returns disjoint ones in order that cover the same moments,
    without those of length 0. The time in which a device was busy is the length of such a union: idle and exposed time
    are found by it. The ms of categories, scopes and kernels are not; they are sums of self_ns."""
    out: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            if end > out[-1][1]:
                out[-1] = (out[-1][0], end)
        elif end > start:
            out.append((start, end))
    return out


def length(intervals: Sequence[tuple[float, float]]) -> float:
    """The sum of the lengths of (start, end) intervals, in their unit (ns here); moments in two of them count twice, so
    the callers pass disjoint ones (`union`). It measures how long transfers ran and were exposed."""
    return sum(end - start for start, end in intervals)


def _overlap(start: float, end: float, busy: list[tuple[float, float]], starts: list[float]) -> float:
    """How many ns of the interval from `start` to `end` are covered by the intervals `busy`, (start, end) each,
    disjoint and in order; `starts` are their starts, for a binary search. `charge` takes from a transfer, by this
    number, the time in which kernels, memsets or copies within the device ran."""
    total, index = 0.0, max(0, bisect.bisect_right(starts, start) - 1)
    while index < len(busy) and busy[index][0] < end:
        total += max(0.0, min(end, busy[index][1]) - max(start, busy[index][0]))
        index += 1
    return total


def gaps(events: Sequence[Event], start: float, end: float) -> list[tuple[float, float]]:
    """The intervals (start, end) within `start` to `end` in which none of the events ran, in ns and in order. They are
    the device's idle time in a step, which the report divides into launch gaps and waits."""
    busy = union(
        [(max(e.start_ns, start), min(e.end_ns, end)) for e in events if e.end_ns > start and e.start_ns < end]
    )
    out, at = [], start
    for began, ended in busy:
        if began > at:
            out.append((at, began))
        at = max(at, ended)
    if end > at:
        out.append((at, end))
    return out


def find_period(names: Sequence[str]) -> int:
    """The smallest number, at most half its length, after which a sequence repeats throughout (a part of a last
    repetition may stand at its end); its length if there is none. names: the programs that ran, in order; the result is
    then the number of programs in a step. The reader of XPlane files calls it for every trace; steps that the program
    marked win over it only if their number divides that of the programs that ran (xplane._steps)."""
    for period in range(1, len(names) // 2 + 1):
        if all(names[i] == names[i + period] for i in range(len(names) - period)):
            return period
    return len(names)
