"""Training speed of a model whose frozen weights stream from host memory, by the command, of a published shape with
random weights, on rows of a file that are packed.

    python -m benchmarks.streamed SHAPE --rows FILE.jsonl --output FILE.json [--load-in nf4] [--card-gib 12]
        [--rows-per-step 8] [--length 2048] [--steps 7] [--work FOLDER] [--keep] [KEY=VALUE ...]

--card-gib: the allocator gives out what such a card would, and plans are for it; left out: the whole card. --load-in:
bf16 (default), nf4, fp8, int8, or mxfp4 for the experts alone, in which the model's folder in --work has the weights;
with --keep the next call finds it there. KEY=VALUE are further keys of the recipe. FILE.log has what is printed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.commanded import train
from benchmarks.record import commit_here, driver_bytes, write
from benchmarks.shapes import SHAPES

_WARM = 2  # steps that are not counted
_PREDICTED = re.compile(r"predicted peak ([\d.]+) GB of [\d.]+ GB; ([\d,]+) tokens/s")
_LINK = re.compile(r"weights of (\d+) layers stream from the host \(([\d.]+) GB, ([\d.]+) s a pass")


def write_model(shape: str, load_in: str, folder: Path) -> None:
    import jax

    from benchmarks.peers.checkpoint import write_tokenizer
    from benchmarks.random_model import random_model
    from jaxtune.models.hf import save_pretrained

    with tempfile.TemporaryDirectory() as place:
        tokenizer = write_tokenizer(Path(place))
    stored = None if load_in == "bf16" else load_in
    save_pretrained(random_model(SHAPES[shape], jax.random.key(0), stored, on_host=True), folder, tokenizer)


def document_tokens(rows: Path, model: Path, length: int) -> float:
    """BatchSource.document_tokens of the rows, on which forecasts depend."""
    from jaxtune.models.files.model_folder import load_tokenizer
    from jaxtune.train.config import DataConfig
    from jaxtune.train.config.objective import ObjectiveConfig
    from jaxtune.train.objectives.named import objective_of

    data = DataConfig(train=str(rows), length=length, packing=True)
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    prepared = objective_of(ObjectiveConfig()).prepare(
        str(rows), tokenizer, data, vocab_size=len(tokenizer), max_rows=None
    )
    return prepared.rows.document_tokens


def run(options: argparse.Namespace, model: Path, log: Path) -> dict[str, Any]:
    recipe: dict[str, Any] = {
        "model": {"path": str(model)} | ({"load_in": options.load_in} if options.load_in != "bf16" else {}),
        "data": {"train": str(options.rows), "length": options.length, "packing": True},
        "adapter": {"r": 16, "lora_alpha": 16},
        "rows_per_step": options.rows_per_step,
        "steps": options.steps,
        "metrics": {"log_every": 1},
        "checkpoint": {"every_steps": None, "every_minutes": None},
        "export": {"merged": False},
        "output": str(options.work / "run"),
    }
    done = train(recipe, options.changes, options.work / "recipe.yaml", log, options.card_gib)
    text = " ".join(done.pop("said").split())
    plans = [line.strip() for line in re.findall(r"plan: (.*?micro-batch\S* of [\d,]+ x [\d,]+ tokens)", text)]
    facts: dict[str, Any] = {"plans": plans}
    if found := _PREDICTED.findall(text):
        facts |= {
            "predicted_peak_gb": float(found[-1][0]),
            "predicted_tokens_per_second": int(found[-1][1].replace(",", "")),
        }
    if found := _LINK.findall(text):
        layers, size, seconds = found[-1]
        facts |= {"streamed_layers": int(layers), "streamed_gb": float(size), "link_seconds_a_pass": float(seconds)}
    if "failed" in done:
        return facts | done
    metrics = done.pop("metrics")
    seconds = [line["step_seconds"] for line in metrics if "step_seconds" in line and line["step"] > _WARM]
    step = statistics.median(seconds)
    return facts | {
        "tokens_per_second": options.rows_per_step * options.length / step,
        "step_seconds": seconds,
        "peak_memory_gb": max(line.get("peak_memory_bytes", 0) for line in metrics) / 1e9,
        "losses": [line["loss"] for line in metrics if "loss" in line],
        **done,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.streamed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=list(SHAPES), metavar="SHAPE")
    for name in ("--rows", "--output"):
        parser.add_argument(name, type=lambda text: Path(text).resolve(), required=True)
    parser.add_argument("--load-in", default="bf16", choices=("bf16", "nf4", "fp8", "int8", "mxfp4"))
    parser.add_argument("--card-gib", type=float)
    for name, default in (("--rows-per-step", 8), ("--length", 2048), ("--steps", 7)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "streamed")
    parser.add_argument("--keep", action="store_true", help="the model's folder stays")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    model = options.work / f"{options.shape}_{options.load_in}"
    if options.part == "model":
        write_model(options.shape, options.load_in, model)
        return 0
    options.output.parent.mkdir(parents=True, exist_ok=True)
    log = options.output.with_suffix(".log")
    names = ("shape", "load_in", "card_gib", "rows_per_step", "length", "changes")
    record: dict[str, Any] = {"benchmark": "streamed", "commit": commit_here()}
    record |= {name: getattr(options, name) for name in names} | {"rows": options.rows.name}
    if not model.exists():
        began = time.monotonic()
        with log.open("a", encoding="utf-8") as stream:
            again = [sys.executable, "-m", "benchmarks.streamed", *sys.argv[1:], "--part", "model"]
            subprocess.run(again, check=True, stdout=stream, stderr=subprocess.STDOUT)
        record["model_seconds"] = time.monotonic() - began
        print(f"model's folder in {record['model_seconds']:.0f} s", flush=True)
    record["document_tokens"] = document_tokens(options.rows, model, options.length)
    record |= run(options, model, log) | {"device_gb": (driver_bytes() or 0) / 1e9}
    write(options.output, record)
    print(json.dumps({key: value for key, value in record.items() if key != "losses"}), flush=True)
    if "failed" in record:
        return 1  # the model's folder stays: the next call needs it
    if not options.keep:
        shutil.rmtree(model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
