"""What .ci/run starts and how it ends, with a stand-in for make."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scripts.full_tests import counts
from scripts.sizes import CLASS_LINES, FUNCTION_LINES, large

ROOT = Path(__file__).resolve().parent.parent
SUITES = ["aot", "golden", "parity", "test"]
MAKE = """#!/bin/sh
echo "$1" >> "$HERE/calls"
report=$(expr "$*" : '.*--junit-xml=\\([^ ]*\\)')
outcome=''
[ "$1" != "$FAILS" ] || outcome='<failure>why it fails</failure>'
[ "$1" != "$SKIPS" ] || outcome='<skipped message="no such thing"/>'
[ -z "$report" ] || echo "<testsuite><testcase classname='t' name='a'>$outcome</testcase></testsuite>" > "$report"
[ "$1" != "$FAILS" ]
"""


@pytest.fixture
def ci(tmp_path):
    """Runs .ci/run with a suite that fails or skips a test: (exit status, suites that ran, what it printed)."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / "scripts").mkdir()
    scripts = (f"scripts/{name}.py" for name in ("card_age", "check_skips", "show_failures"))
    for name in (".ci/run", ".ci/allowed_skips.txt", *scripts):
        shutil.copy(ROOT / name, tmp_path / name)
    for name, text in (
        ("stand_ins/make", MAKE),
        ("stand_ins/chromium", "#!/bin/sh\n"),
        (".venv/bin/python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'),
    ):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)

    def run(fails: str = "", skips: str = "") -> tuple[int, list[str], str]:
        env = os.environ | {"HERE": str(tmp_path), "FAILS": fails, "SKIPS": skips}
        env |= {"JAXTUNE_CI_CACHE": str(tmp_path / "cache"), "PATH": f"{tmp_path / 'stand_ins'}:{os.environ['PATH']}"}
        done = subprocess.run([tmp_path / ".ci" / "run"], env=env, capture_output=True, text=True, timeout=600)
        calls = (tmp_path / "calls").read_text().split()
        return done.returncode, sorted(call for call in calls if call in SUITES), done.stdout + done.stderr

    return run


def test_each_suite_runs_once(ci):
    status, suites, printed = ci()
    assert (status, suites) == (0, SUITES), printed


def test_a_failure_ends_no_other_suite_and_is_shown_last(ci):
    status, suites, printed = ci(fails="parity")
    assert (status, suites) == (1, SUITES)
    assert printed.endswith("---- parity: t.a\nwhy it fails\nfailed: parity\n")


def test_a_skip_that_no_list_allows_fails(ci):
    status, _, printed = ci(skips="golden")
    assert status == 1 and "not allowed: t.a: no such thing" in printed and "failed: skipped tests" in printed


def test_the_readmes_test_command_is_a_suite_of_it():
    """`make test`, which .ci/run gives as `suite test`."""
    command = re.search(r"^make (\w+) +#", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    assert command and re.search(rf"^suite {command[1]} \d", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.M)


def test_hosted_jobs_run_the_same_targets():
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"].values()
    commands = [step["run"].split() for job in jobs for step in job["steps"] if "run" in step]
    assert {command[0] for command in commands} == {"make"}
    assert {target for command in commands for target in command[1:]} == {"types", "docs", "lint", *SUITES} <= targets


def test_the_tests_of_a_report_are_counted(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite tests="9" failures="2" errors="1" skipped="3"/></testsuites>')
    assert counts(report) == {"passed": 3, "failed": 3, "skipped": 3}


def test_large_definitions_are_listed_by_their_code():
    body = "    x = 1\n"
    assert [*large(f"def f():\n{body * (FUNCTION_LINES - 1)}")] == []
    words = '    """Words."""\n\n    # words\n'
    assert [*large(f"def f():\n{words}{body * FUNCTION_LINES}")] == [(1, "function f", FUNCTION_LINES + 1)]
    assert [*large(f"class A:\n{body * CLASS_LINES}")] == [(1, "class A", CLASS_LINES + 1)]


CASES = """
import pytest

@pytest.mark.parametrize("b", [1, 2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("a", [1, 2])
def test_many(a, b): ...

@pytest.mark.full
@pytest.mark.parametrize("a", [1, 2])
def test_costly(a): ...

def test_one(): ...
"""


def test_ci_runs_one_unmarked_case_of_each_test(tmp_path):
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_collection_modifyitems\n")
    (tmp_path / "test_cases.py").write_text(CASES)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-c", os.devnull]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def collected(*arguments: str) -> list[str]:
        line = [*command, "--rootdir", str(tmp_path), *arguments, "test_cases.py"]
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        return re.findall(r"^test_cases.py::(\S+)$", done.stdout, re.M)

    assert len(collected()) == 9
    many, one = collected("-m", "not full")
    assert many in ("test_many[1-1]", "test_many[1-2]", "test_many[2-1]", "test_many[2-2]") and one == "test_one"
    assert collected("-m", "not full") == [many, one]
