"""Fail when a pytest run skipped a test that no list allows.

    python scripts/check_skips.py [--allow REGEX] ALLOWED.txt REPORT.xml ...

ALLOWED.txt holds one regular expression a line (`#` begins a comment), searched in "test id: reason". The reports are
pytest's JUnit files. Expected failures (xfail) count as skips: they are tests that prove nothing.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from xml.etree import ElementTree


def skips_of(report: Path) -> tuple[list[str], int]:
    """The "test id: reason" lines of the skipped tests in a JUnit report, and the number of all tests in it."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    lines = []
    for case in cases:
        for skipped in case.iter("skipped"):
            name = f"{case.get('classname', '')}.{case.get('name', '')}".strip(".")
            lines.append(f"{name}: {skipped.get('message') or ''}")
    return lines, len(cases)


def read_allowed(path: Path) -> list[re.Pattern[str]]:
    """The regular expressions of a list of allowed skips."""
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [re.compile(line) for line in lines if line]


def main(arguments: list[str] | None = None) -> int:
    """Print what was skipped; 1 if any of it is not allowed, or if a report holds no test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allow", action="append", default=[], metavar="REGEX", help="one more allowed skip")
    parser.add_argument("allowed", type=Path)
    parser.add_argument("reports", type=Path, nargs="+")
    options = parser.parse_args(arguments)

    allowed = read_allowed(options.allowed) + [re.compile(text) for text in options.allow]
    failed = False
    for report in options.reports:
        skips, tests = skips_of(report)
        refused = [skip for skip in skips if not any(pattern.search(skip) for pattern in allowed)]
        print(f"{report.name}: {tests} tests, {len(skips)} skipped, {len(refused)} of them not allowed")
        for skip in refused:
            print(f"  not allowed: {skip}")
        if tests == 0:
            print("  no test ran")
        failed = failed or bool(refused) or tests == 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
