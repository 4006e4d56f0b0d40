"""A pytest plugin, `-p kept_outcomes`: writes each test's outcome at once, and leaves out those that have one.

JAXTUNE_OUTCOMES names the file to add to, a JSON line a test; JAXTUNE_HAVE_OUTCOMES one of test ids, a line each.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

_WORDS = 400  # characters of a reason


class _Outcomes:
    def __init__(self, path: str) -> None:
        self.path = path
        self.open: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed" or report.nodeid not in self.open:
            if report.skipped and isinstance(report.longrepr, tuple):
                said = report.longrepr[2]
            else:
                said = "" if report.passed else str(report.longrepr)[-_WORDS:]
            self.open[report.nodeid] = (report.outcome, said)
        if report.when == "teardown":
            outcome, said = self.open.pop(report.nodeid)
            line = json.dumps({"test": report.nodeid, "outcome": outcome, "said": said})
            with open(self.path, "a", encoding="utf-8") as stream:
                stream.write(line + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that hears of all tests
        config.pluginmanager.register(_Outcomes(os.environ["JAXTUNE_OUTCOMES"]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = {*Path(os.environ["JAXTUNE_HAVE_OUTCOMES"]).read_text(encoding="utf-8").splitlines()}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = [item for item in items if item.nodeid not in done]
    count = Path(os.environ["JAXTUNE_OUTCOMES"]).with_suffix(".count")
    count.write_text(str(len(items) + len(done)), encoding="utf-8")
