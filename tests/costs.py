"""What each test costs on a machine that has compiled nothing: the record that says which tests are essential.

    JAX_COMPILATION_CACHE_DIR=$(mktemp -d) python -m pytest tests/models -n 0 -p tests.costs

writes `costs.json` beside this file anew for the tests that ran: the processor seconds, of the test's process and of
those that it started, of each test that took COSTLY or more. Other tests are not in it. Nothing depends on its being
exact: a test that is missing there is taken for a cheap one.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("costs.json")
COSTLY = 3.0  # processor seconds


@functools.cache
def recorded() -> dict[str, float]:
    """{test without its parameters: processor seconds of its dearest case that was measured}, of costly tests alone."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def name_of(node: str) -> str:
    """A test's identifier without that of its case."""
    return node.split("[", 1)[0]


def merged(before: dict[str, float], found: dict[str, float]) -> dict[str, float]:
    """The record with what was found for the tests that ran."""
    both = before | {test: round(seconds, 1) for test, seconds in found.items()}
    return {test: seconds for test, seconds in sorted(both.items()) if seconds >= COSTLY}


class Plugin:
    def __init__(self):
        self.found: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        before = sum(os.times()[:4])
        try:
            return (yield)
        finally:
            test = name_of(item.nodeid)
            self.found[test] = max(self.found.get(test, 0.0), sum(os.times()[:4]) - before)

    def pytest_sessionfinish(self):
        FILE.write_text(json.dumps(merged(recorded(), self.found), indent=0) + "\n", encoding="utf-8")


def pytest_configure(config):
    if config.getoption("numprocesses", None):
        raise pytest.UsageError("-p tests.costs: with -n 0, because tests beside each other cost more")
    config.pluginmanager.register(Plugin())
