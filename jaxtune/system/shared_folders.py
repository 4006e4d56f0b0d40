"""Folders of a run of several processes, which may be one folder for all of them, or another one on each host:
`require_shared` refuses the second case, `writes` says whether this process must write the files that all read, and
`seen` waits for what another process writes.

The first process creates a file in a folder (`_marked`), and all look for it (`_see_first`). With one process nothing
is created."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from jaxtune.system import processes

_LATE_SECONDS = 30.0  # after which a network file system shows a new name at the latest


def require_shared(folder: Path) -> None:
    """Raises ValueError, in all processes, if the path `folder` is not the same folder for all of them, as on hosts
    without a shared file system. A training run calls it for its output folder, to which all processes write
    checkpoints; the message names the key `output`. The folder must exist in the first process and be writable there;
    if it is not, all of them raise the first one's OSError. With one process it checks nothing. Collective: every
    process must call it, in the same order as its other collective calls and in its main thread."""
    lacking = [number for number, there in enumerate(_see_first(folder)) if not there]
    if lacking:
        raise ValueError(
            f"output = {str(folder)!r}: processes {lacking} do not see what the first process writes there; choose a "
            "folder that all hosts share"
        )


def writes(folder: Path) -> bool:
    """Returns whether this process must write the files that every process reads from the path `folder`: the stored
    scores of a teacher, the one case in which it is asked. The first process writes them. Processes on a host that does
    not share this folder cannot see these files; on each such host the process with the smallest number writes them
    too, also if two such hosts share the folder with each other. The folder must exist in the first process and be
    writable there. Collective, as require_shared."""
    own, hosts = processes.index(), processes.all_of(socket.gethostname())
    without = [number for number, there in enumerate(_see_first(folder)) if not there and hosts[number] == hosts[own]]
    return own == 0 or own in without[:1]


def seen(look: Callable[[], bool]) -> bool:
    """Calls `look`, a function without arguments that looks for what another process has written, five times a second
    until it returns True or half a minute has passed, because a network file system may show a new file late. Returns
    whether it returned True. It is called at least once. A process waits by it for stored scores of a teacher, and
    `_see_first` for the first process's file."""
    deadline = time.monotonic() + _LATE_SECONDS
    while not (there := look()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return there


def _see_first(folder: Path) -> list[bool]:
    """Returns a list with an entry for each process, by its index: whether it sees, within half a minute, the file that
    the first process creates in the path `folder`. [True] in a run of one process, in which nothing is created;
    elsewhere the file that is created is removed at the end. Collective, as require_shared, which calls it, as `writes`
    does."""
    if processes.count() == 1:
        return [True]
    name = processes.of_first(lambda: _marked(folder))
    found = processes.all_of(seen(lambda: os.path.exists(os.path.join(folder, name))))
    if processes.first():
        os.unlink(os.path.join(folder, name))
    return found


def _marked(folder: Path) -> str:
    """Creates an empty file with a unique hidden name in `folder`, for which all processes look, and returns the name,
    without the folder. `_see_first` calls it in the first process. Raises OSError if the folder cannot be written."""
    name = f".shared_{os.getpid()}_{time.time_ns()}.tmp"
    with open(os.path.join(folder, name), "xb"):
        return name
