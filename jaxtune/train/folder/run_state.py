"""Whether a run is running, has finished, was stopped or has failed, as its folder says. The module imports nothing of
JAX, so that reading a folder is quick."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from jaxtune.system import processes
from jaxtune.system.files import atomic_write
from jaxtune.train.folder.folder_lock import LOCK_NAME, process_identity
from jaxtune.train.folder.run_folder import CHECKPOINTS, STATE

logger = logging.getLogger(__name__)

_LONGEST_REASON = 2000  # characters

type StateName = Literal["running", "finished", "stopped", "failed", "killed", "unknown"]


@dataclasses.dataclass(frozen=True)
class RunState:
    """Whether a run is running, or how its last process ended; the pages of `jaxtune watch` and `jaxtune report` show
    it. A run that was "stopped", by a signal or the user, can be continued; a "failed" one ended with an error; of a
    "killed" one the process is gone without having written why; "unknown": the folder does not say."""

    name: StateName
    """The state, as the class describes it."""
    why: str = ""
    """The message of the error, what stopped the run, or a sentence about a killed one; "" if it is running, finished
    or unknown."""
    total_steps: int | None = None
    """Optimizer steps of the whole run; None if the folder does not say."""


@contextlib.contextmanager
def recorded_state(folder: Path, total_steps: int, stops: tuple[type[BaseException], ...]) -> Iterator[None]:
    """A context around a run: state.json in `folder` says that it is running, and at the end how it ended. An
    exception that ends the run passes on.

    Args:
      folder: the run's folder.
      total_steps: optimizer steps of the whole run.
      stops: exceptions that mean that the run was stopped and can be continued; KeyboardInterrupt and SystemExit mean
        that too. Any other means that it failed.
    """
    write_state(folder, "running", "", total_steps)
    try:
        yield
    except BaseException as error:
        is_stop = isinstance(error, (*stops, KeyboardInterrupt, SystemExit))
        write_state(folder, "stopped" if is_stop else "failed", str(error) or type(error).__name__, total_steps)
        raise
    write_state(folder, "finished", "", total_steps)


def write_state(folder: Path, name: StateName, why: str, total_steps: int) -> None:
    """Writes state.json, in the first process of a run. One that cannot be written is logged: the run continues."""
    if not processes.first():
        return
    state = {"state": name, "why": why[:_LONGEST_REASON], "total_steps": total_steps}
    try:
        atomic_write(folder / STATE, json.dumps(state) + "\n")
    except (OSError, ValueError) as error:  # the disk may be full, which is perhaps what the run failed of
        logger.warning("%s was not written: %s", folder / STATE, error)


def read_state(folder: Path) -> RunState:
    """The state of the run in `folder`, from its state.json. It is "killed" if the file says that it is running, and
    its process is gone by the file of the run's lock, or that file is missing or unreadable (a process of another
    machine cannot be asked, and is taken to live); "unknown" if state.json is missing, cannot be read, or names another
    state. Nothing is raised for such files. The pages of `jaxtune watch` and `jaxtune report` show it; no run decides
    by it whether it resumes."""
    try:
        found = json.loads((folder / STATE).read_text(encoding="utf-8"))
        name, why, total = found["state"], str(found["why"]), found["total_steps"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return RunState("unknown")
    total = total if type(total) is int and total >= 0 else None
    if name == "running" and not _lives(folder / CHECKPOINTS / LOCK_NAME):
        return RunState("killed", "its process is gone and left no word: it was killed, or the machine stopped", total)
    if name in ("running", "finished", "stopped", "failed"):
        return RunState(name, why, total)
    return RunState("unknown", total_steps=total)


def _lives(lock: Path) -> bool:
    """Whether the process that has a run's lock lives, by the lock's file; True for a process of another machine, which
    cannot be asked, and False if there is no such file, or it cannot be read. A process of another boot, or that
    started at another time, is another one with the same pid.

    The lock itself is not tried: a run that starts at that moment would find its folder in use.
    """
    try:
        owner = json.loads(lock.read_text(encoding="utf-8"))
        pid, host = int(owner["pid"]), str(owner["host"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False
    if host != socket.gethostname():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    recorded = owner.get("process")
    return not isinstance(recorded, str) or recorded == (process_identity(pid) or recorded)
