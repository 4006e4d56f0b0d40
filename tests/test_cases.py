"""Essential cases always run; further ones run as long as there is time."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cases import REASON, further_cases

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
ESSENTIAL = {"test_many[0]", "test_many[4]", "test_two[0]", "test_two[1]", "test_one"}
FURTHER = {"test_many[1]", "test_many[2]", "test_many[3]", "test_costly"}


def test_of_each_test_the_first_and_the_last_case_are_essential():
    cases = [("a", "a[1]"), ("b", "b"), ("a", "a[2]"), ("a", "a[3]"), ("c", "c[1]"), ("c", "c[2]")]
    assert further_cases(cases) == {"a[2]"}


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


def test_when_the_time_is_over_further_cases_are_skipped_and_no_essential_one(tmp_path):
    found, said = outcomes(tmp_path, "further", time.time() - 1)
    assert found == dict.fromkeys(FURTHER, "SKIPPED") and REASON in said
    assert outcomes(tmp_path, "essential", time.time() - 1)[0] == dict.fromkeys(ESSENTIAL, "PASSED")


def test_a_further_case_that_fails_fails_the_run(tmp_path):
    found, said = outcomes(tmp_path, "further", time.time() + 600, fails=2)
    assert found["test_many[2]"] == "FAILED" and "1 failed, 3 passed" in said


def test_a_suite_without_further_cases_is_not_empty(tmp_path):
    assert outcomes(tmp_path, "further", text="def test_one():\n    pass\n")[0] == {"test_one": "PASSED"}


def test_a_mistyped_mode_is_an_error(tmp_path):
    found, said = outcomes(tmp_path, "furthest")
    assert not found and "JAXTUNE_CASES=furthest: essential or further" in said
