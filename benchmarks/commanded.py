"""`jaxtune train` as a process, on a card whose allocator gives out what a smaller one would."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT
from benchmarks.record import driver_bytes

_CONTEXT_BYTES = 0.6e9  # of CUDA, outside of the allocator


def train(
    recipe: Mapping[str, Any], changes: Sequence[str], file: Path, log: Path, card_gib: float | None
) -> dict[str, Any]:
    """{"metrics": lines of its metrics, "said": what it printed, "whole_seconds"}, or {"failed": why}.

    file: is written with the recipe; `log` is added to. changes: KEY=VALUE. The recipe's output is removed before.
    """
    output, recipe = Path(recipe["output"]), dict(recipe)
    shutil.rmtree(output, ignore_errors=True)
    variables = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if card_gib:
        device_bytes = driver_bytes()
        assert device_bytes is not None, "--card-gib is for a GPU"
        card = card_gib * 2**30 - _CONTEXT_BYTES
        recipe["memory"] = {"budget_gb": card / 2**30}
        variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(card / device_bytes)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(recipe), encoding="utf-8")
    began, before = time.monotonic(), log.stat().st_size if log.exists() else 0
    with log.open("a", encoding="utf-8") as stream:
        words = [sys.executable, "-m", "jaxtune", "train", str(file), *changes]
        code = subprocess.run(
            words, stdout=stream, stderr=subprocess.STDOUT, env=os.environ | variables, check=False
        ).returncode
    said = log.read_bytes()[before:].decode("utf-8", "replace")
    if code:
        return {"failed": f"exit status {code}: {said.strip().splitlines()[-1][:300]}", "said": said}
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {"metrics": list(map(json.loads, lines)), "said": said, "whole_seconds": time.monotonic() - began}
