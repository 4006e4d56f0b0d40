"""GRPO on arithmetic with a checker: curves in bf16, fp16 and over NF4, and a run that is killed and resumed; curves
with `objective.exact` and without."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.proof import arithmetic
from benchmarks.proof.recorded import TURNS
from benchmarks.proof.work import Run, read_rows, save, start, train_all, write_rows

PRECISIONS: dict[str, tuple[str, ...]] = {
    "bf16": ("precision=bf16",),
    "fp16": ("precision=fp16",),
    "nf4": ("precision=bf16", "model.load_in=nf4"),
}
RATES = (3e-5, 1e-4, 3e-4)
EXACT: dict[str, tuple[str, ...]] = {"exact": ("objective.exact=true",), "usual": ()}
REWARD = f"{Path(arithmetic.__file__)}:correct"
MISMATCH = "sampling/sampling_logp_difference"
_RESUMED_SECONDS = 170  # of three starts, one of which compiles


def common(model: str, output: Path, steps: int, evaluations: int = 4, measures: str = "rewards") -> list[str]:
    """Overrides of all runs, whose rows are written into `output`. measures: of answers to held-out rows."""
    write_rows(output / "train.jsonl", arithmetic.rows(2000, 0))
    write_rows(output / "eval.jsonl", arithmetic.rows(256, 1))
    return [
        f"model.path={model}",
        f"data.train={output / 'train.jsonl'}",
        f"data.eval={output / 'eval.jsonl'}",
        "data.length=256",
        "data.num_workers=2",
        "objective.name=grpo",
        f"objective.reward_funcs=[{REWARD}]",
        "objective.num_generations=8",
        "objective.max_completion_length=24",
        f"steps={steps}",
        "rows_per_step=64",
        "schedule.name=constant",
        f"evaluation.generate=[{measures}]",
        "evaluation.generate_rows=256",
        "evaluation.max_new_tokens=24",
        "evaluation.at_start=true",
        f"evaluation.every_steps={max(1, steps // evaluations)}",
        "export.merged=false",
    ]


def run(model: str, output: Path, steps: int, seconds: float, at_once: int, seeds: int, rates: bool) -> None:
    """Curves of three precisions, or with `rates` of three learning rates at ranks 1, 8 and 64; then the killed run."""
    until = time.time() + seconds
    output.mkdir(parents=True, exist_ok=True)
    own = [*common(model, output, steps), "checkpoint.every_minutes=null"]
    if rates:
        runs = [
            Run(f"r{rank}_{rate:g}", ("precision=bf16", f"adapter.r={rank}", f"optim.learning_rate={rate}"))
            for rate in RATES
            for rank in (1, 8, 64)
        ]
    else:
        runs = [
            Run(f"{name}_{seed}", (*overrides, "optim.learning_rate=1e-4", f"seed={seed}"))
            for seed in range(seeds)
            for name, overrides in PRECISIONS.items()
        ]
    found = train_all(runs, own, output, at_once, until - (5 if rates else _RESUMED_SECONDS))
    record: dict[str, Any] = {"steps": steps, "runs": found}
    name = "rewards_rates" if rates else "rewards"
    save(output, name, record)
    if not rates:
        record["resumed"] = resumed(own, output, min(steps, 12), until)
        print(json.dumps(record["resumed"]))
        save(output, name, record)


def run_exact(model: str, output: Path, steps: int, seconds: float, seeds: int) -> None:
    """Curves with and without `objective.exact`, which start beside each other and train in turns, seed by seed."""
    until = time.time() + seconds
    output.mkdir(parents=True, exist_ok=True)
    overrides = [*common(model, output, steps, 2, f"{REWARD},exact_number"), "checkpoint.every_minutes=null"]
    record: dict[str, Any] = {"steps": steps, "runs": {}}
    for seed in range(seeds):
        pair = [
            Run(f"{name}_{seed}", (*words, "precision=bf16", "optim.learning_rate=3e-4", f"seed={seed}"))
            for name, words in EXACT.items()
        ]
        turns = output / f"turns_{seed}"
        turns.unlink(missing_ok=True)
        record["runs"] |= train_all(pair, overrides, output, len(pair), until - 5, {TURNS: f"{turns}:{len(pair)}"})
        save(output, "rewards_exact", record)
    record["beside"] = {name: figures(run) for name, run in sorted(record["runs"].items())}
    print(json.dumps(record["beside"], indent=1))
    save(output, "rewards_exact", record)


def figures(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run's sampled tokens, the difference of their log-probabilities in training, and of the seconds of its steps'
    second half medians, as a prompt of another length compiles within a step.
    """
    series = run.get("series", {})
    steps = len(series.get("reward", ()))
    lengths, answers = (dict(series.get(key, ())) for key in ("completions/mean_length", "answers"))
    values: dict[str, Any] = {
        "steps": steps,
        "sampled_tokens": round(sum(lengths[step] * answers[step] for step in lengths.keys() & answers.keys())),
    }
    for name, combined in (("mean", statistics.fmean), ("max", max)):
        if differences := [value for _, value in series.get(f"{MISMATCH}/{name}", ())]:
            values[f"{name}_mismatch"] = combined(differences)
    for name in ("step", "sampling", "update"):
        if seconds := [value for step, value in series.get(f"{name}_seconds", ()) if step > steps / 2]:
            values[f"{name}_seconds"] = statistics.median(seconds)
    for key in ("eval_answers/correct", "eval_answers/exact_number"):
        if rates := series.get(key):
            values[key] = [rates[0][1], rates[-1][1]]
    return values


def resumed(own: list[str], output: Path, steps: int, until: float) -> dict[str, Any]:
    """Kills a run in its middle, resumes it with the same command, and compares its adapter's bytes with an
    uninterrupted run's."""
    more = (f"steps={steps}", "checkpoint.every_steps=2", "deterministic=true")
    words = [word for word in own if not word.startswith(("evaluation.", "data.eval", "checkpoint.", "steps="))]
    digests, killed_at = {}, None
    for name in ("whole", "killed"):
        shutil.rmtree(output / name, ignore_errors=True)
        process = start(Run(name, more), words, output)
        while name == "killed" and process.poll() is None and time.time() < until:
            file = output / name / "metrics.jsonl"
            done = [line["step"] for line in read_rows(file) if "loss" in line] if file.exists() else []
            if done and max(done) >= steps // 2:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                killed_at = max(done)
                process = start(Run(name, more), words, output)
                break
            time.sleep(0.05)
        try:
            process.wait(max(1.0, until - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()
        adapter = output / name / "adapter" / "adapter_model.safetensors"
        digests[name] = hashlib.sha256(adapter.read_bytes()).hexdigest() if adapter.exists() else None
    same = digests["whole"] is not None and digests["whole"] == digests["killed"]
    return {"steps": steps, "killed_after": killed_at, "same_bits": same, "digests": digests}
