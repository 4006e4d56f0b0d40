"""Train steps of this commit: beside an older one's on one machine, or beside the records of benchmarks/results.

    python -m benchmarks.compare [CASE ...] --old FOLDER [--against CASE] [--cold] [--seconds 540] --output FILE.json
    python -m benchmarks.compare [CASE ...] --output FILE.json
    python -m benchmarks.compare --list

With --old, the folder holds the older commit's files (`git worktree add FOLDER COMMIT`, or `git archive COMMIT`
unpacked into a folder that is named COMMIT). Each case runs benchmarks/train/step.py of either side in turn, old, new,
old, new, each with a process and its side's own cache of compiled programs, and the ratio is that of the medians of
tokens per second. Both sides' programs are compiled beforehand, side by side; with --cold, by each side's first run
alone instead, whose seconds are recorded (`compile_seconds_cold`). FILE.json is added to by the next call, so that
several calls, each of at most --seconds, make one record. --against: the older commit runs this case, whatever the new
one runs: what a case that it does not know gains (`8b_fp8 --old ea5ae4c --against 8b`).

Without --old, each case runs once, and the ratio is to its record in benchmarks/results/steps.json, if it has one.
FILE.json holds records of that form: `--output benchmarks/results/steps.json` makes them the stored ones.

The exit status is 1 where a ratio is below its floor or a figure is missing. FILE.json is written after each run.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from benchmarks.cases import COMPARED, STEPS, Step
from benchmarks.record import RESULTS, write

ROOT = Path(__file__).resolve().parents[1]
FLOORS = {"old": 0.995, "stored": 0.97}  # a stored record is of another day, and of another card of its kind
_AHEAD_SHARE = 0.5  # of the time of a call, at most, for compiling beforehand
_KEPT = (
    "commit", "tokens_per_second", "step_seconds", "step_seconds_all", "peak_memory_gb", "compiled_peak_gb",
    "compile_seconds_cold", "compile_seconds_cached", "residuals", "micro_batches", "losses", "failed",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A process of step.py, the file of its record, and the log of what it prints."""

    process: subprocess.Popen
    output: Path
    log: Path

    def record(self, seconds: float) -> dict:
        """Its record, or {"failed": why}; a run that takes longer is ended."""
        problem = _wait(self.process, seconds)
        if not self.output.is_file():
            last = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            return {"failed": f"{problem or 'no record'}; {' '.join(last)}"}
        record = json.loads(self.output.read_text(encoding="utf-8"))
        return {"failed": record["rejected"]} if "rejected" in record else record


