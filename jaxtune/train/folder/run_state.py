"""Whether a run is running, has finished, was stopped or has failed, as its folder says. Imports nothing of JAX, so
that it is quick.
"""

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
    """How a run stands. "stopped" can be continued; "failed" ended with an error; of a "killed" one the process is gone
    without a word.
    """

    name: StateName
    why: str = ""
    """The error, what stopped it, or a sentence about a killed one."""
    total_steps: int | None = None


@contextlib.contextmanager
def recorded_state(folder: Path, total_steps: int, stops: tuple[type[BaseException], ...]) -> Iterator[None]:
    """A context around a run, which state.json tells of. stops: exceptions after which it can be continued, as after
    KeyboardInterrupt and SystemExit; others mean that it failed.
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
    """Writes state.json, in the first process. A failure is logged and the run continues. why: the reason in words, cut
    if it is long.
    """
    if not processes.first():
        return
    state = {"state": name, "why": why[:_LONGEST_REASON], "total_steps": total_steps}
    try:
        atomic_write(folder / STATE, json.dumps(state) + "\n")
    except (OSError, ValueError) as error:  # the disk may be full, which is perhaps what the run failed of
        logger.warning("%s was not written: %s", folder / STATE, error)


def read_state(folder: Path) -> RunState:
    """The state in `folder`; bad files raise nothing. "killed": it says "running", and its process is gone by the
    lock's file. Another machine's process is taken to live.
    """
    try:
        content = json.loads((folder / STATE).read_text(encoding="utf-8"))
        name, why, total = content["state"], str(content["why"]), content["total_steps"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return RunState("unknown")
    total = total if type(total) is int and total >= 0 else None
    if name == "running" and not _lives(folder / CHECKPOINTS / LOCK_NAME):
        return RunState("killed", "its process is gone and left no word: it was killed, or the machine stopped", total)
    if name in ("running", "finished", "stopped", "failed"):
        return RunState(name, why, total)
    return RunState("unknown", total_steps=total)


def _lives(lock: Path) -> bool:
    """Whether the process lives: another boot or start time means another one with the same pid."""
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
