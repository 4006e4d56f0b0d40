"""Processes of train/step.py: one commit's or another's, with programs compiled ahead, a time limit and a log."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from benchmarks.cases import Step

ROOT = Path(__file__).resolve().parents[1]
_AHEAD_SHARE = 0.5  # of the time of a call, at most, for compiling beforehand
TIMED_OUT = "its time ran out"  # of a run that was ended


@dataclass(frozen=True)
class Run:
    """A process of step.py, the file of its record, and the log of what it prints."""

    process: subprocess.Popen
    output: Path
    log: Path

    def record(self, seconds: float) -> dict:
        """Its record, or {"failed": why}; a run that takes longer is ended."""
        problem = wait(self.process, seconds)
        if not self.output.is_file():
            last = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            return {"failed": f"{problem or 'no record'}; {' '.join(last)}"[:300]}
        record = json.loads(self.output.read_text(encoding="utf-8"))
        return {"failed": record["rejected"]} if "rejected" in record else record


@dataclass(frozen=True)
class Side:
    """One commit's files, the folder that its compiled programs go to, and variables of its runs' environment."""

    name: str
    folder: Path
    commit: str
    cache: Path
    environment: Mapping[str, str] = MappingProxyType({})

    def run(self, script: str, arguments: Iterable[str], log: Path, **variables: str) -> subprocess.Popen:
        """A process of this side's script, which sees this side's files alone; what it prints is added to `log`."""
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [str(self.folder), *(path for path in given if path and Path(path).resolve() != ROOT)]
        variables |= {"PYTHONPATH": os.pathsep.join(paths), "JAXTUNE_COMMIT": self.commit}
        with log.open("a", encoding="utf-8") as file:
            return subprocess.Popen(
                [sys.executable, script, *arguments],
                cwd=self.folder,
                env=os.environ | dict(self.environment) | variables,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

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


def wait(process: subprocess.Popen, seconds: float) -> str | None:
    """Until the process ends or its time does, which ends it; what went wrong, or None."""
    try:
        status = process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return TIMED_OUT
    return None if status == 0 else f"exit status {status}"


class Call:
    """One call of a command: its time, its record's file, and beside it a log of what the processes print."""

    def __init__(self, output: Path, seconds: float):
        self.end = time.monotonic() + seconds
        self.output, self.log = output, output.with_suffix(".log")
        output.parent.mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def begun(self, new: dict) -> dict:
        """The record that the file holds, which this call adds to, or a new one."""
        return json.loads(self.output.read_text(encoding="utf-8")) if self.output.is_file() else new

    def ahead(self, cases: list[tuple[Side, list[Step]]]) -> None:
        """Fills each side's cache with its cases' programs, all at once, each case in a process of its own: what takes
        longest is Python's. What is not compiled in time, or fails, is left to the runs.

        The processes share the device, so none takes its memory in advance; the memory that a plan may count on is the
        same as in a run.
        """
        begun, seconds = time.monotonic(), _AHEAD_SHARE * self.left
        started = []
        for side, steps in cases:
            for step in dict.fromkeys(step for step in steps if not step.cold):
                arguments = [str(side.cache), shlex.join(step_arguments(step, "unused"))]
                variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
                started.append(side.run("benchmarks/train/compile_ahead.py", arguments, self.log, **variables))
        for process in started:
            wait(process, begun + seconds - time.monotonic())
        print(f"compiled ahead in {time.monotonic() - begun:.0f} s", flush=True)

    def run(
        self,
        side: Side,
        case: Step,
        words: str,
        least: float = 0.0,
        most: float = math.inf,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> dict | None:
        """The record of one run, or {"failed": why}, said under these words; None where fewer than `least` seconds are
        left, which it would take. most: seconds that it may take. variables: of its environment."""
        begun = time.monotonic()
        if self.left <= least:
            print("out of time; the same command goes on from here", flush=True)
            return None
        with tempfile.TemporaryDirectory() as folder:
            arguments, output = step_arguments(case, Path(folder) / "trace"), Path(folder) / "step.json"
            found = side.start(arguments, output, self.log, variables, not case.cold).record(min(self.left, most))
        figures = found.get("failed") or f"{found['tokens_per_second']:,.0f} tokens/s, {found['peak_memory_gb']:.1f} GB"
        print(f"{words}: {figures} ({time.monotonic() - begun:.0f} s)", flush=True)
        return found
