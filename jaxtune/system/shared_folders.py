"""Folders of a run of several processes, shared or another one on each host. The first process creates a file, and all
look for it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from jaxtune.system import processes, waiting

_LATE_SECONDS = 30.0  # after which a network file system shows a new name at the latest


def require_shared(folder: Path) -> None:
    """Raises ValueError in all processes unless `folder` is the same for all, and OSError if the first one cannot write
    there. Collective.
    """
    lacking = [number for number, sees in enumerate(_see_first(folder)) if not sees]
    if lacking:
        raise ValueError(
            f"output = {str(folder)!r}: processes {lacking} do not see what the first process writes there; choose a "
            "folder that all hosts share"
        )


def must_write(folder: Path) -> bool:
    """Whether this process must write files that all read: the first process, and the lowest one of each host that does
    not share the folder. Raises OSError. Collective.
    """
    own_index, hosts = processes.index(), processes.all_of(socket.gethostname())
    without = [
        number for number, sees in enumerate(_see_first(folder)) if not sees and hosts[number] == hosts[own_index]
    ]
    return own_index == 0 or own_index in without[:1]


def wait_until_seen(look: Callable[[], bool]) -> bool:
    """waiting.until, for half a minute, as a network file system may show a new file late."""
    return waiting.until(look, _LATE_SECONDS)


def _see_first(folder: Path) -> list[bool]:
    """For each process, whether it sees within half a minute a file that the first one creates there. Collective."""
    if processes.count() == 1:
        return [True]
    name = processes.of_first(lambda: _marked(folder))
    sightings = processes.all_of(wait_until_seen(lambda: os.path.exists(os.path.join(folder, name))))
    if processes.first():
        os.unlink(os.path.join(folder, name))
    return sightings


def _marked(folder: Path) -> str:
    name = f".shared_{os.getpid()}_{time.time_ns()}.tmp"
    with open(os.path.join(folder, name), "xb"):
        return name
