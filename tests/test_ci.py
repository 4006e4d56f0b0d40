"""What .ci/run starts and how it ends, with a stand-in for make."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from scripts import full_tests
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


OUTCOMES = """
import pytest

@pytest.fixture
def broken():
    yield
    raise ValueError("after it")

def test_good(): ...
def test_bad(): assert False
def test_after(broken): ...
def test_no():
    pytest.skip("no such thing")
"""


@pytest.fixture
def full(tmp_path, monkeypatch):
    """Runs a suite of tmp_path/test_it.py as `make full` runs its own: the record."""
    monkeypatch.setattr(full_tests, "KEPT", tmp_path / "kept")
    (tmp_path / "make").write_text(
        f"#!/bin/sh\nfor word; do case $word in PYTEST_ARGS=*) words=${{word#*=}};; esac; done\n"
        f'cd "{tmp_path}" && exec env PYTHONPATH="{ROOT}" "{sys.executable}" -m pytest -q -n 2 $words test_it.py\n'
    )
    (tmp_path / "make").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "")

    def run(text, *words, commit="a"):
        (tmp_path / "test_it.py").write_text(text)
        monkeypatch.setenv("JAXTUNE_COMMIT", commit)
        status = full_tests.main(["--suites", "test", "--output", str(tmp_path / "record.json"), *words])
        return status, json.loads((tmp_path / "record.json").read_text())["suites"]["test"]

    return run


def test_the_whole_suite_goes_on_where_it_was_and_says_what_failed(full):
    status, numbers = full(OUTCOMES)
    assert status == 1
    assert [numbers[name] for name in ("passed", "failed", "skipped", "not_run")] == [1, 2, 1, 0]
    assert {name.split("::")[1] for name in numbers["failures"]} == {"test_bad", "test_after"}
    assert numbers["skips"] == {"Skipped: no such thing": 1}
    fails = OUTCOMES.replace("def test_good(): ...", "def test_good(): assert False")
    mended = fails.replace("def test_bad(): assert False", "def test_bad(): ...")
    status, numbers = full(mended, "--again")
    assert [numbers[name] for name in ("passed", "failed", "skipped", "not_run")] == [2, 1, 1, 0]
    status, numbers = full(fails, commit="b")
    assert numbers["passed"] == 0 and numbers["failed"] == 3


def test_a_suite_that_runs_out_of_time_is_not_green(full, monkeypatch):
    ends = full_tests.wait

    def after_the_first(process, seconds):
        while not full_tests.outcomes("test"):
            time.sleep(0.05)
        ends(process, 0)

    monkeypatch.setattr(full_tests, "wait", after_the_first)
    status, numbers = full("import time\ndef test_a(): ...\ndef test_b(): time.sleep(600)\n")
    assert status == 1 and numbers["not_run"] == 1 and numbers["passed"] == 1
    monkeypatch.setattr(full_tests, "wait", ends)
    status, numbers = full("def test_a(): assert False\ndef test_b(): ...\n")
    assert status == 0 and numbers["passed"] == 2


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
