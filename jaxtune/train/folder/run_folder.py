"""Names of those files and folders in a run's folder that several modules use, and the name of the next folder. Some
are named elsewhere: display/metrics.py metrics.jsonl (JSONL), folder_lock.py run.lock (LOCK_NAME), trainer.py loss.png
and profile. This module imports nothing of the package, so that reading a folder is quick."""

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
    """A path beside `folder` at which nothing is: runs/a-2 for runs/a, runs/a-3 if that exists."""
    folder = Path(folder)
    stem = re.sub(r"-\d{1,4}$", "", folder.name) or folder.name
    return next(path for n in itertools.count(2) if not os.path.lexists(path := folder.with_name(f"{stem}-{n}")))
