"""One process of a run of several whose first one fails in what the others wait for; prints what it raises.

Usage: first_fails.py --coordinator=HOST:PORT --processes=N --process=I
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from pathlib import Path

from jaxtune.system import ending, joining, processes


@contextlib.contextmanager
def told(where: str):
    """Prints the class, number and message of what is raised within, which goes no further."""
    try:
        yield
    except Exception as error:
        print(f"{where}: {type(error).__name__} {getattr(error, 'errno', None)} {error}", file=sys.stderr, flush=True)


def main() -> int:
    given = dict(word[2:].split("=") for word in sys.argv[1:])
    joining.join(given["coordinator"], int(given["processes"]), int(given["process"]))

    def refused():
        raise ValueError("data.train: no such rows")

    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out/adapter")

    with told("reading"):
        processes.of_first(refused)
    with told("no JSON"):
        processes.of_first(lambda: {1, 2})
    with told("writing"), processes.written_by_first(Path("out/adapter")):
        if processes.first():
            full()
    with told("in turns"), processes.one_a_host():
        if processes.first():
            full()
        print("entered", file=sys.stderr)
    with told("the last"), processes.written_by_first(Path("out/adapter")):
        if not processes.first():
            refused()
    assert processes.all_of(processes.index()) == [0, 1]  # they are still at the same point
    ending.leave(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
