"""Names of files in a run's folder that several modules use. Imports nothing of the package, so that it is quick."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
ADAPTER, MERGED = "adapter", "merged"
RESULTS = "results.json"
STATE = "state.json"  # see run_state.py


def next_name(folder: str | os.PathLike) -> Path:
    """A free path beside `folder`: runs/a-2 for runs/a, then runs/a-3."""
    folder = Path(folder)
    stem = re.sub(r"-\d{1,4}$", "", folder.name) or folder.name
    return next(path for n in itertools.count(2) if not os.path.lexists(path := folder.with_name(f"{stem}-{n}")))
