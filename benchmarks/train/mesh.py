"""Train steps over several GPUs of one host, beside the same step on each of them alone.

    python benchmarks/train/mesh.py [CASE ...] [--devices 2] [--seconds 560] --output FILE.json

Each GPU gets the same tokens in every case. A step alone runs on all GPUs at once, a process each, and the slowest of
them is what a mesh is held against: GPUs of one host differ by a percent. Each run is one of benchmarks/train/step.py
in a process of its own; all programs are compiled beforehand, side by side. The file is written after each run, runs
that it has are not made again, and --seconds ends the call before a run that would not fit.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.record import honest, write

STEP = Path(__file__).with_name("step.py")
LEAST_SECONDS = 40  # a run of compiled programs takes as long


@dataclass(frozen=True)
class Case:
    """title: what trains. arguments: of step.py. rows: a GPU. axis: of the mesh that all GPUs make, or None: each
    alone. beside: the case that it is held against, and floor the least ratio of tokens per second and GPU."""

    title: str
    arguments: str
    rows: int
    axis: str | None = None
    beside: str | None = None
    floor: float | None = None

    def command(self, devices: int) -> list[str]:
        rows = self.rows * (devices if self.axis else 1)
        mesh = [f"--{self.axis}", str(devices)] if self.axis else []
        return [sys.executable, str(STEP), *shlex.split(self.arguments), "--rows", str(rows), *mesh]


_LORA = ("llama-3.1-8b bf16 LoRA r=16", "--steps 8")
_FULL = ("llama-3.1-8b, all parameters, 8-bit AdamW", "--rank 0 --optim adamw_8bit --plan auto --steps 6")
_EXPERTS = (
    "qwen3-30b-a3b bf16 LoRA r=16 on attention and experts",
    "--shape qwen3-30b-a3b --optim adamw_8bit --plan auto --steps 6",
)
_70B = ("llama-3.3-70b nf4 LoRA r=16", "--shape llama-3.3-70b --load-in nf4 --plan auto --steps 4")
CASES = {
    "8b_lora": Case(*_LORA, 8),
    "8b_lora_data": Case(*_LORA, 8, "data", "8b_lora", 0.985),
    "8b_lora_fsdp": Case(*_LORA, 8, "fsdp", "8b_lora", 0.97),
    "8b_full": Case(*_FULL, 8),
    "8b_full_fsdp": Case(*_FULL, 8, "fsdp", "8b_full", 0.95),
    "8b_full_short": Case(*_FULL, 2),
    "8b_full_short_fsdp": Case(*_FULL, 2, "fsdp", "8b_full_short", 0.95),
    "qwen3_moe": Case(*_EXPERTS, 8),
    "qwen3_moe_fsdp": Case(*_EXPERTS, 8, "fsdp", "qwen3_moe", 0.92),
    "70b_nf4_fsdp": Case(*_70B, 4, "fsdp"),
}
ENVIRONMENT = ("device", "versions", "commit", "time")
KEPT = (
    *ENVIRONMENT,
    "tokens_per_second_per_gpu", "step_seconds", "step_seconds_all", "peak_memory_gb_of_each", "residuals",
    "micro_batches", "mfu", "compile_seconds_cold", "compile_seconds_cached", "losses",
)  # fmt: skip


class Runs:
    """The processes of one call, which share a cache of compiled programs and a limit of seconds."""

    def __init__(self, devices: int, seconds: float):
        self.devices = devices
        self._end = time.monotonic() + seconds
        self._folder = Path(tempfile.mkdtemp())

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def start(self, name: str, card: int | None, *more: str, **variables: str) -> tuple[subprocess.Popen, Path]:
        """A process on one card or on all, and the file of its record; its words go to the file's .log."""
        output = self._folder / f"{name}_{card}.json"
        command = [*CASES[name].command(self.devices), "--cache", str(self._folder / "cache"), "--output", str(output)]
        if card is not None:
            variables["CUDA_VISIBLE_DEVICES"] = str(card)
        with output.with_suffix(".log").open("a") as log:
            return subprocess.Popen([*command, *more], stdout=log, stderr=log, env=os.environ | variables), output

    def compile(self, names: list[str]) -> None:
        """All programs, side by side, within half of the time; what is cut off compiles in its own run."""
        started = {
            name: self.start(
                name, None if CASES[name].axis else 0, "--compile-only", XLA_PYTHON_CLIENT_PREALLOCATE="false"
            )[0]
            for name in names
        }
        until = time.monotonic() + self.left / 2
        for name, process in started.items():
            if not _ended(process, until - time.monotonic()):
                print(f"{name}: its compiling is cut off", flush=True)

    def run(self, name: str) -> list[dict]:
        """The record of each process: one of a mesh, one of each card alone."""
        cards: list[int | None] = [None] if CASES[name].axis else [*range(self.devices)]
        started = [self.start(name, card) for card in cards]
        found = []
        for process, output in started:
            if not _ended(process, self.left):
                found.append({"failed": "the time ended"})
            elif process.returncode:
                words = output.with_suffix(".log").read_text(errors="replace").splitlines() or ["no words"]
                found.append({"failed": words[-1][:300]})
            else:
                record = json.loads(output.read_text(encoding="utf-8"))
                problem = honest(record)
                found.append({"failed": problem} if problem else {key: record[key] for key in KEPT})
        return found


def _ended(process: subprocess.Popen, seconds: float) -> bool:
    try:
        process.wait(timeout=max(seconds, 1))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


def speed(runs: list[dict] | None) -> float | None:
    """Tokens per second and GPU of the slowest process; None where one is missing."""
    speeds = [run.get("tokens_per_second_per_gpu") for run in runs or [{}]]
    return None if None in speeds else min(speed for speed in speeds if speed is not None)


def ratios(cases: dict[str, list[dict]]) -> dict[str, float]:
    """Of each mesh whose step alone was measured too: its tokens per second and GPU over the slower card's alone."""
    found = {}
    for name, runs in cases.items():
        beside = CASES[name].beside
        here, alone = speed(runs), speed(cases.get(beside)) if beside else None
        if here is not None and alone is not None:
            found[name] = here / alone
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    record = {"benchmark": "train/mesh", "devices": options.devices}
    if options.output.exists():
        record = json.loads(options.output.read_text(encoding="utf-8"))
    cases = record.get("cases", {})
    runs = Runs(options.devices, options.seconds)
    missing = [name for name in options.cases if speed(cases.get(name)) is None]
    runs.compile(missing)
    for name in missing:
        if runs.left < LEAST_SECONDS:
            print(f"{name}: no time is left", flush=True)
            continue
        cases[name] = runs.run(name)
        record |= {key: run.pop(key) for run in cases[name] for key in ENVIRONMENT if key in run}
        write(options.output, {**record, "cases": cases, "ratios": ratios(cases)})
        print(name, [run.get("failed") or round(run["tokens_per_second_per_gpu"]) for run in cases[name]], flush=True)
    low = [name for name, ratio in ratios(cases).items() if ratio < (CASES[name].floor or 0)]
    return int(bool(low) or any(speed(cases.get(name)) is None for name in options.cases))


if __name__ == "__main__":
    sys.exit(main())
