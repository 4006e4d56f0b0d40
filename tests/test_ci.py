"""What .ci/run starts and until when, with a stand-in for make, which takes no time, and for the clock, which does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BEGAN = 1_000_000
SUITES = ["aot", "golden", "parity", "test"]
MAKE = """#!/bin/sh
echo "$1 ${JAXTUNE_CASES-} ${JAXTUNE_CASES_UNTIL-}" >> "$HERE/calls"
report=$(expr "$*" : '.*--junit-xml=\\([^ ]*\\)')
[ -z "$report" ] || echo '<testsuite><testcase classname="t" name="a"/></testsuite>' > "$report"
[ "$1 ${JAXTUNE_CASES-}" != "$FAILS" ] || [ -e "$HERE/failed" ] || { touch "$HERE/failed"; exit 1; }
"""
DATE = """#!/bin/sh
now=$(cat "$HERE/now")
echo $((now + STEP)) > "$HERE/now"
echo "$now"
"""


@pytest.fixture
def ci(tmp_path):
    """Runs .ci/run: (exit status, the calls of make with a suite's cases and limits, what it printed). step: the
    seconds from one look at the clock to the next. fails: the suite and cases that fail once."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / "scripts").mkdir()
    for name in (".ci/run", ".ci/allowed_skips.txt", "scripts/check_skips.py", "scripts/show_failures.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name, text in (
        ("stand_ins/make", MAKE),
        ("stand_ins/date", DATE),
        ("stand_ins/chromium", "#!/bin/sh\n"),
        (".venv/bin/python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'),
    ):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)

    def run(step: int, fails: str = "") -> tuple[int, list[list[str]], str]:
        (tmp_path / "now").write_text(f"{BEGAN}\n")
        env = os.environ | {"HERE": str(tmp_path), "STEP": str(step), "FAILS": fails}
        env |= {"JAXTUNE_CI_CACHE": str(tmp_path / "cache"), "PATH": f"{tmp_path / 'stand_ins'}:{os.environ['PATH']}"}
        done = subprocess.run([tmp_path / ".ci" / "run"], env=env, capture_output=True, text=True, timeout=120)
        calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
        return done.returncode, [call for call in calls if call[0] in SUITES], done.stdout + done.stderr

    return run


def of(calls: list[list[str]], cases: str) -> list[list[str]]:
    """A mode's calls by their suites, without its name."""
    return sorted([suite, *limits] for suite, mode, *limits in calls if mode == cases)


@pytest.mark.parametrize(("minutes", "until"), [(5, 6.5), (6, 18), (12, 18)])
def test_further_cases_follow_within_the_time_that_is_left(ci, minutes, until):
    """After essential cases that took so many minutes: less time where most of them were remembered."""
    status, calls, _ = ci(60 * minutes)
    assert status == 0 and of(calls, "essential") == [[suite] for suite in SUITES]
    assert of(calls, "further") == [[suite, str(BEGAN + int(until * 60))] for suite in SUITES]


def test_without_time_there_are_no_further_cases(ci):
    status, calls, said = ci(60 * 19)
    assert status == 0 and of(calls, "further") == [] and "no further case was run" in said


@pytest.mark.parametrize("cases", ["essential", "further"])
def test_a_suite_that_fails_has_a_second_try_and_is_shown(ci, cases):
    status, calls, said = ci(60, f"parity {cases}")
    assert status == 0 and f"failed at first: parity, {cases} cases" in said
    assert [call[0] for call in of(calls, cases)].count("parity") == 2 and len(calls) == 2 * len(SUITES) + 1
