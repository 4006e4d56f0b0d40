"""A tiny model, its tokenizer and rows on disk, and the command over them: what the fault tests kill and starve."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml
from tiny_models import tiny_model

from jaxtune.models.config import LayerSpec
from jaxtune.models.hf import save_pretrained
from tests.train.data.conftest import make_tokenizer

STEPS = 6
# XLA's flags of a process with one device that computes the same bits as this one.
ONE_DEVICE = " ".join(flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag)


def make_folder(folder: Path, layers: int = 1, **shape: Any) -> Path:
    """Writes model/, of that shape, rows.jsonl, eval.jsonl and recipe.yaml; returns the recipe."""
    tokenizer = make_tokenizer()
    model = tiny_model("bfloat16", vocab_size=len(tokenizer), layers=(LayerSpec(),) * layers, **shape)
    save_pretrained(model, folder / "model", tokenizer=tokenizer)
    for name, count in (("rows", 40), ("eval", 10)):
        rows = [
            {"prompt": "Name a colour:", "completion": f" {('red', 'blue', 'green')[i % 3]} {i}"} for i in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "model": {"path": str(folder / "model")},
        "adapter": {"r": 2, "lora_dropout": 0.1},
        "data": {
            "train": str(folder / "rows.jsonl"),
            "eval": str(folder / "eval.jsonl"),
            "length": 32,
            "cache_dir": str(folder / "cache"),
            "num_workers": 1,
        },
        "steps": STEPS,
        "rows_per_step": 2,
        "micro_batches": 1,
        "deterministic": True,
        "optim": {"learning_rate": 0.01},
        "checkpoint": {"every_minutes": None},
        "output": str(folder / "run"),
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"


def overridden(**changes: Any) -> list[str]:
    """{"checkpoint.every_steps": 2} as the command's overrides."""
    return [f"{key}={json.dumps(value) if not isinstance(value, str) else value}" for key, value in changes.items()]
