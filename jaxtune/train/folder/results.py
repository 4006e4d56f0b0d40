"""The folders that a run exports, and the proof in each that it is this run's.

A folder gets its name when it is whole, with `jaxtune_run.json` in it: what makes the run this one (record.same_run),
the step whose weights it holds, and size and CRC-32 of every file. What has no such proof is never taken for a result,
and never overwritten.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from jaxtune.models.adapters.trained_over import RUN_RECORD
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.folders import new_folder
from jaxtune.system.files import atomic_write, fingerprints, sync, unfinished_name
from jaxtune.train.folder.record import compare_meta

PROOF = RUN_RECORD
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Result:
    """An exported folder whose proof holds. run: as record.same_run gives it; step: whose weights these are; added:
    the first file in it that the run did not write, or ""."""

    folder: Path
    run: dict[str, Any]
    step: int
    added: str = ""


class Delivery(Protocol):
    """Takes the result of a run; see Trainer.train."""

    def begin(self, run: Callable[[], dict[str, Any]], start: int) -> None:
        """Called before the run begins, or goes on from step `start`. run: gives what makes it this one, for which it
        waits for the weights. May raise."""

    def finish(self, model: Decoder, run: dict[str, Any], trained: bool) -> None:
        """Called with the trained model. trained: whether this process made a step."""


def read_result(folder: Path) -> Result:
    """The result in a folder, every file of it compared with its proof.

    Raises:
      ValueError: there is no proof, or a file is not what it was written as; files that were added do not matter.
    """
    try:
        proof = json.loads((folder / PROOF).read_text(encoding="utf-8"))
        if proof["format"] != _FORMAT:
            raise ValueError(f"{folder / PROOF} has format {proof['format']}, not {_FORMAT}")
        result = Result(folder, dict(proof["run"]), int(proof["step"]))
        expected = {str(name): dict(entry) for name, entry in proof["files"].items()}
    except FileNotFoundError:
        raise ValueError(f"{folder} was not written by a run: it has no {PROOF}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder / PROOF} cannot be read ({type(error).__name__}: {error})") from None
    try:
        found = fingerprints(folder / name for name in expected)
    except OSError as error:
        raise ValueError(f"{folder} is damaged: {error.filename}: {error.strerror}") from None
    for name, entry in expected.items():
        if found[folder / name] != entry:
            raise ValueError(f"{folder} is damaged: {name} is {found[folder / name]}, and was written as {entry}")
    there = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    added = (name for name in there if name not in expected and name != PROOF and not name.startswith("."))
    return dataclasses.replace(result, added=next(added, ""))


def require_own(folder: Path, run: dict[str, Any]) -> Result:
    """The result of this run in a folder.

    Raises:
      ValueError: what is there is another run's, or nobody's; the message says what differs and what to do.
    """
    fix = "move it away, or name another output"
    try:
        result = read_result(folder)
    except ValueError as error:
        raise ValueError(f"{error}; {fix}") from None
    differences, _ = compare_meta(result.run, run, [*result.run, *run])
    if differences:
        lines = "\n".join(f"  {difference}" for difference in differences[:8])
        raise ValueError(f"{folder} is the result of another run; {fix}:\n{lines}")
    return result


def require_replaceable(folder: Path, run: dict[str, Any]) -> None:
    """As require_own; raises ValueError, too, where somebody put a file of theirs into the folder."""
    if added := require_own(folder, run).added:
        raise ValueError(f"{folder} is to be written anew, and holds {added}, which no run wrote: move it away")


def holds(folder: Path, run: dict[str, Any], step: int) -> bool:
    """Whether the result of this run after that step is there. Raises as require_own does."""
    return os.path.lexists(folder) and require_own(folder, run).step == step


def write_result(folder: Path, run: dict[str, Any], step: int, write: Callable[[Path], Any]) -> None:
    """Has `write` fill an empty folder, proves it, and gives it the name; what was there, which is this run's, goes."""
    if os.path.lexists(folder):
        require_replaceable(folder, run)
        old = unfinished_name(folder)
    else:
        old = None
    whole = unfinished_name(folder)
    with new_folder(whole, "export") as temporary:
        write(temporary)
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        found = {path.relative_to(temporary).as_posix(): value for path, value in fingerprints(files).items()}
        proof = {"format": _FORMAT, "run": run, "step": step, "files": found}
        atomic_write(temporary / PROOF, json.dumps(proof, indent=1) + "\n")
    if old is not None:
        os.rename(folder, old)
    os.rename(whole, folder)
    sync(folder.parent)
    if old is not None:
        shutil.rmtree(old)
