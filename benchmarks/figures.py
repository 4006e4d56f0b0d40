"""Runs the cases of a benchmark script, each in a process of its own, and keeps what they measured.

A case's process prints its figures as it makes them; this module adds each one to the record's file at once, so that a
case that fails, or for which no time is left, costs only itself. All processes share one cache of compiled programs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import write

ROOT = Path(__file__).resolve().parents[1]
_MARK = "FIGURE "  # begins the lines of a child's output that have a figure
LEAST_SECONDS = 20  # no case begins when less time is left


def say(name: str, value: Any) -> None:
    """Gives a figure of this process's case to its parent. value: JSON."""
    print(_MARK + json.dumps([name, value]), flush=True)


def arguments(description: str, cases: Sequence[str], unasked: str, seconds: float) -> argparse.ArgumentParser:
    """A parser of the arguments that all such scripts have.

    Args:
      description: the script's docstring.
      cases: the names of its cases.
      unasked: the case that runs only if it is named.
      seconds: the default limit of all cases together.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(cases)} (default: all but {unasked})")
    parser.add_argument("--output", required=True, help="the JSON file of the record")
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="after which no case begins, and one that runs ends"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def run(
    script: str | Path,
    options: argparse.Namespace,
    cases: Sequence[str],
    forwarded: Sequence[str] = (),
    variables: Callable[[str], Mapping[str, str]] = lambda name: {},
) -> None:
    """Runs the cases one after another and writes their figures to options.output.

    Args:
      script: the file that runs a case with `--child CASE`.
      options: what `arguments` parsed.
      cases: the names of the cases.
      forwarded: further arguments of the children.
      variables: returns variables of the environment of a case's process.
    """
    ends = time.monotonic() + options.seconds
    # This process leaves the device's memory to its children.
    probe = "import json; from benchmarks.record import environment; print(json.dumps(environment()))"
    told = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    record: dict[str, Any] = json.loads(told.stdout.splitlines()[-1]) | {"cases": {}}
    with tempfile.TemporaryDirectory() as cache:
        for name in cases:
            found = record["cases"][name] = {}
            left, began = ends - time.monotonic(), time.monotonic()
            if left < LEAST_SECONDS:
                found["failed"] = "no time was left"
                continue
            surroundings = os.environ | {"STARTED": str(time.time()), "JAX_COMPILATION_CACHE_DIR": cache}
            surroundings.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
            surroundings |= variables(name)
            command = [sys.executable, str(script), "--child", name, "--output", options.output, *forwarded]
            with subprocess.Popen(command, cwd=ROOT, env=surroundings, stdout=subprocess.PIPE, text=True) as process:
                killer = threading.Timer(left, process.kill)
                killer.start()
                for line in process.stdout or ():
                    if not line.startswith(_MARK):
                        continue
                    figure, value = json.loads(line.removeprefix(_MARK))
                    found[figure] = value
                    print(name, figure, json.dumps(value), flush=True)
                    write(options.output, record)
                code = process.wait()
            killer.cancel()
            if code:
                found["failed"] = f"exit code {code}"
                print(name, "failed:", code, flush=True)
            found["seconds_of_the_case"] = round(time.monotonic() - began, 1)
            write(options.output, record)
