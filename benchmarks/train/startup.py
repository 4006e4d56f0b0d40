"""From a folder of safetensors to the first optimizer step, in a fresh process: cold, and with the caches.

    python benchmarks/train/startup.py [--shape llama-3.1-8b] --output FILE.json

Random weights of the shape are saved once as a Hugging Face folder. "Cold" has no compiled programs and no token
cache; the operating system may hold the file in its page cache, which the record states by a plain read's speed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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


def child(folder: str) -> None:
    """Times itself from the start of the process, which the parent hands over."""
    started = float(os.environ["STARTED"])
    marks = {"python": time.time() - started}
    import jaxtune

    marks["import"] = time.time() - started
    from jaxtune.train import TrainConfig, Trainer
    from jaxtune.train.app import use_compilation_cache
    from jaxtune.train.config import AdapterConfig, CheckpointConfig, DataConfig, ModelConfig

    use_compilation_cache()
    model, tokenizer = jaxtune.from_pretrained(folder, dtype="bfloat16")
    import jax
    from flax import nnx

    jax.block_until_ready(nnx.state(model))
    marks["loaded"] = time.time() - started
    model = jaxtune.get_peft_model(model, r=16)
    config = TrainConfig(
        model=ModelConfig(path=folder),
        data=DataConfig(train=str(Path(folder).parent / "rows.jsonl"), length=2048, train_on="all"),
        adapter=AdapterConfig(),
        steps=1,
        rows_per_step=8,
        checkpoint=CheckpointConfig(every_minutes=None),
        output=tempfile.mkdtemp(),
    )
    trainer = Trainer(model, tokenizer, config)
    marks["prepared"] = time.time() - started
    trainer.train()
    marks["first_step"] = time.time() - started
    marks["loss"] = trainer.history[-1]["loss"]
    print("MARKS " + json.dumps(marks))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--output", required=True)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return 0
    work = Path(tempfile.mkdtemp())
    folder = work / "model"
    # The model is written in a process of its own, so that this one holds no GPU memory.
    script = (
        "import sys, jax; sys.path.insert(0, sys.argv[1]);"
        "import jaxtune; from benchmarks.shapes import SHAPES; from jaxtune.models.hf import model_from_config;"
        "jaxtune.save_pretrained(model_from_config(SHAPES[sys.argv[2]], jax.random.key(0), 'bfloat16'), sys.argv[3])"
    )
    begun = time.time()
    subprocess.run([sys.executable, "-c", script, str(ROOT), options.shape, str(folder)], check=True)
    save_seconds = time.time() - begun
    tiny_tokenizer(folder)
    with open(work / "rows.jsonl", "w", encoding="utf-8") as file:
        for row in range(400):
            text = " ".join(f"w{(row * 31 + i * 7) % 500}" for i in range(200))
            file.write(json.dumps({"text": text}) + "\n")
    shards = sorted(folder.glob("*.safetensors"))
    begun = time.time()
    for shard in shards:
        with open(shard, "rb", buffering=0) as file:
            while file.read(1 << 26):
                pass
    size = sum(shard.stat().st_size for shard in shards)
    read_gb_per_second = size / 1e9 / (time.time() - begun)
    environment_ = dict(
        os.environ,
        JAX_COMPILATION_CACHE_DIR=str(work / "xla"),
        JAXTUNE_CACHE=str(work / "tokens"),
        PYTHONPATH=str(ROOT) + os.pathsep + os.environ.get("PYTHONPATH", ""),
    )
    runs = {}
    for name in ("cold", "cached", "cached again"):
        command = [sys.executable, __file__, "--child", str(folder), "--output", options.output]
        done = subprocess.run(
            command, env=dict(environment_, STARTED=str(time.time())), capture_output=True, text=True, check=False
        )
        marks = [line for line in done.stdout.splitlines() if line.startswith("MARKS ")]
        if not marks:
            print(done.stdout[-2000:], done.stderr[-4000:])
            return 1
        runs[name] = json.loads(marks[0][6:])
        print(name, runs[name], flush=True)

    from benchmarks.record import environment, write

    record = {
        "benchmark": "train/startup",
        **environment(),
        "shape": options.shape,
        "bytes": size,
        "plain_read_gb_per_second": read_gb_per_second,
        "save_seconds": save_seconds,
        "runs": runs,
    }
    write(options.output, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
