"""PEFT's side of the parity checks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import peft
import reference
import torch
from random_weights import random_tensor


def make_adapter(model_folder: Path, adapter_folder: Path, settings: dict) -> None:
    """An adapter folder written by PEFT, every tensor of it random."""
    model = peft.get_peft_model(reference.load(model_folder), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            noise = torch.from_numpy(random_tensor(name.replace(".weight", ".noise"), tuple(parameter.shape)))
            # Added, because a magnitude starts at the norms of its weight and a saved module at the base's.
            parameter += 0.3 * noise
    model.save_pretrained(adapter_folder)


def load(model_folder: Path, adapter_folder: Path):
    return peft.PeftModel.from_pretrained(reference.load(model_folder), adapter_folder).eval()


def merged_weights(model) -> dict[str, np.ndarray]:
    """{Hugging Face name: weight} of merge_and_unload."""
    merged = model.merge_and_unload(safe_merge=True)
    return {name: value.detach().numpy().copy() for name, value in merged.state_dict().items()}
