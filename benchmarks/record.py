"""One JSON file a benchmark run: what was measured, where, and at which commit."""

from __future__ import annotations

import datetime
import json
import math
import os
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_COLUMNS = 160


def commit_here() -> str:
    """The commit of this checkout; JAXTUNE_COMMIT where there is none."""
    if given := os.environ.get("JAXTUNE_COMMIT"):
        return given
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def driver_bytes() -> float | None:
    """All memory of the first GPU by the driver; None where there is no driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
    return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) * 2**20


def environment() -> dict[str, Any]:
    """Device, versions, commit, time."""
    import jax

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
        "commit": commit_here(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write(path: str | Path, record: dict[str, Any]) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_text(record) + "\n", encoding="utf-8")


def _text(value: Any, indent: int = 0) -> str:
    """JSON whose lines are filled: records are read by people too."""
    line = json.dumps(value)
    if len(line) + indent <= _COLUMNS or not isinstance(value, dict | list) or not value:
        return line
    keys = [f"{json.dumps(str(key))}: " for key in value] if isinstance(value, dict) else [""] * len(value)
    inside = value.values() if isinstance(value, dict) else value
    lines: list[str] = []
    for item in [key + _text(one, indent + 1) for key, one in zip(keys, inside, strict=True)]:
        if lines and "\n" not in lines[-1] + item and len(lines[-1]) + len(item) + indent <= _COLUMNS:
            lines[-1] += f", {item}"
        else:
            lines.append(item)
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    inner = ",\n".join(" " * (indent + 1) + line for line in lines)
    return f"{opening}\n{inner}\n{' ' * indent}{closing}"


def honest(record: dict[str, Any]) -> str | None:
    """Why a training record proves nothing, or None: the first loss must be near ln V (of DPO, whose adapter begins
    with nothing, ln 2), and every trained matrix must have had a gradient by step 2. (A published benchmark once
    trained nothing for hours.)"""
    for key in ("first_loss", "vocab_size", "smallest_grad_norm_by_step_2"):
        if key not in record:
            return f"{key} is missing"
    if record.get("objective", "sft") != "sft":
        if not abs(record["first_loss"] - math.log(2)) <= 0.1:
            return f"first loss {record['first_loss']} is not near ln 2"
    elif not abs(record["first_loss"] - math.log(record["vocab_size"])) <= 1.0:
        return f"first loss {record['first_loss']} is not near ln V = {math.log(record['vocab_size']):.2f}"
    if not record["smallest_grad_norm_by_step_2"] > 0:
        return "a trained matrix had no gradient by step 2"
    return None
