"""Experiments on real weights, each a command whose record is JSON, and the page that is made of the records.

    python -m benchmarks.proof curves     --model M --rows GSM8K --output DIR [--steps 1000] [--precisions fp32,bf16]
    python -m benchmarks.proof formats    --model M --rows GSM8K --output DIR [--steps 1000] [--seeds 3] [--names A,B]
    python -m benchmarks.proof ranks      --model M --rows GSM8K --output DIR [--steps 300]
    python -m benchmarks.proof rewards    --model M --output DIR [--steps 200] [--rates | --exact]
    python -m benchmarks.proof preference --model M --rows PAIRS.jsonl --output DIR [--steps 100]
    python -m benchmarks.proof page       # docs/proof.md and its pictures, from benchmarks/results/proof

M is a model's folder or GGUF file; GSM8K a folder with its train.jsonl and test.jsonl. Each ends within --seconds (540)
and writes DIR/NAME.json as figures come; copy it to benchmarks/results/proof.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proof", description=__doc__.split("\n")[0])
    parser.add_argument("experiment", choices=("curves", "formats", "ranks", "rewards", "preference", "page"))
    parser.add_argument("--model", help="a model's folder or GGUF file")
    parser.add_argument(
        "--rows", type=Path, help="a folder with train.jsonl and test.jsonl; preference: a file of pairs"
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=3, help="runs beside each other on the device")
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument(
        "--names", default="", help="formats, separated by commas; default: those without a map of modules"
    )
    of_rewards = parser.add_mutually_exclusive_group()
    of_rewards.add_argument("--rates", action="store_true", help="rewards: three rates at ranks 1, 8 and 64")
    of_rewards.add_argument("--exact", action="store_true", help="rewards: with objective.exact and without")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.experiment == "page":
        from benchmarks.proof import page

        return page.main()
    needed = {"model": options.model, "output": options.output}
    if options.experiment != "rewards":
        needed["rows"] = options.rows
    if missing := [f"--{name}" for name, value in needed.items() if value is None]:
        parser.error(f"{options.experiment} needs {', '.join(missing)}")
    _run(options)
    return 0


def _run(options: argparse.Namespace) -> None:
    from benchmarks.proof import curves, formats, preference, rewards

    model, output, seconds = options.model, options.output.resolve(), options.seconds
    precisions = options.precisions.split(",")
    match options.experiment:
        case "curves" if options.side:
            side = curves.jaxtune_side if options.side == "jaxtune" else curves.peft_side
            side(Path(model), options.rows / "train.jsonl", output, precisions[0], options.steps)
        case "curves":
            curves.run(
                Path(model).resolve(), options.rows.resolve(), output, options.steps or 1000, precisions, seconds
            )
        case "formats":
            names = [name for name in options.names.split(",") if name]
            if unknown := [name for name in names if name not in formats.FORMATS | formats.MENDED]:
                raise SystemExit(
                    f"--names: no {', '.join(unknown)}; there are {', '.join(formats.FORMATS | formats.MENDED)}"
                )
            steps, beside = options.steps or 1000, options.at_once
            formats.run_formats(model, options.rows, output, steps, seconds, options.seeds, beside, names)
        case "ranks":
            formats.run_ranks(model, options.rows, output, options.steps or 300, seconds, options.at_once)
        case "rewards" if options.exact:
            rewards.run_exact(model, output, options.steps or 60, seconds, options.seeds)
        case "rewards":
            steps, beside = options.steps or 200, options.at_once
            rewards.run(model, output, steps, seconds, beside, options.seeds, options.rates)
        case "preference" if options.side:
            files = output / "pairs_train.jsonl", output / "pairs_eval.jsonl"
            preference.trl_side(Path(model), *files, output, options.steps)
        case "preference":
            preference.run(Path(model).resolve(), options.rows, output, options.steps or 100, seconds)


if __name__ == "__main__":
    sys.exit(main())
