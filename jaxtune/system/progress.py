"""What a process says about its own work: the table of its seconds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from jaxtune.system import processes, timing
from jaxtune.system.files import atomic_write
from jaxtune.system.terminal import say

FILE = "timing.json"  # in a run's folder


def show_timing(folder: Path | None = None) -> None:
    """Prints the table of what was recorded since the last one on stderr, and writes it into a folder's timing.json.
    Of several processes the first does.
    """
    if (recorder := timing.current()) is None or not processes.first():
        return
    taken = recorder.taken()
    say("\n".join(taken.lines()), file=sys.stderr)
    if folder is not None:
        atomic_write(folder / FILE, json.dumps(taken.to_json(), indent=2) + "\n")
