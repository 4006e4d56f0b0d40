"""Weights from (seed, tensor name, shape): tests and parity scripts make the same checkpoint without storing it."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import safetensors.numpy

from jaxtune.models.files import shards


def random_tensor(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """float32: matrices normal with 1 / sqrt(columns), biases and sinks with 0.3, norms and scales around 1."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    normal = generator.standard_normal(shape, np.float32)
    if name.endswith(("norm.weight", "norm_1.weight", "norm_2.weight", "router.scale", "per_expert_scale")):
        return (0.2 * normal + 1).astype(np.float32)
    if name.endswith((".input_min", ".output_min")):  # that clamp some numbers
        return -np.abs(normal).reshape(shape) - 0.5
    if name.endswith((".input_max", ".output_max")):
        return np.abs(normal).reshape(shape) + 0.5
    if name.endswith((".bias", "_bias", ".sinks")):
        return 0.3 * normal
    return normal / np.float32(np.sqrt(shape[-1]))


def write_checkpoint(folder: Path, hf: dict, shapes: dict[str, tuple[int, ...]], dtype=np.float32) -> None:
    """A Hugging Face folder with random weights: config.json and one model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    dtype = np.dtype(dtype)
    planned = [(name, shape, dtype) for name, shape in shapes.items()]
    fetch = {name: random_tensor(name, shape).astype(dtype) for name, shape in shapes.items()}.__getitem__
    shards.write_file(folder / "model.safetensors", planned, fetch)


def rewrite(folder: Path, change) -> None:
    """Applies change(tensors) to model.safetensors, written by the safetensors library."""
    content = safetensors.numpy.load_file(folder / "model.safetensors")
    change(content)
    safetensors.numpy.save_file(content, folder / "model.safetensors")
