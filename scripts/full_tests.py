"""Run every case of every suite, and write what came of it to benchmarks/results/full_tests.json.

    make full
    python -m scripts.full_tests [--suites test gpu-test ...] [--seconds 540] [--python PYTHON] [--workers 14] [--again]

Outcomes are kept in build/full_tests, for one commit: the next call goes on with the tests that have none, and with
--again with those that failed, too. With --python all suites run in that interpreter, otherwise each in the environment
that make sets up. `gpu-test` runs beside the others. JAXTUNE_COMMIT names the commit where there is no git checkout.
Exit status 1: a test failed, or has no outcome yet.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, commit_here, write

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "build" / "full_tests"
SUITES = ("test", "golden", "parity", "aot", "gpu-test")
_ENDS = 15.0  # seconds in which a suite that is interrupted ends


def outcomes(suite: str) -> dict[str, dict[str, str]]:
    """{test id: its line}; a test that ran twice has its last."""
    path = KEPT / f"{suite}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {line["test"]: line for line in map(json.loads, lines)}


def begin(commit: str) -> None:
    """Forget outcomes of another commit."""
    name = KEPT / "commit"
    if not name.exists() or name.read_text(encoding="utf-8") != commit:
        for path in KEPT.glob("*"):
            path.unlink()
    KEPT.mkdir(parents=True, exist_ok=True)
    name.write_text(commit, encoding="utf-8")


def start(suite: str, python: str | None, workers: int, again: bool) -> subprocess.Popen:
    have = [name for name, line in outcomes(suite).items() if not (again and line["outcome"] == "failed")]
    (KEPT / f"{suite}.have").write_text("\n".join(have), encoding="utf-8")
    words = ["make", suite, "CASES=", f"WORKERS={workers}", "PYTEST_ARGS=-p scripts.kept_outcomes --no-summary"]
    if python:
        words += ["-o", "env", "-o", "env-parity", "-o", "env-aot"]
        words += [f"{name}={python}" for name in ("PY", "PARITY_PY", "AOT_PY", "GPU_PY")]
    environment = os.environ | {
        "HYPOTHESIS_PROFILE": "full",
        "JAXTUNE_OUTCOMES": str(KEPT / f"{suite}.jsonl"),
        "JAXTUNE_HAVE_OUTCOMES": str(KEPT / f"{suite}.have"),
    }
    return subprocess.Popen(words, cwd=ROOT, env=environment, start_new_session=True)


def wait(process: subprocess.Popen, seconds: float) -> None:
    try:
        process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_ENDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def record(suites: Iterable[str]) -> dict[str, Any]:
    """Numbers of each suite; failed tests, and reasons of skips, by name."""
    made: dict[str, Any] = {}
    for suite in suites:
        lines, count = outcomes(suite).values(), KEPT / f"{suite}.count"
        numbers = collections.Counter(line["outcome"] for line in lines)
        total = int(count.read_text(encoding="utf-8")) if count.exists() else 0
        made[suite] = {
            **{name: numbers[name] for name in ("passed", "failed", "skipped")},
            "not_run": total - len(lines) if total else "all",
            "failures": {line["test"]: line["said"] for line in lines if line["outcome"] == "failed"},
            "skips": dict(collections.Counter(line["said"] for line in lines if line["outcome"] == "skipped")),
        }
    return made


def green(suites: Mapping[str, Mapping[str, Any]]) -> bool:
    return all(numbers["failed"] == 0 and numbers["not_run"] == 0 for numbers in suites.values())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=[name for name in SUITES if name != "gpu-test"])
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--python")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS / "full_tests.json")
    options = parser.parse_args(arguments)
    ends = time.monotonic() + options.seconds
    begin(commit_here())
    suites = list(options.suites)
    beside = start("gpu-test", options.python, 1, options.again) if "gpu-test" in suites else None
    for suite in suites:
        if suite != "gpu-test" and time.monotonic() < ends:
            wait(start(suite, options.python, options.workers, options.again), ends - time.monotonic())
    if beside is not None:
        wait(beside, ends - time.monotonic())
    numbers = record(suites)
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    write(options.output, {"commit": commit_here(), **machine, "suites": numbers})
    for suite, counts in numbers.items():
        print(suite, *(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped", "not_run")))
        for test, said in counts["failures"].items():
            print(f"  {test}: {said.splitlines()[-1] if said else ''}")
    return 0 if green(numbers) else 1


if __name__ == "__main__":
    sys.exit(main())
