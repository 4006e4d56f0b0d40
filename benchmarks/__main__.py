"""Makes the records of the named parts again, on the GPU of this machine. (Steps: `python -m benchmarks.compare`.)

    python -m benchmarks FOLDER PART ...
    python -m benchmarks --list

Every part is a process of its own with a time limit, and one that fails costs only itself. What it prints goes to
FOLDER/logs/PART.log. A figure of a kernel or of memory that falls below its floor, or below 0.97 of the record of this
device in benchmarks/results, is named, and the exit status is 1. Where there is no git checkout, JAXTUNE_COMMIT names
the commit.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.cases import PARTS
from benchmarks.record import RESULTS

ROOT = Path(__file__).resolve().parents[1]
_WORSE = 0.97


def worse(record: dict, stored: dict) -> list[str]:
    """What fell below its floor, or behind the stored record of the same device."""
    before = {row["what"]: row["value"] for row in stored.get("must_show", ()) if stored["device"] == record["device"]}
    found = []
    for row in record.get("must_show", ()):
        what, value, floor, at_most = (row[key] for key in ("what", "value", "floor", "at_most"))
        if floor is not None and (value > floor if at_most else value < floor):
            found.append(f"{what}: {value:.3g}, {'at most' if at_most else 'at least'} {floor:g} is asked")
        old = before.get(what)
        if old and (value * _WORSE > old if at_most else value < old * _WORSE):
            found.append(f"{what}: {value:.3g}, was {old:.3g}")
    return found


def run(name: str, folder: Path) -> list[str]:
    """Runs a part; what is wrong with it."""
    part, log = PARTS[name], folder / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    arguments = part.arguments.format(folder=folder, data=os.environ.get("JAXTUNE_TEST_DATA", ""))
    begun = time.time()
    with log.open("w", encoding="utf-8") as file:
        command = [sys.executable, *shlex.split(arguments)]
        try:
            subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, timeout=part.seconds, check=True)
        except subprocess.CalledProcessError as error:
            return [f"exit status {error.returncode}; the end of {log}:", *log.read_text("utf-8").splitlines()[-15:]]
        except subprocess.TimeoutExpired:
            return [f"not done after {part.seconds:g} s; see {log}"]
    problems = []
    for path in folder.glob("*.json"):
        if path.stat().st_mtime >= begun:
            stored = RESULTS / path.name
            before = json.loads(stored.read_text(encoding="utf-8")) if stored.is_file() else {}
            problems += worse(json.loads(path.read_text(encoding="utf-8")), before)
    return problems


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(argv)
    if options.list:
        print("\n".join(f"{name:17} at most {part.seconds:.0f} s: {part.arguments}" for name, part in PARTS.items()))
        return 0
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: known are {', '.join(PARTS)}")
    if not options.parts:
        parser.error("FOLDER and at least one PART are needed; --list shows the parts")
    failed = False
    for name in options.parts:
        begun = time.monotonic()
        problems = run(name, options.folder.resolve())
        failed |= bool(problems)
        print("\n  ".join([f"{name}: {time.monotonic() - begun:.0f} s", *problems]), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
