"""Measures what is named on the GPU of this machine, and fails where something got worse.

    python -m benchmarks FOLDER NAME ... [--seconds 540] [--each 150]
    python -m benchmarks FOLDER [STEP ...] --old FOLDER [--rounds 2] [--cold] [--seconds 540] [--each 150]
    python -m benchmarks --list

A name is a train step, a part with a script of its own, or a set of either. Records go to FOLDER, in the form of
benchmarks/results, and so does what is printed, in files that end with .log; the exit status is 1 where a figure is
missing, falls below its floor, or is worse than the stored record of this device: parts at 0.97 of it, steps too.
The next call with that FOLDER goes on with the steps that have no record of this commit.
A part is a process with a time limit, and one that fails costs only itself. Where there is no git checkout,
JAXTUNE_COMMIT names the commit. `ablation` is of steps that are each without something, and says what it gains.

With --old, that folder holds an older commit's files (`git worktree add FOLDER COMMIT`, or `git archive COMMIT`
unpacked into a folder that is named COMMIT). Each step runs benchmarks/train/step.py of either side in turn, new, old,
new, old (--rounds 2), each with a process and its side's own cache of compiled programs; FOLDER/commits.json has the
ratio of the medians of tokens per second, which must be 0.995. A case that the older commit does not know fails there
and costs the seconds of that. Both sides' programs are compiled beforehand, side by side; with
--cold, by each side's first run alone instead, whose seconds are recorded (`compile_seconds_cold`). commits.json is
added to by the next call, so that several calls, each of at most --seconds, make one record.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.cases import PARTS, SETS, STEPS
from benchmarks.processes import ROOT, Call, Side, commit_of
from benchmarks.processes import wait as wait_for
from benchmarks.record import RESULTS, write

FLOORS = {"old": 0.995, "stored": 0.97}  # a stored record is of another day, and of another card of its kind
_KEPT = (
    "commit",
    "tokens_per_second",
    "predicted_tokens_per_second",
    "step_seconds",
    "step_seconds_all",
    "peak_memory_gb",
    "predicted_peak_gb",
    "compiled_peak_gb",
    "compile_seconds_cold",
    "compile_seconds_cached",
    "residuals",
    "micro_batches",
    "attention",
    "losses",
    "parts",
    "failed",
)


def worse(record: dict, stored: dict) -> list[str]:
    """What fell below its floor, or behind the stored record of the same device."""
    before = {row["what"]: row["value"] for row in stored.get("must_show", ()) if stored["device"] == record["device"]}
    found = []
    for row in record.get("must_show", ()):
        what, value, floor, at_most = (row[key] for key in ("what", "value", "floor", "at_most"))
        if floor is not None and (value > floor if at_most else value < floor):
            found.append(f"{what}: {value:.3g}, {'at most' if at_most else 'at least'} {floor:g} is asked")
        old = before.get(what)
        if old and (value * FLOORS["stored"] > old if at_most else value < old * FLOORS["stored"]):
            found.append(f"{what}: {value:.3g}, was {old:.3g}")
    return found


def run_part(name: str, folder: Path) -> list[str]:
    """What is wrong with a part, which is run and writes its record."""
    part, log = PARTS[name], folder / f"{name}.log"
    output, stored = folder / part.file, RESULTS / part.file
    with log.open("w", encoding="utf-8") as file:
        command = [sys.executable, *shlex.split(part.arguments), "--output", str(output)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
    if problem := wait_for(process, part.seconds):
        return [f"{problem}; the end of {log}:", *log.read_text("utf-8", errors="replace").splitlines()[-15:]]
    before = json.loads(stored.read_text(encoding="utf-8")) if stored.is_file() else {}
    return worse(json.loads(output.read_text(encoding="utf-8")), before)


def kept(found: dict) -> dict:
    """Of a run's record, what a comparison keeps."""
    return {key: found[key] for key in _KEPT if key in found}


def ratio(runs: list[dict], before: str = "old", after: str = "new") -> float | None:
    """Tokens per second of the side `after` over those of `before`, in the medians; None where one has none."""
    old, new = (
        [run["tokens_per_second"] for run in runs if run["side"] == side and "failed" not in run]
        for side in (before, after)
    )
    return statistics.median(new) / statistics.median(old) if old and new else None


def beside_older(
    names: list[str], sides: list[Side], facts: dict, call: Call, options: argparse.Namespace
) -> dict[str, float | None]:
    """Makes the runs that the call's record lacks; {step: ratio}.

    Raises:
      SystemExit: the file is of other commits or another device.
    """
    record = call.begun(facts | {"cases": {}, "ratios": {}})
    for key in ("device", "commit", "old_commit"):
        if record.get(key) != facts[key]:
            raise SystemExit(f"{call.output}: {key} is {record.get(key)!r} there and {facts[key]!r} here")

    def missing(name: str) -> list[tuple[int, Side]]:
        runs = record["cases"].get(name, ())
        done = {(run["round"], run["side"]) for run in runs if "failed" not in run}
        turns = itertools.product(range(1, options.rounds + 1), sides)
        return [(number, side) for number, side in turns if (number, side.name) not in done]

    wanted = [name for name in names if missing(name)]
    if not options.cold and wanted:
        call.ahead([(side, [STEPS[name] for name in wanted]) for side in sides])
    for name in wanted:
        longest = 0.0
        for number, side in missing(name):
            begun = time.monotonic()
            found = call.run(side, STEPS[name], f"{name}: {side.name} {number}", longest, options.each)
            if found is None:
                break
            longest = max(longest, time.monotonic() - begun)
            runs = [run for run in record["cases"].get(name, ()) if "failed" not in run]
            runs.append(kept(found) | {"side": side.name, "round": number})
            record["cases"][name], record["ratios"][name] = runs, ratio(runs)
            write(call.output, record)
    return {name: record["ratios"].get(name) for name in names}


