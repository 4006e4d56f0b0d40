"""One process of several that exchange values in every way, and prints what the service still has of it.

Usage: many_exchanges.py --coordinator=HOST:PORT --processes=N --process=I
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from jaxtune.system import ending, joining, processes

EXCHANGES = 200


def fails():
    raise ValueError("of the test")


def met(failed: bool) -> bool:
    """Which decides, where one has failed, before the others are ready."""
    future: Future[None] = Future()
    failing = failed and processes.index() == 1
    if failing or not failed:
        future.set_result(None)
    return processes.meet(future, lambda: [1] if failing else None, lambda: None, lambda: False).failed == [1]


def in_turns(fault: bool) -> None:
    with processes.one_a_host():
        if fault and processes.first():
            fails()


def written(fault: bool, by: int) -> None:
    with processes.written_by_first(Path("unused")):
        if fault and processes.index() == by:
            fails()


WAYS: dict[str, Callable[[random.Random], object]] = {
    "all_of": lambda draw: processes.all_of("x" * draw.randrange(3000)),
    "all_within": lambda draw: processes.all_within(draw.random(), 600),
    "of_first": lambda draw: processes.of_first(draw.choice([dict, fails])),
    "agree": lambda draw: processes.agree(None, draw.random() < 0.5),
    "meet": lambda draw: met(draw.random() < 0.5),
    "smallest": lambda draw: processes.smallest(draw.random()),
    "require_same": lambda draw: processes.require_same({"a": draw.choice([1, processes.index()])}, "fix"),
    "hosts": lambda draw: processes.hosts(),
    "one_a_host": lambda draw: in_turns(draw.random() < 0.5),
    "written_by_first": lambda draw: written(draw.random() < 0.5, draw.randrange(2)),
}


def main() -> int:
    given = dict(word[2:].split("=") for word in sys.argv[1:])
    joining.join(given["coordinator"], int(given["processes"]), int(given["process"]))
    draw = random.Random(0)
    order = [*WAYS, *draw.choices([*WAYS], k=EXCHANGES - len(WAYS))]
    draw.shuffle(order)
    most = 0
    for way in order:
        with contextlib.suppress(ValueError):
            WAYS[way](draw)
        most = max(most, len(processes.service_client().key_value_dir_get("jaxtune/")))
    processes.service_client().wait_at_barrier("done", 600_000)
    print("keys:", processes.service_client().key_value_dir_get("jaxtune/"), "at most", most, file=sys.stderr)
    processes.service_client().wait_at_barrier("looked", 600_000)
    ending.leave(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
