"""Makes tests/goldens/trajectory.npz from transformers + PEFT + torch: losses and gradient norms, nothing else.

Run it in the environment of `make parity`; JAXTUNE_TEST_DATA names the folder of test data (for stories260K).
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))

import peft
import reference
import torch
import trajectory_reference
import transformers
from tiny import CONFIGS

from tests.train import trajectory as t


def main() -> None:
    test_data = Path(os.environ["JAXTUNE_TEST_DATA"])
    with tempfile.TemporaryDirectory() as folder:
        base = reference.make_checkpoint(Path(folder), CONFIGS["llama"])
        runs = {"tiny": trajectory_reference.run(base, t.tiny_rows(), t.LENGTHS["tiny"])}
    rows = trajectory_reference.story_tokens(test_data)
    runs["stories260K"] = trajectory_reference.run(t.stories(test_data)[0], rows, t.LENGTHS["stories260K"])
    arrays = {}
    for case, (losses, norms) in runs.items():
        arrays |= {f"{case}_loss": losses.astype(np.float32), f"{case}_grad_norm": norms.astype(np.float32)}
        print(f"{case}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    np.savez_compressed(t.GOLDEN, **arrays)
    print(f"transformers {transformers.__version__}, peft {peft.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