def beside_stored(
    names: list[str], side: Side, device: str, call: Call, options: argparse.Namespace
) -> dict[str, float | None]:
    """Runs each step once and writes its record; {step: ratio to the stored one}, of those that have one. A step that
    an earlier call of this commit measured is not run again.

    Raises:
      SystemExit: a stored record is of another device.
    """
    stored = json.loads((RESULTS / "steps.json").read_text(encoding="utf-8"))
    for name in names:
        if name in stored and (found := stored[name]["device"]) != device:
            raise SystemExit(f"{name}: the stored record is of {found!r}, this device is {device!r}; use --old FOLDER")
    records, ratios = call.begun({}), dict.fromkeys(names)
    missing = [name for name in names if records.get(name, {}).get("commit", "")[:7] != side.commit]
    if missing and not options.cold:
        call.ahead([(side, [STEPS[name] for name in missing])])
    for name in names:
        found = call.run(side, STEPS[name], name, most=options.each) if name in missing else records[name]
        if found is None or "failed" in found:
            continue
        write(call.output, records := records | {name: found})
        if name in stored:
            ratios[name] = found["tokens_per_second"] / stored[name]["tokens_per_second"]
        else:
            del ratios[name]
        if (other := STEPS[name].beside) in records:
            gain = records[other]["tokens_per_second"] / found["tokens_per_second"] - 1
            print(f"{name}: what it is without gains {gain:+.1%}", flush=True)
    return ratios


def device_facts() -> dict:
    """Of a process that ends: this one must not hold the device's memory."""
    code = "import json; from benchmarks.record import environment; print(json.dumps(environment()))"
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": paths}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run_steps(names: list[str], options: argparse.Namespace) -> list[str]:
    """What is wrong with these steps, beside the older commit's or the stored ones."""
    facts = {"benchmark": "train/commits", **device_facts()}
    facts["commit"] = facts["commit"][:7]
    caches = Path(tempfile.mkdtemp()) if options.cold else Path(tempfile.gettempdir(), "jaxtune_benchmarks")
    new = Side("new", ROOT, facts["commit"], caches / "new")
    call = Call(options.folder / ("steps.json" if options.old is None else "commits.json"), options.seconds)
    if options.old is None:
        ratios = beside_stored(names, new, facts["device"], call, options)
    else:
        old = Side("old", options.old.resolve(), commit_of(options.old.resolve()), caches / "old")
        facts["old_commit"] = old.commit
        ratios = beside_older(names, [new, old], facts, call, options)
    floor = FLOORS["stored" if options.old is None else "old"]
    for name, found in ratios.items():
        print(f"{name}: {'no ratio' if found is None else f'{found:.4f}'}, at least {floor} is asked", flush=True)
    return [name for name, found in ratios.items() if found is None or found < floor]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of --list; default with --old: steps")
    parser.add_argument("--old", type=Path, metavar="FOLDER", help="files of the commit to compare steps with")
    parser.add_argument("--cold", action="store_true", help="nothing is compiled beforehand; compiling is timed")
    parser.add_argument("--seconds", type=float, default=540, help="that the steps of this call may take")
    parser.add_argument("--each", type=float, default=math.inf, help="seconds that one run of a step may take")
    parser.add_argument("--rounds", type=int, default=2, help="runs of either side, with --old (default: 2)")
    parser.add_argument("--list", action="store_true", help="sets, parts and steps")
    options = parser.parse_args(argv)
    if options.list:
        print("\n".join(f"{name:24} {' '.join(names)}" for name, names in SETS.items()))
        print("\n".join(f"{name:24} {case.arguments}" for name, case in {**PARTS, **STEPS}.items()))
        return 0
    given = options.names or (["steps"] if options.old else [])
    names = list(dict.fromkeys(name for one in given for name in SETS.get(one, [one])))
    if unknown := set(names) - set(PARTS) - set(STEPS):
        parser.error(f"no {', '.join(sorted(unknown))}: known are {', '.join([*SETS, *PARTS, *STEPS])}")
    if options.folder is None or not names:
        parser.error("FOLDER and at least one NAME are needed; --list shows the names")
    steps = [name for name in names if name in STEPS]
    if options.old and len(steps) < len(names):
        parser.error(f"--old compares steps, and {', '.join(set(names) - set(steps))} is none")
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    failed = bool(steps and run_steps(steps, options))
    for name in (name for name in names if name in PARTS):
        begun = time.monotonic()
        problems = run_part(name, options.folder)
        failed |= bool(problems)
        print("\n  ".join([f"{name}: {time.monotonic() - begun:.0f} s", *problems]), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
