"""Print what failed in pytest runs, from their JUnit files, so that it stands at the end of a long output.

    python scripts/show_failures.py REPORT.xml ...

Of each failed test the end of its traceback and of what it printed is shown. A report that is missing or incomplete,
because its run was killed, is named too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

_LINES = 60  # of a test's traceback and output, the last ones


def failures_of(report: Path) -> Iterator[tuple[str, str]]:
    """(test id, its traceback or the reason) for each failed test of a JUnit report."""
    try:
        cases = ElementTree.parse(report).iter("testcase")
    except (OSError, ElementTree.ParseError) as error:
        yield report.name, f"the report cannot be read: {error}"
        return
    for case in cases:
        name = f"{case.get('classname', '')}.{case.get('name', '')}".strip(".")
        for found in (*case.iter("failure"), *case.iter("error")):
            yield name, found.text or found.get("message") or "no reason is given"


def main(reports: list[str]) -> int:
    for report in map(Path, reports):
        for name, text in failures_of(report):
            print(f"---- {report.stem}: {name}")
            print("\n".join(text.splitlines()[-_LINES:]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