@dataclass(frozen=True)
class Side:
    """One commit's files, and the folder that its compiled programs go to."""

    name: str
    folder: Path
    commit: str
    cache: Path

    def run(self, script: str, arguments: Iterable[str], log: Path, **variables: str) -> subprocess.Popen:
        """A process of this side's script, which sees this side's files alone; what it prints is added to `log`."""
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [str(self.folder), *(path for path in given if path and Path(path).resolve() != ROOT)]
        variables |= {"PYTHONPATH": os.pathsep.join(paths), "JAXTUNE_COMMIT": self.commit}
        with log.open("a", encoding="utf-8") as file:
            return subprocess.Popen(
                [sys.executable, script, *arguments], cwd=self.folder, env=os.environ | variables,
                stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def start(
        self, arguments: Iterable[str], output: Path, log: Path, variables: Mapping[str, str], cached: bool = True
    ) -> Run:
        """Starts a run of step.py. variables: of its environment. cached: with this side's cache, which an earlier run
        may have filled."""
        options = [*(["--cache", str(self.cache)] if cached else []), "--output", str(output)]
        return Run(self.run("benchmarks/train/step.py", [*arguments, *options], log, **variables), output, log)


def commit_of(folder: Path) -> str:
    """Of a checkout; of unpacked files, the folder's name."""
    if not (folder / "benchmarks/train/step.py").is_file():
        raise SystemExit(f"--old {folder}: no benchmarks/train/step.py there; it must hold a commit's files")
    if not (folder / ".git").exists():
        return folder.name
    command = ["git", "-C", str(folder), "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def step_arguments(case: Step, folder: str | Path) -> list[str]:
    return [*shlex.split(case.arguments.format(folder=folder)), "--steps", str(case.steps)]


def compile_ahead(cases: list[tuple[Side, list[Step]]], log: Path, seconds: float) -> None:
    """Fills each side's cache with its cases' programs, all at once, each case in a process of its own: what takes
    longest is Python's. What is not compiled in time, or fails, is left to the runs.

    The processes share the device, so none takes its memory in advance; the memory that a plan may count on is the
    same as in a run.
    """
    started = []
    for side, steps in cases:
        for step in dict.fromkeys(steps):
            arguments = [str(side.cache), shlex.join(step_arguments(step, "unused"))]
            variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            started.append(side.run("benchmarks/train/compile_ahead.py", arguments, log, **variables))
    end = time.monotonic() + seconds
    for process in started:
        _wait(process, end - time.monotonic())


def _wait(process: subprocess.Popen, seconds: float) -> str | None:
    """Until the process ends or its time does, which ends it; what went wrong, or None."""
    try:
        status = process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "its time ran out"
    return None if status == 0 else f"exit status {status}"


def run_once(
    side: Side,
    case: Step,
    log: Path,
    seconds: float,
    variables: Mapping[str, str] = MappingProxyType({}),
    cached: bool = True,
) -> dict:
    """The record of one run, or {"failed": why}; see Side.start."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = step_arguments(case, Path(folder) / "trace")
        return side.start(arguments, Path(folder) / "step.json", log, variables, cached).record(seconds)


class Call:
    """One call of the command: its time, and where its records and its log go."""

    def __init__(self, output: Path, seconds: float):
        self.end = time.monotonic() + seconds
        self.output, self.log = output, output.with_suffix(".log")
        output.parent.mkdir(parents=True, exist_ok=True)

    def ahead(self, cases: list[tuple[Side, list[Step]]]) -> None:
        begun = time.monotonic()
        compile_ahead(cases, self.log, _AHEAD_SHARE * (self.end - begun))
        print(f"compiled ahead in {time.monotonic() - begun:.0f} s", flush=True)

    def run(self, side: Side, case: Step, words: str, least: float = 0.0) -> dict | None:
        """run_once, said; None where fewer than `least` seconds are left, which the run would take."""
        begun = time.monotonic()
        if self.end - begun <= least:
            print("out of time; the same command goes on from here", flush=True)
            return None
        found = run_once(side, case, self.log, self.end - begun)
        figures = found.get("failed") or f"{found['tokens_per_second']:,.0f} tokens/s, {found['peak_memory_gb']:.1f} GB"
        print(f"{case.title}: {words}: {figures} ({time.monotonic() - begun:.0f} s)", flush=True)
        return found


def ratio(runs: list[dict]) -> float | None:
    """New tokens per second over old, in the medians; None where a side has none."""
    speeds = {"old": [], "new": []}
    for run in runs:
        if "failed" not in run:
            speeds[run["side"]].append(run["tokens_per_second"])
    if not all(speeds.values()):
        return None
    return statistics.median(speeds["new"]) / statistics.median(speeds["old"])


def beside_older(
    record: dict, names: list[str], sides: list[Side], call: Call, ahead: bool, against: str | None = None
) -> dict[str, float | None]:
    """Makes the runs that `record` lacks; {name: ratio}. against: the case that the older side runs, if another."""

    def of(side: Side, name: str) -> Step:
        return STEPS[against if against and side.name == "old" else name]

    def title(name: str) -> str:
        return STEPS[name].title + (f" / {STEPS[against].title}" if against else "")

    def missing(name: str) -> list[tuple[int, Side]]:
        done = {(r["round"], r["side"]) for r in record["cases"].get(title(name), ()) if "failed" not in r}
        return [(n, side) for n in (1, 2) for side in sides if (n, side.name) not in done]

    wanted = [name for name in names if missing(name)]
    if ahead and wanted:
        call.ahead([(side, [of(side, name) for name in wanted]) for side in sides])
    for name in wanted:
        runs = record["cases"].setdefault(title(name), [])
        runs[:] = [run for run in runs if "failed" not in run]
        longest = 0.0
        for number, side in missing(name):
            begun = time.monotonic()
            found = call.run(side, of(side, name), f"{side.name} {number}", longest)
            if found is None:
                break
            longest = max(longest, time.monotonic() - begun)
            kept = {key: found[key] for key in _KEPT if key in found}
            runs.append(kept | {"side": side.name, "round": number})
            record["ratios"][title(name)] = ratio(runs)
            write(call.output, record)
    return {name: record["ratios"].get(title(name)) for name in names}


def beside_stored(names: list[str], side: Side, device: str, call: Call, ahead: bool) -> dict[str, float | None]:
    """Runs each case once and writes its record; {name: ratio to the stored one}, of those that have one.

    Raises:
      SystemExit: a stored record is of another device.
    """
    stored = json.loads((RESULTS / "steps.json").read_text(encoding="utf-8"))
    for name in names:
        if name in stored and (found := stored[name]["device"]) != device:
            raise SystemExit(f"{name}: the stored record is of {found!r}, this device is {device!r}; use --old FOLDER")
    records = json.loads(call.output.read_text(encoding="utf-8")) if call.output.is_file() else {}
    ratios: dict[str, float | None] = dict.fromkeys(names)
    if ahead:
        call.ahead([(side, [STEPS[name] for name in names])])
    for name in names:
        found = call.run(side, STEPS[name], side.commit)
        if found is not None and "failed" not in found:
            records[name] = found
            if name in stored:
                ratios[name] = found["tokens_per_second"] / stored[name]["tokens_per_second"]
            else:
                del ratios[name]
            write(call.output, records)
    return ratios


def begin(output: Path, facts: dict) -> dict:
    """The record in `output`, if it is of the same commits, or a new one.

    Raises:
      SystemExit: the file is of other commits or another device.
    """
    if not output.is_file():
        return facts | {"cases": {}, "ratios": {}}
    record = json.loads(output.read_text(encoding="utf-8"))
    for key in ("device", "commit", "old_commit"):
        if record.get(key) != facts.get(key):
            raise SystemExit(f"--output {output}: {key} is {record.get(key)!r} there and {facts.get(key)!r} here")
    return record


def device_facts() -> dict:
    """Of a process that ends: this one must not hold the device's memory."""
    code = "import json; from benchmarks.record import environment; print(json.dumps(environment()))"
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": str(ROOT)}
    paths = os.environ.get("PYTHONPATH")
    variables["PYTHONPATH"] += f"{os.pathsep}{paths}" if paths else ""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of --list; default: {' '.join(COMPARED)}")
    parser.add_argument("--old", type=Path, metavar="FOLDER", help="files of the commit to compare with")
    parser.add_argument("--against", metavar="CASE", choices=list(STEPS), help="what the older commit runs")
    parser.add_argument("--cold", action="store_true", help="nothing is compiled beforehand; compiling is timed")
    parser.add_argument("--seconds", type=float, default=540, help="that this call may take")
    parser.add_argument("--output", type=Path, help="the record; beside it, a .log of what the runs print")
    parser.add_argument("--list", action="store_true", help="the cases and their arguments of step.py")
    options = parser.parse_args(argv)
    if options.list:
        print("\n".join(f"{name:24} {case.arguments}" for name, case in STEPS.items()))
        return 0
    if unknown := set(options.cases) - set(STEPS):
        parser.error(f"no case {', '.join(sorted(unknown))}: known are {', '.join(STEPS)}")
    if options.against and options.old is None:
        parser.error("--against is of the older commit: it goes with --old FOLDER")
    if options.output is None:
        parser.error("--output FILE.json is needed: every figure is written there as it comes")
    call = Call(options.output, options.seconds)
    names = options.cases or list(COMPARED)
    facts = {"benchmark": "train/commits", **device_facts()}
    facts["commit"] = facts["commit"][:7]
    caches = Path(tempfile.mkdtemp()) if options.cold else Path(tempfile.gettempdir(), "jaxtune_compare")
    new = Side("new", ROOT, facts["commit"], caches / "new")
    if options.old is None:
        ratios = beside_stored(names, new, facts["device"], call, not options.cold)
    else:
        old = Side("old", options.old.resolve(), commit_of(options.old.resolve()), caches / "old")
        record = begin(options.output, facts | {"old_commit": old.commit})
        ratios = beside_older(record, names, [old, new], call, not options.cold, options.against)
    floor = FLOORS["stored" if options.old is None else "old"]
    for name, found in ratios.items():
        said = "no ratio" if found is None else f"{found:.4f} ({'at least' if found >= floor else 'below'} {floor})"
        print(f"{STEPS[name].title}: {said}")
    return int(any(found is None or found < floor for found in ratios.values()))


if __name__ == "__main__":
    sys.exit(main())
