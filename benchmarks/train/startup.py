"""From a folder of safetensors to the first optimizer step, in a fresh process: cold, and with the caches.

    python benchmarks/train/startup.py [--shape llama-3.1-8b] --output FILE.json

Random weights of the shape are saved once as a Hugging Face folder, and `python -m jaxtune.train` is run on it for one
step. "Cold" has no compiled programs and no token cache; the operating system may hold the file in its page cache,
which the record states by a plain read's speed.

The marks of a run are seconds since its process began, most of them reached side by side: imports; tokenizer; prepared
(rows are tokens); compiled; loaded (weights are on the device); state (and the optimizer's beside them); first_step
(its loss is known); done (the command ends).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def tiny_tokenizer(folder: Path) -> None:
    """A word-level tokenizer: what is timed here is the model's start, not the tokenising."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(500))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def child(recipe: str) -> None:
    """The command, timed from the start of the process, which the parent hands over."""
    started = float(os.environ["STARTED"])
    marks: dict[str, float] = {}

    def mark(name: str) -> None:
        marks.setdefault(name, time.time() - started)

    mark("python")
    from jaxtune import cli
    from jaxtune.system import host_memory

    before_imports = host_memory.allow_pinned  # the command calls it, and then imports the rest

    def instrumented() -> None:
        before_imports()
        from jaxtune.models.hf import Pretrained
        from jaxtune.train.engine.programs import Engine
        from jaxtune.train.engine.trained_model import TrainedModel
        from jaxtune.train.spec import loading
        from jaxtune.train.trainer import Trainer

        mark("imports")

        marked(Pretrained, "load", mark, "loaded")
        marked(loading, "load_tokenizer", mark, "tokenizer")
        marked(Trainer, "__init__", mark, "prepared")
        marked(Engine, "compile", mark, "compiled")
        marked(TrainedModel, "begin", mark, "state")

    host_memory.allow_pinned = instrumented
    if cli.console(["train", recipe]) != 0:
        sys.exit(1)
    mark("done")
    output = Path(json.loads(Path(recipe).read_text(encoding="utf-8"))["output"])
    lines = map(json.loads, (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    first = next(line for line in lines if "loss" in line)  # before it: what compiling and loading took
    marks["first_step"] = first["time"] - started
    print("MARKS " + json.dumps({**marks, "loss": first["loss"]}))


def marked(holder, name: str, mark: Callable[[str], None], words: str) -> None:
    """Replaces a function by one that marks the moment when it has returned."""
    function = getattr(holder, name)

    def timed(*arguments, **options):
        result = function(*arguments, **options)
        mark(words)
        return result

    setattr(holder, name, timed)


def write_recipe(folder: Path, rows: Path, output: Path, rows_per_step: int = 8, length: int = 2048) -> Path:
    """One step of LoRA on packed rows; the file is JSON, which is YAML too."""
    recipe = {
        "model": {"path": str(folder)},
        "data": {"train": str(rows), "length": length, "train_on": "all"},
        "adapter": {"r": 16},
        "steps": 1,
        "rows_per_step": rows_per_step,
        "checkpoint": {"every_minutes": None},
        "export": {"adapter": False, "merged": False},
        "output": str(output),
    }
    file = output.with_suffix(".yaml")
    file.write_text(json.dumps(recipe), encoding="utf-8")
    return file


def run_child(recipe: Path, environment: dict[str, str]) -> dict[str, Any]:
    """The marks of one run in a process of its own.

    Raises:
      RuntimeError: it failed; with the end of what it printed.
    """
    command = [sys.executable, __file__, "--child", str(recipe), "--output", "none"]
    environment = dict(environment, STARTED=str(time.time()))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    marks = [line for line in done.stdout.splitlines() if line.startswith("MARKS ")]
    if not marks:
        raise RuntimeError(f"{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(marks[0][6:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--output", required=True)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return 0
    from benchmarks.record import environment, write

    work = Path(tempfile.mkdtemp())
    folder, rows = work / "model", work / "rows.jsonl"
    variables = dict(
        os.environ,
        JAX_COMPILATION_CACHE_DIR=str(work / "xla"),
        JAXTUNE_CACHE=str(work / "tokens"),
        PYTHONPATH=str(ROOT) + os.pathsep + os.environ.get("PYTHONPATH", ""),
    )
    # The model is written in a process of its own, so that this one holds no GPU memory.
    script = (
        "import sys, jax, jaxtune; from benchmarks.shapes import SHAPES;"
        "from jaxtune.models.hf import model_from_config;"
        "jaxtune.save_pretrained(model_from_config(SHAPES[sys.argv[1]], jax.random.key(0), 'bfloat16'), sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", script, options.shape, str(folder)], env=variables, check=True)
    tiny_tokenizer(folder)
    texts = (" ".join(f"w{(row * 31 + i * 7) % 500}" for i in range(200)) for row in range(400))
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    size, begun = 0, time.time()
    for shard in sorted(folder.glob("*.safetensors")):
        with open(shard, "rb", buffering=0) as file:
            while block := file.read(1 << 26):
                size += len(block)
    read_gb_per_second = size / 1e9 / (time.time() - begun)
    runs = {}
    for name in ("cold", "cached"):
        runs[name] = run_child(write_recipe(folder, rows, work / name), variables)
        print(name, runs[name], flush=True)
    record = {"shape": options.shape, "bytes": size, "plain_read_gb_per_second": read_gb_per_second, "runs": runs}
    write(options.output, {"benchmark": "train/startup", **environment(), **record})
    return 0


if __name__ == "__main__":
    sys.exit(main())
