"""Is what metrics.jsonl says of the speed true? A run with saves, evaluations and a profile, read three ways.

    python benchmarks/train/throughput.py [--shape llama-3.1-8b] [--layers 8] [--output FILE.json]

Random weights, random tokens, the Trainer itself. Between two pauses (a save, an evaluation, the profile) the tokens/s
of the lines is compared with the wall clock, taken from the lines' `time`; over the profiled steps with the profile's
step; and all steps and pauses together with the wall clock to the last line. Each must agree within 3 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax

import jaxtune
import jaxtune.profile
from benchmarks.random_model import random_model
from benchmarks.record import environment, write
from benchmarks.shapes import SHAPES
from benchmarks.train.step import random_documents
from jaxtune.train.config import (
    AdapterConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    ProfileConfig,
    TrainConfig,
)
from jaxtune.train.data import TokenDataset
from jaxtune.train.data.cache import Summary
from jaxtune.train.metrics import read_metrics
from jaxtune.train.planning.devices import allow_pinned_memory
from jaxtune.train.trainer import Trainer

WITHIN = 0.03
STEPS, SAVE_EVERY, EVALUATE_EVERY, PROFILE_START, PROFILE_STEPS = 60, 15, 20, 41, 3
# A model that a CPU trains in seconds: for tests of this script.
TINY = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            vocab_size=256)  # fmt: skip


def run(options, folder: Path) -> dict[str, Any]:
    """The run's lines and its profile's step."""
    shape = SHAPES[options.shape] | {"num_hidden_layers": options.layers} | (TINY if options.tiny else {})
    model = random_model(shape, jax.random.key(0))
    adapter = AdapterConfig(r=16, lora_alpha=16)
    settings = dataclasses.asdict(adapter)
    settings.pop("path")
    model = jaxtune.get_peft_model(model, **settings)
    config = TrainConfig(
        model=ModelConfig(path=options.shape),
        data=DataConfig(train="random tokens", eval="random tokens", length=options.length),
        adapter=adapter,
        steps=STEPS,
        rows_per_step=options.rows,
        checkpoint=CheckpointConfig(every_steps=SAVE_EVERY, every_minutes=None),
        evaluation=EvaluationConfig(every_steps=EVALUATE_EVERY),
        profile=ProfileConfig(steps=PROFILE_STEPS, start=PROFILE_START),
        output=str(folder),
    )
    rows, held_out = (
        TokenDataset(random_documents("packed", count, options.length, shape["vocab_size"]), Summary(), options.length)
        for count in (options.rows, 4 * options.rows)
    )
    trainer = Trainer(model, None, config, rows, held_out, keeps_model=False)
    trainer.train()
    return {
        "lines": read_metrics(folder / "metrics.jsonl"),
        "profile_step_seconds": statistics.median(jaxtune.profile.show(trainer.profile_folder).steps_ms) / 1e3,
    }


def pauses(line: dict[str, Any]) -> float:
    """Seconds of a line that are in no step; 0 of a line of steps."""
    names = ("compile_seconds", "load_seconds", "save_seconds", "eval_seconds", "profile_seconds")
    return sum(line.get(name, 0.0) for name in names)


def stretches(lines: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Lines of steps between two pauses, at least three."""
    found: list[list[dict[str, Any]]] = [[]]
    for line in lines:
        if "loss" in line:
            found[-1].append(line)
        else:
            found.append([])
    return [stretch for stretch in found if len(stretch) >= 3]


def compare(lines: list[dict[str, Any]], profile_step_seconds: float, tokens: int) -> dict[str, Any]:
    """What metrics.jsonl says over what else is known, each 1 if both agree. tokens: of a step, with padding."""
    between = []
    for stretch in stretches(lines):
        first, *rest = stretch  # a line is written when its step is done
        wall = (rest[-1]["time"] - first["time"]) / len(rest)
        said = statistics.fmean(tokens / line["tokens_per_second"] for line in rest)
        between.append({"from_step": first["step"], "steps": len(rest), "wall_step_seconds": wall,
                        "metrics_step_seconds": said, "tokens_per_second_ratio": wall / said})  # fmt: skip
    profiled = [line for line in lines if "loss" in line
                and PROFILE_START < line["step"] <= PROFILE_START + PROFILE_STEPS]  # fmt: skip
    said = statistics.median(line["step_seconds"] for line in profiled)
    steps = sum(line["steps"] * line["step_seconds"] for line in lines if "loss" in line)
    apart = sum(pauses(line) for line in lines)
    wall_seconds = lines[-1]["time"] - (lines[0]["time"] - pauses(lines[0]))  # the first line is of a pause
    return {
        "between_pauses": between,
        "profile_step_seconds": profile_step_seconds,
        "metrics_step_seconds": said,
        "profile_ratio": profile_step_seconds / said,
        "wall_seconds": wall_seconds,
        "steps_seconds": steps,
        "pauses_seconds": apart,
        "sum_ratio": wall_seconds / (steps + apart),
    }


def wrong(record: dict[str, Any]) -> list[str]:
    """Which comparison is off by more than 3 %."""
    ratios = {f"steps from {row['from_step']}": row["tokens_per_second_ratio"] for row in record["between_pauses"]}
    ratios |= {"the profile's step": record["profile_ratio"], "the whole run": record["sum_ratio"]}
    return [f"{name}: {ratio:.4f}" for name, ratio in ratios.items() if abs(ratio - 1) > WITHIN]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU trains in seconds")
    parser.add_argument("--output")
    options = parser.parse_args()
    allow_pinned_memory()
    with tempfile.TemporaryDirectory() as folder:
        measured = run(options, Path(folder) / "run")
    record = {"benchmark": "train/throughput", **environment(), **vars(options)}
    record |= compare(measured["lines"], measured["profile_step_seconds"], options.rows * options.length)
    record["rejected"] = wrong(record) or None
    record["lines"] = measured["lines"]
    if options.output:
        write(options.output, record)
    print(json.dumps({key: value for key, value in record.items() if key != "lines"}, indent=1))
    return int(record["rejected"] is not None)


if __name__ == "__main__":
    sys.exit(main())
