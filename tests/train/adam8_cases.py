"""Six steps of 8-bit AdamW on three tensors, which tests/parity/regenerate_adam8.py gives to bitsandbytes too."""

from __future__ import annotations

from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).resolve().parent.parent / "goldens" / "adam8.npz"
STEPS, RATE, BETAS, EPS = 6, 1e-3, (0.9, 0.999), 1e-8
# Name to shape and weight decay: 18 blocks; the smallest tensor with 8-bit states; the largest without.
TENSORS = {"matrix": ((48, 96), 0.1), "vector": ((4096,), 0.0), "short": ((4095,), 0.0)}


def start() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {name: draw.standard_normal(shape).astype(np.float32) for name, (shape, _) in TENSORS.items()}


def gradients(step: int) -> dict[str, np.ndarray]:
    """Normal; the blocks of the matrix over five decades."""
    draw = np.random.default_rng(step)
    made = {name: draw.standard_normal(shape).astype(np.float32) for name, (shape, _) in TENSORS.items()}
    made["matrix"] *= np.logspace(-5, 0, 18, dtype=np.float32).repeat(256).reshape(48, 96)
    return made
