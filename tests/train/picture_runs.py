"""A tiny Qwen3.5 with its tower in a folder, and files of rows with drawn pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import picture_rows
from PIL import Image, ImageDraw
from tiny_models import shaken

from jaxtune.models.hf import model_from_config, save_pretrained
from tests.train.data.pictures import MARKS, SETTINGS, picture_tokenizer

COLOURS = ("red", "green", "blue", "white")


def write_model(
    folder: Path, of: Mapping[str, Any] = picture_rows.HF, seed: int = 0, settings: Mapping[str, Any] = SETTINGS
) -> Path:
    """A folder of a model with random weights. of: its config.json, but for the vocabulary."""
    tokenizer = picture_tokenizer()
    tokens = dict(zip(("vision_start", "image", "vision_end"), MARKS, strict=True))
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in tokens.items()}
    hf = {**of, **ids, "text_config": of["text_config"] | {"vocab_size": len(tokenizer)}}
    config = folder.with_name(f"{folder.name}_config")
    config.mkdir(parents=True)
    (config / "config.json").write_text(json.dumps(hf))
    (config / "preprocessor_config.json").write_text(json.dumps(settings))
    model = shaken(model_from_config(config, jax.random.key(seed), "float32", pictures=True))
    save_pretrained(model, folder, tokenizer)
    return folder


def draw(colour: str, seed: int) -> Image.Image:
    """A disc of a colour on black, somewhere in a picture of any size."""
    random = np.random.default_rng(seed)
    width, height = random.integers(16, 41, 2).tolist()
    picture, radius = Image.new("RGB", (width, height)), min(width, height) // 2 - 1
    x, y = random.integers(radius, width - radius + 1), random.integers(radius, height - radius + 1)
    ImageDraw.Draw(picture).ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    return picture


def write_rows(
    folder: Path, count: int, text: int = 0, seed: int = 0, name: str = "rows.jsonl", form: str = "messages"
) -> Path:
    """A file of `count` rows, of which each asks for the colour of its picture, and of `text` rows without one.

    form: "messages", "pairs" with another colour rejected, or "prompts" with the column `answer`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(seed, seed + count):
        colour = COLOURS[number % len(COLOURS)]
        draw(colour, number).save(folder / f"{number}.png")
        question = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": "Which?"}]
        rows.append((question, colour, COLOURS[(number + 1 + number // 4 % 3) % len(COLOURS)]))
    rows += [(f"Say {number}.", str(number), str(number + 1)) for number in range(text)]
    lines = [_row(form, *rows[index]) for index in np.random.default_rng(seed).permutation(len(rows))]
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / name


def _row(form: str, question: object, answer: str, other: str) -> dict[str, object]:
    asked = [{"role": "user", "content": question}]
    if form == "prompts":
        return {"prompt": asked, "answer": answer}
    said, unsaid = ([{"role": "assistant", "content": text}] for text in (answer, other))
    return {"messages": asked + said} if form == "messages" else {"prompt": asked, "chosen": said, "rejected": unsaid}
