"""Essential cases and further ones: what always runs, and what runs as long as there is time.

    JAXTUNE_CASES=essential python -m pytest tests -p tests.cases
    JAXTUNE_CASES=further JAXTUNE_CASES_UNTIL=$(($(date +%s) + 600)) python -m pytest tests -p tests.cases

Of a parametrised test, the first and the last case are essential, and so is a test without parameters, unless it is
marked with `pytest.mark.further` because others show its rule at less cost. All else is a further case. With
JAXTUNE_CASES=essential, further cases are deselected; with JAXTUNE_CASES=further, essential ones are, and cases that
would begin after $JAXTUNE_CASES_UNTIL (seconds since 1970) are skipped with REASON. Without the variable all run.

.ci/run runs both, one after the other, because on a machine that has compiled nothing before all cases take longer than
a change should wait. With tests/remembered.py, the next run on that machine goes on with the cases that were skipped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import pytest

REASON = "the time for further cases is over"


def further_cases(cases: Iterable[tuple[str, str]]) -> set[str]:
    """The identifiers of all cases but the first and the last of each test.

    Args:
      cases: (a test, the identifier of one of its cases), in the order of collection.
    """
    of_tests: dict[str, list[str]] = {}
    for test, case in cases:
        of_tests.setdefault(test, []).append(case)
    return {case for of_test in of_tests.values() for case in of_test[1:-1]}


class Plugin:
    """Selects the essential cases or the further ones, and skips those that would begin after `until`."""

    def __init__(self, further: bool, until: float):
        self.further, self.until = further, until

    @pytest.hookimpl(tryfirst=True)  # before remembered tests are taken away, so that these change no choice
    def pytest_collection_modifyitems(self, config, items):
        named = further_cases((item.nodeid.split("[", 1)[0], item.nodeid) for item in items)
        chosen = [item for item in items if self.further == (item.nodeid in named or "further" in item.keywords)]
        # A suite without further cases runs one test, so that its report is never empty.
        chosen = chosen or items[:1]
        kept = {id(item) for item in chosen}
        others = [item for item in items if id(item) not in kept]
        if others:
            items[:] = chosen
            config.hook.pytest_deselected(items=others)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        if time.time() > self.until:
            pytest.skip(REASON)


def pytest_configure(config):
    mode = os.environ.get("JAXTUNE_CASES")
    if mode not in (None, "essential", "further"):
        raise pytest.UsageError(f"JAXTUNE_CASES={mode}: essential or further")
    if mode:
        until = float(os.environ.get("JAXTUNE_CASES_UNTIL") or "inf") if mode == "further" else float("inf")
        config.pluginmanager.register(Plugin(mode == "further", until))
