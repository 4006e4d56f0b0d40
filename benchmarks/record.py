"""One JSON file a benchmark run: what was measured, where, and at which commit."""

from __future__ import annotations

import datetime
import json
import math
import os
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Device, versions, commit (JAXTUNE_COMMIT where there is no git checkout), time."""
    import jax

    commit = os.environ.get("JAXTUNE_COMMIT")
    if not commit:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        commit = found.stdout.strip() or "unknown"
    versions = {}
    for name in ("jax", "jaxlib", "flax", "optax", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "torch", "transformers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "versions": versions,
        "commit": commit,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write(path: str | Path, record: dict[str, Any]) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def honest(record: dict[str, Any]) -> str | None:
    """Why a training record proves nothing, or None: the first loss must be near ln V, and every trained matrix must
    have had a gradient by step 2. (A published benchmark once trained nothing for hours.)"""
    for key in ("first_loss", "vocab_size", "smallest_grad_norm_by_step_2"):
        if key not in record:
            return f"{key} is missing"
    if not abs(record["first_loss"] - math.log(record["vocab_size"])) <= 1.0:
        return f"first loss {record['first_loss']} is not near ln V = {math.log(record['vocab_size']):.2f}"
    if not record["smallest_grad_norm_by_step_2"] > 0:
        return "a trained matrix had no gradient by step 2"
    return None
