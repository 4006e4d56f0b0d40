"""Train steps of this commit beside an older one's on one machine, or beside the records of benchmarks/results.

    python -m benchmarks.compare [CASE ...] --old FOLDER [--cold] [--seconds 540] --output FILE.json
    python -m benchmarks.compare [CASE ...] --output FILE.json
    python -m benchmarks.compare --list

With --old, the folder holds the older commit's files (`git worktree add FOLDER COMMIT`, or `git archive COMMIT`
unpacked into a folder that is named COMMIT). Each case runs benchmarks/train/step.py of either side in turn, old, new,
old, new, each with a process and its side's own cache of compiled programs, and the ratio is that of the medians of
tokens per second. Both sides' programs are compiled beforehand, side by side; with --cold, by each side's first run
alone instead, whose seconds are recorded (`compile_seconds_cold`).

Without --old, each case runs once, and the ratio is to the stored record of the case.

The exit status is 1 where a ratio is below its floor or a figure is missing. FILE.json is written after each run and
added to by the next call, so that several calls, each of at most --seconds, make one record.
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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import RESULTS, write

ROOT = Path(__file__).resolve().parents[1]
STEPS = 8  # of which six are timed, after three that are not
FLOORS = {"old": 0.995, "stored": 0.97}  # a stored record is of another day, and of another card of its kind
_AHEAD_SHARE = 0.5  # of the time of a call, at most, for compiling beforehand
_KEPT = (
    "commit", "tokens_per_second", "step_seconds", "step_seconds_all", "peak_memory_gb", "compiled_peak_gb",
    "compile_seconds_cold", "compile_seconds_cached", "residuals", "micro_batches", "losses", "rejected",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """title: in the record. arguments: of step.py, on both sides. stored: its record in benchmarks/results."""

    title: str
    arguments: str
    stored: str


CASES = {
    "8b": Case("llama-3.1-8b bf16, 8 x 2,048, everything kept", "--shape llama-3.1-8b", "step_8b_8x2048.json"),
    "8b_nf4": Case(
        "llama-3.1-8b nf4, 8 x 2,048, everything kept", "--shape llama-3.1-8b --load-in nf4", "step_8b_nf4_8x2048.json"
    ),
    "8b_24gb": Case(
        "llama-3.1-8b nf4, 8 x 2,048, planned for 24 GB",
        "--shape llama-3.1-8b --load-in nf4 --plan auto --budget-gb 24",
        "step_8b_nf4_24gb.json",
    ),
    "8b_packed": Case(
        "llama-3.1-8b bf16, packed, 8 x 2,048", "--shape llama-3.1-8b --documents packed", "step_8b_packed.json"
    ),
    "gpt_oss": Case(
        "gpt-oss-20b bf16, 8 x 2,048, planned for 50.9 GB",
        "--shape gpt-oss-20b --plan auto --budget-gb 50.9",
        "step_gpt_oss_20b_8x2048.json",
    ),
    "qwen3_moe": Case(
        "qwen3-30b-a3b bf16, 8 x 2,048, planned for 75.1 GB",
        "--shape qwen3-30b-a3b --plan auto --budget-gb 75.1 --optim adamw_8bit",
        "step_qwen3_30b_a3b_8x2048.json",
    ),
}


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


def commit_of(folder: Path) -> str:
    """Of a checkout; of unpacked files, the folder's name."""
    if not (folder / "benchmarks/train/step.py").is_file():
        raise SystemExit(f"--old {folder}: no benchmarks/train/step.py there; it must hold a commit's files")
    if not (folder / ".git").exists():
        return folder.name
    command = ["git", "-C", str(folder), "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def step_arguments(case: Case) -> list[str]:
    return [*shlex.split(case.arguments), "--steps", str(STEPS)]


def compile_ahead(sides: list[Side], cases: list[Case], log: Path, seconds: float) -> None:
    """Fills each side's cache, all sides at once. What is not compiled in time, or fails, is left to the runs.

    The processes share the device, so none takes its memory in advance; the memory that a plan may count on is the
    same as in a run.
    """
    texts = [shlex.join(step_arguments(case)) for case in cases]
    started = [
        side.run(
            "benchmarks/train/compile_ahead.py", [str(side.cache), *texts], log, XLA_PYTHON_CLIENT_PREALLOCATE="false"
        )
        for side in sides
    ]
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


def run_once(side: Side, case: Case, log: Path, seconds: float) -> dict:
    """The figures of one run, or {"failed": why}."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "step.json"
        arguments = [*step_arguments(case), "--cache", str(side.cache), "--output", str(output)]
        problem = _wait(side.run("benchmarks/train/step.py", arguments, log), seconds)
        if output.is_file():
            record = json.loads(output.read_text(encoding="utf-8"))
            found = {key: record[key] for key in _KEPT if key in record}
            return found | ({"failed": record["rejected"]} if "rejected" in record else {})
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        return {"failed": f"{problem or 'no record'}; {' '.join(last)}"}


def ratio(runs: list[dict], stored: float | None) -> float | None:
    """New tokens per second over old, or over the stored figure; None where a side has none."""
    speeds = {"old": [], "new": []}
    for run in runs:
        if "failed" not in run:
            speeds[run["side"]].append(run["tokens_per_second"])
    old = stored if stored is not None else statistics.median(speeds["old"]) if speeds["old"] else None
    return statistics.median(speeds["new"]) / old if speeds["new"] and old else None


def stored_speed(case: Case, device: str) -> float:
    """Tokens per second in the record of the case on this device.

    Raises:
      SystemExit: there is no such record, or it is of another device.
    """
    path = RESULTS / case.stored
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"device": "none"}
    if record["device"] != device:
        raise SystemExit(f"{path}: the record is of {record['device']!r}, this device is {device!r}; use --old FOLDER")
    return record["tokens_per_second"]


def measure(record: dict, names: list[str], sides: list[Side], end: float, output: Path, ahead: bool) -> None:
    """Makes the runs that `record` lacks, each written to `output` as it ends, until the monotonic time `end`."""
    log = output.with_suffix(".log")
    output.parent.mkdir(parents=True, exist_ok=True)
    rounds = len(sides)

    def missing(case: Case) -> list[tuple[int, Side]]:
        done = {(r["round"], r["side"]) for r in record["cases"].get(case.title, ()) if "failed" not in r}
        return [(n, side) for n in range(1, rounds + 1) for side in sides if (n, side.name) not in done]

    wanted = [CASES[name] for name in names if missing(CASES[name])]
    if ahead and wanted:
        begun = time.monotonic()
        compile_ahead(sides, wanted, log, _AHEAD_SHARE * (end - begun))
        print(f"compiled ahead in {time.monotonic() - begun:.0f} s", flush=True)
    for case in wanted:
        runs = record["cases"].setdefault(case.title, [])
        runs[:] = [run for run in runs if "failed" not in run]
        longest = 0.0
        for number, side in missing(case):
            begun = time.monotonic()
            if end - begun <= longest:  # the next run would be cut off
                print("out of time; the same command goes on from here", flush=True)
                return
            found = run_once(side, case, log, end - begun) | {"side": side.name, "round": number}
            seconds = time.monotonic() - begun
            longest = max(longest, seconds)
            runs.append(found)
            record["ratios"][case.title] = ratio(runs, record.get("stored", {}).get(case.title))
            write(output, record)
            figures = (
                found.get("failed") or f"{found['tokens_per_second']:,.0f} tokens/s, {found['peak_memory_gb']:.1f} GB"
            )
            print(f"{case.title}: {side.name} {number}: {figures} ({seconds:.0f} s)", flush=True)


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
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--old", type=Path, metavar="FOLDER", help="files of the commit to compare with")
    parser.add_argument("--cold", action="store_true", help="nothing is compiled beforehand; compiling is timed")
    parser.add_argument("--seconds", type=float, default=540, help="that this call may take")
    parser.add_argument("--output", type=Path, help="the record; beside it, a .log of what the runs print")
    parser.add_argument("--list", action="store_true", help="the cases and their arguments of step.py")
    options = parser.parse_args(argv)
    end = time.monotonic() + options.seconds
    if options.list:
        for name, case in CASES.items():
            print(f"{name:10} {case.arguments}")
        return 0
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}: known are {', '.join(CASES)}")
    if options.output is None:
        parser.error("--output FILE.json is needed: every figure is written there as it comes")
    names = options.cases or list(CASES)
    facts = {"benchmark": "train/commits", **device_facts()}
    facts["commit"] = facts["commit"][:7]
    caches = Path(tempfile.mkdtemp() if options.cold else Path(tempfile.gettempdir(), "jaxtune_compare"))
    sides = [Side("new", ROOT, facts["commit"], caches / "new")]
    if options.old is not None:
        old = options.old.resolve()
        sides.insert(0, Side("old", old, commit_of(old), caches / "old"))
        facts["old_commit"] = sides[0].commit
    record = begin(options.output, facts)
    if options.old is None:
        speeds = {CASES[name].title: stored_speed(CASES[name], facts["device"]) for name in names}
        record["stored"] = record.get("stored", {}) | speeds
    measure(record, names, sides, end, options.output, ahead=not options.cold)
    floor = FLOORS["stored" if options.old is None else "old"]
    failed = False
    for title in (CASES[name].title for name in names):
        found = record["ratios"].get(title)
        failed |= found is None or found < floor
        said = "no ratio" if found is None else f"{found:.4f} ({'at least' if found >= floor else 'below'} {floor})"
        print(f"{title}: {said}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
