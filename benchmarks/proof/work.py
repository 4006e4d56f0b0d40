"""What the experiments share: rows and models in a folder, runs of `jaxtune train` beside each other, and records."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import environment, write

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 512  # tokens of a row


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of `jaxtune train`: its name and its overrides of the recipe."""

    name: str
    overrides: tuple[str, ...]


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def questions(folder: Path, output: Path, held_out: int = 256) -> tuple[Path, Path]:
    """(training rows, held-out rows) of GSM8K's train.jsonl and test.jsonl as conversations."""
    files = output / "train.jsonl", output / "eval.jsonl"
    for file, name, count in zip(files, ("train", "test"), (None, held_out), strict=True):
        rows = read_rows(folder / f"{name}.jsonl")[:count]
        write_rows(file, ({"messages": conversation(row["question"], row["answer"])} for row in rows))
    return files


def conversation(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def train_all(
    runs: Sequence[Run],
    common: Sequence[str],
    output: Path,
    at_once: int,
    until: float,
    variables: Mapping[str, str] | None = None,
) -> dict[str, dict[str, Any]]:
    """Runs them, `at_once` beside each other on one device, until the clock says `until`: {name: its metrics}; of one
    that was stopped or failed what it had written. Each is a process; all share a cache of compiled programs.

    variables: of the processes' environment, such as recorded.TURNS.
    """
    waiting, running, found = list(runs), {}, {}
    while waiting or running:
        while waiting and len(running) < at_once and time.time() < until:
            run = waiting.pop(0)
            running[run.name] = (run, start(run, common, output, at_once, variables))
        if time.time() >= until:
            waiting.clear()
            for _, process in running.values():
                process.kill()
        for name, (run, process) in list(running.items()):
            if process.poll() is not None:
                del running[name]
                found[name] = measured(run, output) | {"exit": process.returncode}
                print(name, json.dumps({key: found[name].get(key) for key in ("exit", "held_out")}), flush=True)
        time.sleep(0.5)
    return found


def start(
    run: Run, common: Sequence[str], output: Path, at_once: int = 1, variables: Mapping[str, str] | None = None
) -> subprocess.Popen:
    """Starts a run; its folder and what it prints are beside each other in `output`."""
    share = f"{0.9 / at_once:.2f}"
    command = [sys.executable, "-m", "benchmarks.proof.recorded", "lora-0.5b", *common, *run.overrides]
    with open(output / f"{run.name}.log", "w", encoding="utf-8") as log:
        return subprocess.Popen(
            [*command, f"output={output / run.name}"],
            cwd=ROOT,
            env={"XLA_PYTHON_CLIENT_MEM_FRACTION": share, **os.environ, **(variables or {}), "PYTHONPATH": path()},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def measured(run: Run, output: Path) -> dict[str, Any]:
    """What a run's folder says: the losses of its steps, those of held-out rows, and the products' implementations."""
    folder = output / run.name
    lines = read_rows(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    products = folder / "products.json"
    record: dict[str, Any] = {
        "overrides": list(run.overrides),
        "held_out": [[line["step"], line["eval_loss"]] for line in lines if "eval_loss" in line],
        "losses": [[line["step"], line["loss"]] for line in lines if "loss" in line],
        "products": json.loads(products.read_text()) if products.exists() else {},
    }
    for line in lines:
        for key, value in line.items():
            if key not in _KNOWN and isinstance(value, int | float):
                record.setdefault("series", {}).setdefault(key, []).append([line["step"], value])
    return record


_KNOWN = {
    *("step", "time", "epoch", "loss", "eval_loss", "learning_rate", "targets", "skipped", "steps", "eval_rows"),
    *("tokens_per_second", "real_tokens_per_second", "trained_tokens_per_second", "data_wait_seconds", "eval_targets"),
    *("peak_memory_bytes", "compile_seconds", "load_seconds", "eval_seconds"),
}


def save(output: Path, name: str, record: Mapping[str, Any]) -> Path:
    """Writes a record with the machine and versions into `output`/name.json."""
    file = output / f"{name}.json"
    write(file, {**environment(), **record})
    return file
