"""Whose config a file is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AXOLOTL, LLAMA_FACTORY, TRL = "axolotl", "LLaMA-Factory", "TRL"
# Keys that only LLaMA-Factory's configs have, and keys that only TRL's have.
_FACTORY = {"stage", "finetuning_type", "template", "dataset", "cutoff_len", "dataset_dir", "lora_rank", "lora_target"}
_TRL = {"dataset_name", "datasets", "dataset_config", "dataset_train_split", "use_peft", "max_length", "lora_r"}


def program_of(values: Mapping[str, Any]) -> str | None:
    """The program whose config this is, by the keys that name its model and rows; None for a recipe and others."""
    if "model" in values:
        return None
    if "base_model" in values:
        return AXOLOTL
    if "model_name_or_path" in values:
        return TRL if values.keys() & _TRL and not values.keys() & _FACTORY else LLAMA_FACTORY
    return None
