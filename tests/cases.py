"""Essential cases and further ones: what always runs, and what runs as long as there is time.

    JAXTUNE_CASES=essential python -m pytest tests -p tests.cases
    JAXTUNE_CASES=further JAXTUNE_CASES_UNTIL=$(($(date +%s) + 600)) python -m pytest tests -p tests.cases

One case of each test is essential: of the n-th test of a file its n-th case, counted around, so that the tests of a
file take different families, kernels and commands. But a costly test has further cases only: one that costs.json tells
(see costs.py), or that is marked with `pytest.mark.further` because others show its rule at less cost. A file of which
nothing would be left keeps the cheapest of its tests, and `pytest.mark.essential` keeps a costly test whose rule no
cheaper one shows. With JAXTUNE_CASES=essential, further cases are deselected; with
JAXTUNE_CASES=further, essential ones are, and cases that would begin after $JAXTUNE_CASES_UNTIL (seconds since 1970)
are skipped with REASON. Without the variable all run.

Of the further cases those of the cheapest files come first. Those that are never remembered (tests/remembered.py) come
last, in an order that changes from day to day.

.ci/run runs both, one after the other, because on a machine that has compiled nothing before all cases take longer than
a change should wait. With tests/remembered.py, the next run on that machine goes on with the cases that were skipped.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from collections.abc import Collection, Iterable, Mapping

import pytest

from tests import costs, remembered

REASON = "the time for further cases is over"


def essential_cases(
    cases: Iterable[tuple[str, str, str]], costly: Mapping[str, float], further: Collection[str] = ()
) -> set[str]:
    """The identifiers of the cases that always run.

    Args:
      cases: (a file, a test of it, the identifier of one of its cases), in the order of collection.
      costly: what costly tests cost. further: the identifiers of cases that are marked so.
    """
    files: dict[str, dict[str, list[str]]] = {}
    for file, test, case in cases:
        files.setdefault(file, {}).setdefault(test, []).append(case)
    chosen = set()
    for tests in files.values():
        of_file = {}
        for number, (test, own) in enumerate(tests.items()):
            open_cases = [case for case in own if case not in further]
            if open_cases:
                of_file[test] = open_cases[number % len(open_cases)]
        cheap = [test for test in of_file if test not in costly]
        chosen |= {of_file[test] for test in cheap or sorted(of_file, key=lambda test: costly[test])[:1]}
    return chosen


def in_order(items: list[pytest.Item], costly: Mapping[str, float], day: int) -> list[pytest.Item]:
    """Further cases file by file, those of cheap files first, and last those that are never remembered."""
    never = {id(item) for item in items if remembered.never(item)}
    of_files: dict[str, list[pytest.Item]] = {}
    for item in items:
        if id(item) not in never:
            of_files.setdefault(item.nodeid.split("::")[0], []).append(item)
    files = sorted(
        of_files.values(),
        key=lambda own: sum(costly.get(costs.name_of(item.nodeid), 0.0) for item in own) / len(own),
    )
    files = files[0::2] + files[1::2]  # the two processes of a run begin with a half each
    last = [item for item in items if id(item) in never]
    last.sort(key=lambda item: zlib.crc32(f"{day} {item.nodeid}".encode()))
    return [item for own in files for item in own] + last


class Plugin:
    """Selects the essential cases or the further ones, and skips those that would begin after `until`."""

    def __init__(self, further: bool, until: float):
        self.further, self.until = further, until

    @pytest.hookimpl(tryfirst=True)  # before remembered tests are taken away, so that these change no choice
    def pytest_collection_modifyitems(self, config, items):
        cases = [(item.nodeid.split("::")[0], costs.name_of(item.nodeid), item.nodeid) for item in items]
        marked = {item.nodeid for item in items if "further" in item.keywords}
        kept = {costs.name_of(item.nodeid) for item in items if "essential" in item.keywords}
        costly = {test: seconds for test, seconds in costs.recorded().items() if test not in kept}
        essential = essential_cases(cases, costly, marked)
        chosen = [item for item in items if self.further != (item.nodeid in essential)]
        # A suite without further cases runs one test, so that its report is never empty.
        chosen = chosen or items[:1]
        kept = {id(item) for item in chosen}
        others = [item for item in items if id(item) not in kept]
        if others:
            config.hook.pytest_deselected(items=others)
        # All processes of a run must have one order, so the day is not that of a clock.
        day = 0 if math.isinf(self.until) else int(self.until // 86400)
        items[:] = in_order(chosen, costs.recorded(), day) if self.further else chosen

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        if time.time() > self.until:
            pytest.skip(REASON)


def pytest_configure(config):
    mode = os.environ.get("JAXTUNE_CASES")
    if mode not in (None, "essential", "further"):
        raise pytest.UsageError(f"JAXTUNE_CASES={mode}: essential or further")
    if mode:
        until = float(os.environ.get("JAXTUNE_CASES_UNTIL") or "inf") if mode == "further" else math.inf
        config.pluginmanager.register(Plugin(mode == "further", until))
