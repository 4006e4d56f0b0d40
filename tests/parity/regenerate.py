"""Makes tests/goldens/*.npz from transformers: run it in the environment of `make parity`, for the families that it is
given by name or for all.

Each file holds tokens, logits, the loss, the norms of all gradients, the gradients of one layer's small tensors, and a
greedy continuation. Weights are not stored: both sides make them from tensor names (tests/models/random_weights.py).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))

import reference
import transformers
from checks import NEW_TOKENS, PROMPT_TOKENS
from tiny import CONFIGS, golden_tokens

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
MAX_GRADIENT_SIZE = 4096


def golden(name: str) -> dict[str, np.ndarray]:
    """Arrays of one golden file."""
    tokens = golden_tokens()
    with tempfile.TemporaryDirectory() as folder:
        model = reference.load(reference.make_checkpoint(Path(folder), CONFIGS[name]))
        loss, grads = reference.loss_and_gradients(model, tokens)
        arrays = {
            "logits": reference.logits(model, tokens),
            "loss": np.float32(loss),
            "greedy": reference.greedy(model, tokens[:, :PROMPT_TOKENS], NEW_TOKENS),
            "gradient_names": np.array(sorted(grads)),
            "gradient_norms": np.array([np.linalg.norm(grads[key]) for key in sorted(grads)], np.float32),
        }
    for key, value in grads.items():
        if ".layers.1." in key and value.size <= MAX_GRADIENT_SIZE:
            arrays["gradient:" + key] = value
    return arrays


def main() -> None:
    GOLDENS.mkdir(exist_ok=True)
    for name in sys.argv[1:] or CONFIGS:
        arrays = golden(name)
        np.savez_compressed(GOLDENS / f"{name}.npz", **arrays)
        print(f"{name}: loss {arrays['loss']:.4f}, {(GOLDENS / f'{name}.npz').stat().st_size:,} bytes")
    print(f"transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
