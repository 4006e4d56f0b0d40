"""How long a run takes from a signal to its end, also on a machine that does much else."""

from __future__ import annotations

import time
from pathlib import Path

PROMISED = 5.0  # seconds from a signal to a saved state


class Since:
    """The time since `begin`. Linux counts how long each thread was ready and another one had its CPU: `own` leaves out
    the longest of these delays, which is no longer than what they cost together."""

    def begin(self) -> None:
        self._delays, self._began = _delays(), time.monotonic()

    def end(self) -> None:
        self.seconds = time.monotonic() - self._began
        after = _delays()
        waited = (after[thread] - before for thread, before in self._delays.items() if thread in after)
        self.own = self.seconds - max(waited, default=0.0)

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s, {self.own:.2f} s without waits for a CPU"


def _delays() -> dict[str, float]:
    """{thread of this process: seconds that it was ready and did not run}."""
    found = {}
    for file in Path("/proc/self/task").glob("*/schedstat"):
        try:
            found[file.parent.name] = int(file.read_text().split()[1]) / 1e9
        except (OSError, IndexError):  # the thread has ended
            continue
    return found
