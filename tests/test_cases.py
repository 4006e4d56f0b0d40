"""Essential cases always run; further ones run as long as there is time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import costs
from tests.cases import REASON, essential_cases, in_order

ROOT = Path(__file__).resolve().parent.parent
SUITE = """
import pytest

@pytest.mark.parametrize("n", range(5))
def test_many(n):
    assert n != FAILS

@pytest.mark.parametrize("n", range(2))
def test_two(n):
    pass

def test_one():
    pass

@pytest.mark.further
def test_costly():
    pass
"""
ESSENTIAL = {"test_many[0]", "test_two[1]", "test_one"}
FURTHER = {"test_many[1]", "test_many[2]", "test_many[3]", "test_many[4]", "test_two[0]", "test_costly"}


def cases_of(file: str, **tests: int) -> list[tuple[str, str, str]]:
    """All cases of a file's tests, by how many cases each test has."""
    return [
        (file, f"{file}::{name}", f"{file}::{name}[{case}]") for name, count in tests.items() for case in range(count)
    ]


def test_the_tests_of_a_file_take_different_cases():
    assert essential_cases(cases_of("a", one=3, two=3, three=3, four=3, five=1), {}) == {
        "a::one[0]",
        "a::two[1]",
        "a::three[2]",
        "a::four[0]",
        "a::five[0]",
    }


def test_costly_tests_are_further_ones_but_for_the_cheapest_of_a_file_without_others():
    cases = [*cases_of("a", one=2, two=2), *cases_of("b", one=2, two=2, three=1)]
    costly = {"a::one": 9.0, "b::one": 5.0, "b::two": 3.0, "b::three": 4.0}
    assert essential_cases(cases, costly) == {"a::two[1]", "b::two[1]"}
    assert essential_cases(cases, costly, {"a::two[1]", "b::two[0]", "b::two[1]"}) == {"a::two[0]", "b::three[0]"}


def test_the_record_of_costs_is_of_costly_tests_and_keeps_those_that_did_not_run():
    before = {"a::one": 9.0, "a::two": 3.0, "a::three": 4.0}
    found = {"a::two": costs.COSTLY / 2, "a::three": 5.04, "a::four": costs.COSTLY, "a::five": 0.1}
    assert costs.merged(before, found) == {"a::four": costs.COSTLY, "a::one": 9.0, "a::three": 5.0}
    assert all(seconds >= costs.COSTLY for seconds in costs.recorded().values())


class Item:
    """As much of a pytest.Item as the order needs: of a test that is remembered, or of one with a signal of its own."""

    def __init__(self, nodeid: str, never: bool = False):
        self.nodeid = nodeid
        self.path = ROOT / ("tests/faults/test_kills.py" if never else "tests/train/test_checkpoint.py")
        self.originalname = self.name = "test_killed_at_random_moments" if never else "test_nothing_there"

    def listchain(self):
        return []


def test_cheap_files_come_first_and_what_is_never_remembered_last():
    items = [Item(f"{file}::{name}") for file in "abcd" for name in ("one", "two")]
    items = [Item("a::never", never=True), *items, *(Item(f"e::never{i}", never=True) for i in range(4))]
    costly = {"a::one": 9.0, "b::one": 3.0, "d::one": 5.0}
    days = [[item.nodeid for item in in_order(items, costly, day)] for day in range(6)]
    # From the cheapest: c, b, d, a; a half each for two processes.
    assert all([node[0] for node in found[:8]] == list("ccddbbaa") for found in days)
    assert all(set(found[8:]) == {"a::never", *(f"e::never{i}" for i in range(4))} for found in days)
    assert len({tuple(found[8:]) for found in days}) > 1


def outcomes(folder, mode=None, until=None, fails=-1, text=SUITE, workers=()) -> tuple[dict[str, str], str]:
    """{test: PASSED, FAILED or SKIPPED} of a run of `text` in a process of its own, and what it printed."""
    (folder / "test_suite.py").write_text(text.replace("FAILS", str(fails)))
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "JAXTUNE_CASES"))
    }
    environment |= {"PYTHONPATH": str(ROOT)} | ({"JAXTUNE_CASES": mode} if mode else {})
    environment |= {"JAXTUNE_CASES_UNTIL": str(until)} if until is not None else {}
    command = [sys.executable, "-m", "pytest", "-v", "-rs", "-p", "tests.cases", "-p", "no:cacheprovider", *workers]
    done = subprocess.run(
        [*command, "test_suite.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    found = {}
    for line in done.stdout.splitlines():
        words = [word for word in line.split() if not word.startswith("[") or "]" not in word]
        name = next((word.split("::")[1] for word in words if word.startswith("test_suite.py::")), None)
        state = next((word for word in words if word in ("PASSED", "FAILED", "SKIPPED")), None)
        if name and state:
            found[name] = state
    return found, done.stdout + done.stderr


@pytest.mark.parametrize("workers", [(), ("-n", "2", "--dist", "worksteal")])
def test_either_mode_runs_its_cases_and_both_run_all(tmp_path, workers):
    assert set(outcomes(tmp_path, "essential", workers=workers)[0]) == ESSENTIAL
    assert set(outcomes(tmp_path, "further", workers=workers)[0]) == FURTHER
    assert set(outcomes(tmp_path, workers=workers)[0]) == ESSENTIAL | FURTHER


def test_a_costly_test_is_essential_where_it_is_marked_so(tmp_path):
    costly = tmp_path / "costly.py"
    costly.write_text(
        "from tests import costs\n"
        "costs.recorded = lambda: {f'test_suite.py::test_{name}': 9.0 for name in ('many', 'two', 'one')}\n"
    )
    assert set(outcomes(tmp_path, "essential", workers=("-p", "costly"))[0]) == {"test_many[0]"}
    marked = SUITE.replace("def test_one", "@pytest.mark.essential\ndef test_one")
    assert set(outcomes(tmp_path, "essential", text=marked, workers=("-p", "costly"))[0]) == {"test_one"}


def test_when_the_time_is_over_further_cases_are_skipped_and_no_essential_one(tmp_path):
    found, said = outcomes(tmp_path, "further", time.time() - 1)
    assert found == dict.fromkeys(FURTHER, "SKIPPED") and REASON in said
    assert outcomes(tmp_path, "essential", time.time() - 1)[0] == dict.fromkeys(ESSENTIAL, "PASSED")


def test_a_further_case_that_fails_fails_the_run(tmp_path):
    found, said = outcomes(tmp_path, "further", time.time() + 600, fails=2)
    assert found["test_many[2]"] == "FAILED" and "1 failed, 5 passed" in said


def test_a_suite_without_further_cases_is_not_empty(tmp_path):
    assert outcomes(tmp_path, "further", text="def test_one():\n    pass\n")[0] == {"test_one": "PASSED"}


def test_a_mistyped_mode_is_an_error(tmp_path):
    found, said = outcomes(tmp_path, "furthest")
    assert not found and "JAXTUNE_CASES=furthest: essential or further" in said
