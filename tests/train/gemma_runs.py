"""Tiny Gemmas with their towers in folders, for runs over the rows of picture_runs."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import picture_rows
from tiny_models import shaken

from jaxtune.models.hf import model_from_config, save_pretrained
from tests.train.data.pictures import MARKS, TEMPLATE, picture_tokenizer

# Pictures of 2 x 2 to 8 x 8 features.
GEMMA4 = {
    "image_processor_type": "Gemma4ImageProcessor",
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "max_soft_tokens": 70,
    "do_normalize": False,
}


UNIFIED = GEMMA4 | {"image_processor_type": "Gemma4UnifiedImageProcessor", "patch_size": 2, "pooling_kernel_size": 2}
GEMMA3 = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 24, "width": 24},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
KINDS = {
    "gemma4": (picture_rows.GEMMA4, GEMMA4),
    "unified": (picture_rows.UNIFIED, UNIFIED),
    "wide": (picture_rows.WIDE, GEMMA4),
    "gemma3": (picture_rows.GEMMA3, GEMMA3),
}


def write_model(folder: Path, name: str = "gemma4", template: str = TEMPLATE) -> Path:
    """A folder of a model with random weights."""
    of, settings = KINDS[name]
    written = MARKS[0 if of["model_type"] == "gemma3" else 1]  # for which the processor writes the others
    tokenizer = picture_tokenizer(template.replace("".join(MARKS), written))
    before, image, after = map(tokenizer.convert_tokens_to_ids, MARKS)
    end = "index" if of["model_type"] == "gemma3" else "id"
    ids = {f"boi_token_{end}": before, f"image_token_{end}": image, f"eoi_token_{end}": after}
    sizes = {key: len(tokenizer) for key in ("vocab_size", "vocab_size_per_layer_input") if key in of["text_config"]}
    hf = {**of, **ids, "text_config": of["text_config"] | sizes | {"pad_token_id": 0}}
    config = folder.with_name(f"{folder.name}_config")
    config.mkdir(parents=True)
    (config / "config.json").write_text(json.dumps(hf))
    (config / "preprocessor_config.json").write_text(json.dumps(settings))
    model = shaken(model_from_config(config, jax.random.key(0), "float32", pictures=True))
    save_pretrained(model, folder, tokenizer)
    return folder
