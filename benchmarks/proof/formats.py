"""Formats of the frozen weights, and ranks and rates: held-out losses of `jaxtune train` in the same order of rows."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.proof.work import LENGTH, Run, questions, save, train_all

FORMATS: dict[str, tuple[str, ...]] = {
    "bf16": (),
    "fp8": ("model.load_in=fp8",),
    "fp8 products": ("model.load_in=fp8", "model.compute=fp8"),
    "int8": ("model.load_in=int8",),
    "nvfp4": ("model.load_in=nvfp4",),
    "nf4": ("model.load_in=nf4",),
}
# What `jaxtune sensitivity --by kinds --keep int8` finds to cost most for its bytes, in eight bits; run if named.
MENDED: dict[str, tuple[str, ...]] = {
    "nvfp4 v int8": ("model.load_in=nvfp4", "precision={'*': bf16, v_proj: int8}"),
    "nvfp4 kv int8": ("model.load_in=nvfp4", "precision={'*': bf16, '[kv]_proj': int8}"),
    "nf4 v int8": ("model.load_in=nf4", "precision={'*': bf16, v_proj: int8}"),
    "nf4 kv int8": ("model.load_in=nf4", "precision={'*': bf16, '[kv]_proj': int8}"),
    "nf4 kv down int8": ("model.load_in=nf4", "precision={'*': bf16, '[kv]_proj': int8, down_proj: int8}"),
    # The products that err most in 16 bits, over weights of as many bytes.
    "fp8 products but k down": (
        *("model.load_in=fp8", "model.compute=fp8"),
        "precision={'*': bf16, k_proj: int8, down_proj: int8}",
    ),
}
RANKS = ("1", "8", "64", "full")
RATES = {"lora": (5e-5, 2e-4, 8e-4, 3.2e-3, 1.28e-2), "full": (3e-6, 1e-5, 4e-5, 1.6e-4, 6.4e-4)}


def common(model: str, rows: tuple[Path, Path], steps: int, evaluations: int = 4) -> list[str]:
    """Overrides of all runs."""
    return [
        f"model.path={model}",
        f"data.train={rows[0]}",
        f"data.eval={rows[1]}",
        f"data.length={LENGTH}",
        "data.num_workers=2",
        f"steps={steps}",
        "rows_per_step=16",
        "precision=bf16",
        "evaluation.at_start=true",
        f"evaluation.every_steps={max(1, steps // evaluations)}",
        "checkpoint.every_minutes=null",
        "export.merged=false",
        "metrics.log_every=10",
    ]


def run_formats(
    model: str, rows: Path, output: Path, steps: int, seconds: float, seeds: int, at_once: int, names: Sequence[str]
) -> None:
    """Every format with every seed; seed by seed, so that a call that ends early has whole seeds. Runs that the
    record in `output` has whole are kept, with their commit."""
    until = time.time() + seconds
    output.mkdir(parents=True, exist_ok=True)
    own = common(model, questions(rows, output), steps)
    settings, kept = FORMATS | MENDED, whole_runs(output / "formats.json", steps)
    every = {run_name(name, seed): (name, seed) for seed in range(seeds) for name in list(names) or list(FORMATS)}
    runs = [Run(run, (*settings[name], f"seed={seed}")) for run, (name, seed) in every.items() if run not in kept]
    found = kept | train_all(runs, own, output, at_once, until - 5)
    chosen = [name for name in settings if any(run_name(name, seed) in found for seed in range(seeds))]
    record = {"steps": steps, "length": LENGTH, "runs": found, "paired": paired(found, chosen, seeds)}
    print(json.dumps(record["paired"], indent=1))
    save(output, "formats", record)


def run_name(name: str, seed: int) -> str:
    return f"{name} {seed}".replace(" ", "_")


def whole_runs(file: Path, steps: int) -> dict[str, Any]:
    """The runs of an earlier record that reached their end, each with the commit that it ran at; of as many steps."""
    if not file.exists() or (record := json.loads(file.read_text(encoding="utf-8")))["steps"] != steps:
        return {}
    whole = {name: run for name, run in record["runs"].items() if run["exit"] == 0}
    return {name: {"commit": record["commit"], **run} for name, run in whole.items()}


def paired(found: Mapping[str, Any], names: Sequence[str], seeds: int) -> dict[str, Any]:
    """{format: its held-out losses at the end and their differences from bf16's of the same seed}; a loss counts where
    the run reached its end. `stopped` has [step, difference] of the last evaluation of each run that the clock stopped.
    """

    def last(name: str, seed: int) -> float | None:
        run = found.get(run_name(name, seed), {})
        return run["held_out"][-1][1] if run.get("exit") == 0 and run.get("held_out") else None

    result = {}
    for name in names:
        losses = [last(name, seed) for seed in range(seeds)]
        bases = [last("bf16", seed) for seed in range(seeds)]
        differences = [a - b for a, b in zip(losses, bases, strict=True) if a is not None and b is not None]
        result[name] = {"losses": losses, "differences": differences}
        if stopped := [last_common(found, name, seed) for seed, loss in enumerate(losses) if loss is None]:
            result[name]["stopped"] = [pair for pair in stopped if pair is not None]
        if differences:
            result[name]["mean_difference"] = statistics.fmean(differences)
    spread = [loss for loss in result.get("bf16", {}).get("losses", ()) if loss is not None]
    if len(spread) > 1:
        result["spread_of_seeds"] = max(spread) - min(spread)
    return result


def last_common(found: Mapping[str, Any], name: str, seed: int) -> tuple[int, float] | None:
    """(step, difference from bf16) of the last evaluation that both runs of a seed reached after the start."""
    curves = [dict(found.get(run_name(kind, seed), {}).get("held_out", ())) for kind in (name, "bf16")]
    step = max(curves[0].keys() & curves[1].keys(), default=0)
    return (step, curves[0][step] - curves[1][step]) if step else None


def run_ranks(model: str, rows: Path, output: Path, steps: int, seconds: float, at_once: int) -> None:
    """Ranks 1, 8, 64 and full fine-tuning at five rates each; the middle rates first."""
    until = time.time() + seconds
    output.mkdir(parents=True, exist_ok=True)
    own = [*common(model, questions(rows, output), steps, 1), "schedule.name=constant"]
    runs = []
    for place in (2, 1, 3, 0, 4):
        for rank in RANKS:
            rate = RATES["full" if rank == "full" else "lora"][place]
            adapter = ("adapter=null",) if rank == "full" else (f"adapter.r={rank}", "adapter.lora_alpha=32")
            runs.append(Run(f"{rank}_{rate:g}", (*adapter, f"optim.learning_rate={rate}")))
    found = train_all(runs, own, output, at_once, until - 5)
    best = {}
    for rank in RANKS:
        ends = {
            name.split("_")[1]: run["held_out"][-1][1]
            for name, run in found.items()
            if name.split("_")[0] == rank and run.get("exit") == 0 and run["held_out"]
        }
        if ends:
            rate = min(ends, key=lambda rate: ends[rate])
            best[rank] = {"rate": float(rate), "loss": ends[rate], "losses": ends}
    if "full" in best:
        for rank in best:
            best[rank]["ratio_to_full"] = best[rank]["rate"] / best["full"]["rate"]
    print(json.dumps(best, indent=1))
    save(output, "ranks", {"steps": steps, "runs": found, "best": best})
