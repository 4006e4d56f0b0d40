"""Whole processes on a small model, from the command to the result: TRL's and jaxtune's, first and second run.

    python -m benchmarks.first_seconds --model FOLDER --rows FOLDER --output FILE.json
        [--cases trl,compat,train,generate] [--seconds 560] [--steps 120] [--dtype bfloat16] [--timing]

Each run is a process of its own. A case has a home folder of its own, empty at first, so that its first run compiles,
tokenises and measures everything, and its second run has all caches. FILE.json is written after each run, and beside it
FILE.log has what the processes print.

    trl         benchmarks/first_script.py with TRL; needs trl, peft and datasets
    compat      the same script with jaxtune.compat; needs datasets
    train       jaxtune train lora-0.5b, 16 rows of 512 tokens a step, a line each step
    generate    jaxtune generate, a few tokens of the adapter that `train` made, which runs before it

--rows has train.jsonl, rows of GSM8K. --timing asks jaxtune for its table of phases, and records it.
"""

from __future__ import annotations

import argparse
import compileall
import json
import math
import os
import shutil
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT, wait
from benchmarks.record import commit_here, write

RUNS = ("first", "second")
_LAST_STEPS = 20  # whose tokens/s count
_TABLE = "wall clock"  # begins the last line of a table of phases
_LEAST_SECONDS = 10  # no run begins when less time is left


def _script(options: argparse.Namespace, library: str, output: Path) -> list[str]:
    words = [library, str(options.model), str(options.rows / "train.jsonl"), str(output)]
    words += ["--steps", str(options.steps), "--dtype", options.dtype]
    return [str(ROOT / "benchmarks/first_script.py"), *words, *(["--timing"] * options.timing)]


def _train(options: argparse.Namespace, output: Path) -> list[str]:
    keys = {
        "model.path": options.model,
        "data.train": options.rows / "train.jsonl",
        "data.length": 512,
        "data.packing": "true",
        "rows_per_step": 16,
        "steps": options.steps,
        "precision": {"bfloat16": "bf16", "float32": "fp32"}[options.dtype],
        "export.merged": "false",
        "metrics.log_every": 1,
        "output": output,
    }
    words = [f"{key}={value}" for key, value in keys.items()]
    return ["-m", "jaxtune", "train", "lora-0.5b", *words, *(["--timing"] * options.timing)]


def _generate(options: argparse.Namespace, adapter: Path) -> list[str]:
    return ["-m", "jaxtune", "generate", str(adapter), "--prompt", "What is 2 + 3?", *(["--timing"] * options.timing)]


def arguments_of(case: str, options: argparse.Namespace, output: Path, trained: Path) -> list[str]:
    """Python's arguments of a case's process. trained: the output of `train`."""
    commands: dict[str, Callable[[], list[str]]] = {
        "trl": lambda: _script(options, "trl", output),
        "compat": lambda: _script(options, "compat", output),
        "train": lambda: _train(options, output),
        "generate": lambda: _generate(options, trained / "adapter"),
    }
    return commands[case]()


CASES = ("trl", "compat", "train", "generate")


def measured(case: str, printed: str, output: Path) -> dict[str, Any]:
    """What a finished process says of itself: the script's line, the losses and tokens/s of the metrics, and phases."""
    figures: dict[str, Any] = {}
    lines = printed.splitlines()
    for line in lines:
        if line.startswith("SCRIPT "):
            figures |= json.loads(line.removeprefix("SCRIPT "))
    metrics = output / "metrics.jsonl"
    if case != "generate" and metrics.is_file():
        steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        figures.setdefault("losses", [step["loss"] for step in steps if "loss" in step])
        rates = [step["tokens_per_second"] for step in steps if "tokens_per_second" in step]
        if rates := rates[-_LAST_STEPS:]:
            figures["tokens_per_second"] = len(rates) / math.fsum(1 / rate for rate in rates)
    if case == "generate":
        figures["answer"] = lines[-1] if lines else ""
    ends = [index for index, line in enumerate(lines) if line.startswith(_TABLE)]
    begins = [index for index, line in enumerate(lines) if line.split()[:1] == ["seconds"]]
    if ends and begins:
        figures["phases"] = lines[begins[-1] : ends[-1] + 1]
    return figures


def run(case: str, options: argparse.Namespace, work: Path, log: Path, seconds: float) -> dict[str, Any]:
    """One run of a case: its wall seconds and figures, or {"failed": why}. It may take this many seconds.

    work: a folder for homes and outputs, which stay for the next run.
    """
    output, home = work / f"{case}_output", work / f"{case}_home"
    if case != "generate":
        shutil.rmtree(output, ignore_errors=True)
    home.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "HOME": str(home),
        "PYTHONUSERBASE": site.getuserbase(),  # it follows from HOME, and packages may be there
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    # The last would make Python compile jaxtune's sources at every start, for a second, as nobody's installation does.
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAXTUNE_CACHE", "XDG_CACHE_HOME", "PYTHONDONTWRITEBYTECODE"):
        environment.pop(name, None)
    words = arguments_of(case, options, output, work / "train_output")
    with log.open("ab") as file:
        begin_byte, begun = file.tell(), time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *words], cwd=work, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
        problem = wait(process, seconds)
        wall = time.monotonic() - begun
    printed = log.read_bytes()[begin_byte:].decode("utf-8", "replace")
    if problem is not None:
        return {"failed": f"{problem}; {' '.join(printed.strip().splitlines()[-1:])}"[:300]}
    return {"wall_seconds": wall, **measured(case, printed, output)}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_seconds",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name in ("--model", "--rows", "--output"):
        parser.add_argument(name, type=lambda text: Path(text).resolve(), required=True)
    parser.add_argument("--cases", type=lambda text: text.split(","), default=CASES)
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--timing", action="store_true")
    options = parser.parse_args()
    if unknown := [name for name in options.cases if name not in CASES]:
        parser.error(f"--cases: no {', '.join(unknown)}; there are {', '.join(CASES)}")
    if "generate" in options.cases and "train" not in options.cases:
        parser.error("--cases: generate answers with the adapter that train makes: name both")
    end = time.monotonic() + options.seconds
    facts = {name: str(getattr(options, name)) for name in ("model", "rows", "steps", "dtype")}
    record: dict[str, Any] = {"benchmark": "first_seconds", "commit": commit_here(), **facts, "cases": {}}
    compileall.compile_dir(ROOT / "jaxtune", quiet=1)  # as pip leaves an installation
    options.output.parent.mkdir(parents=True, exist_ok=True)
    log = options.output.with_suffix(".log")
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="first_seconds_") as folder:
        for case in sorted(options.cases, key=CASES.index):
            for name in RUNS:
                left = end - time.monotonic()
                if left < _LEAST_SECONDS:
                    print("out of time", flush=True)
                    return 1
                figures = run(case, options, Path(folder), log, left)
                record["cases"].setdefault(case, {})[name] = figures
                write(options.output, record)
                words = figures.get("failed") or f"{figures['wall_seconds']:.1f} s"
                print(f"{case}, {name} run: {words}", flush=True)
                if "failed" in figures:
                    break
    return 0


if __name__ == "__main__":
    sys.exit(main())
