"""Run every case of every suite that needs no GPU, and write what came of it to benchmarks/results/full_tests.json.

    make full

It takes hours. A suite that fails does not end the run; the record holds the commit, the date, and of each suite the
numbers of tests and the minutes.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "results" / "full_tests.json"
SUITES = ("test", "golden", "parity", "aot")


def counts(report: Path) -> dict[str, int]:
    """The numbers of tests that passed, failed and were skipped, of a JUnit report."""
    suites = list(ElementTree.parse(report).iter("testsuite"))
    tests, failures, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    return {"passed": tests - failures - errors - skipped, "failed": failures + errors, "skipped": skipped}


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    commit = git("rev-parse", "HEAD") + (" and changes" if git("status", "--porcelain") else "")
    record = {"commit": commit, "date": datetime.date.today().isoformat(), "suites": {}}
    environment = os.environ | {"HYPOTHESIS_PROFILE": "full"}
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for suite in SUITES:
            report, began = Path(folder, f"{suite}.xml"), time.time()
            command = ["make", suite, "CASES=", f"PYTEST_ARGS=--junit-xml={report}"]
            status = subprocess.run(command, cwd=ROOT, env=environment).returncode
            numbers = counts(report) if report.exists() else {"failed": 1}
            record["suites"][suite] = numbers | {"minutes": round((time.time() - began) / 60, 1)}
            if status:
                failed.append(suite)
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {RECORD.relative_to(ROOT)}" + "".join(f"\nfailed: make {suite} CASES=" for suite in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
