"""Training speed of transformers and PEFT on the rows of `benchmarks.pictures`: one row a micro-batch of full length.

    python -m benchmarks.peers.pictures --model FOLDER --rows FOLDER/rows.jsonl --output FILE.json
        [--steps 3] [--rows-per-step 8] [--micro 1] [--no-recompute]

LoRA of rank 16 on the text's linear layers, AdamW, the tower frozen, labels of the answers. It writes tokens per second
of the steps after the first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks.peers.trained import RANK, installed
from benchmarks.record import commit_here, write

_LENGTH = 2048


def batches(options: argparse.Namespace, device: str):
    """Yields the model's arguments of micro-batches, for ever."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    processor = Qwen2VLImageProcessorPil.from_pretrained(options.model)
    config = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    image = config["image_token_id"]
    rows = [json.loads(line) for line in options.rows.read_text(encoding="utf-8").splitlines()]
    while True:
        for first in range(0, len(rows) - options.micro + 1, options.micro):
            tokens, targets, pictures = [], [], []
            for row in rows[first : first + options.micro]:
                messages = row["messages"]
                parts = [part for part in messages[0]["content"] if part["type"] == "image"]
                opened = [Image.open(options.rows.parent / part["image"]) for part in parts]
                pictures += opened
                ids = list[int]()
                for picture in opened:
                    grid = processor([picture], return_tensors="np")["image_grid_thw"][0]
                    ids += [config["vision_start_token_id"], *[image] * int(grid.prod() // 4)]
                    ids += [config["vision_end_token_id"]]
                ids += tokenizer(messages[0]["content"][-1]["text"])["input_ids"]
                answer = tokenizer(messages[1]["content"])["input_ids"]
                targets.append(([-100] * len(ids) + answer)[:_LENGTH])
                tokens.append((ids + answer)[:_LENGTH])
            batch: dict[str, Any] = {"input_ids": torch.tensor(tokens), "labels": torch.tensor(targets)}
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["mm_token_type_ids"] = (batch["input_ids"] == image).int()
            if pictures:
                batch |= processor(pictures, return_tensors="pt")
            yield {name: value.to(device) for name, value in batch.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--model", "--rows", "--output"):
        parser.add_argument(name, type=Path, required=True)
    for name, default in (("--steps", 3), ("--rows-per-step", 8), ("--micro", 1)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--no-recompute", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForImageTextToText.from_pretrained(options.model, dtype=torch.bfloat16).to(device)
    text = (
        r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|in_proj_qkv|in_proj_z|out_proj)"
    )
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=text))
    if not options.no_recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, source = torch.optim.AdamW(trained, lr=2e-4), batches(options, device)
    seconds, losses = list[float](), list[float]()
    record = {
        "benchmark": "peers/pictures",
        "commit": commit_here(),
        "versions": installed() | installed(("flash-linear-attention", "causal-conv1d", "torchvision")),
        "settings": {name: str(value) for name, value in vars(options).items()},
    }
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        for _ in range(options.steps):
            began, total = time.perf_counter(), 0.0
            for _ in range(options.rows_per_step // options.micro):
                loss = model(**next(source), use_cache=False).loss * options.micro / options.rows_per_step
                loss.backward()
                total += float(loss)
            optimizer.step()
            optimizer.zero_grad()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
            losses.append(total)
            timed = seconds[1:] or seconds
            rate = options.rows_per_step * _LENGTH * len(timed) / sum(timed)
            peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
            record |= {"step_seconds": seconds, "tokens_per_second": rate, "losses": losses, "peak_memory_gb": peak}
            write(options.output, record)
            print(f"step of {seconds[-1]:.2f} s, {rate:,.0f} tokens/s, {peak:.1f} GB, loss {total:.4f}", flush=True)


if __name__ == "__main__":
    main()
