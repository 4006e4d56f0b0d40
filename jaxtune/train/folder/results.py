"""Folders that a run exports, each with a proof that this run wrote it. A folder gets its name when it is complete. Its
`jaxtune_run.json` has what identifies the run (record.same_run), the steps, and size and CRC-32 of every file. A folder
without a valid proof is never taken for a result, and never overwritten.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from jaxtune.models.adapters.trained_over import RUN_RECORD
from jaxtune.models.decoder import Decoder
from jaxtune.models.files import model_card
from jaxtune.system.files import new_folder
from jaxtune.system.sealed import read_manifest, write_manifest
from jaxtune.train.folder.record import LENGTHENED, compare_meta, require_same_code
from jaxtune.train.folder.run_folder import next_name
from jaxtune.train.folder.translations import NewerVersion, translated

PROOF = RUN_RECORD


@dataclasses.dataclass(frozen=True)
class Result:
    """An exported folder, as its valid proof describes it."""

    folder: Path  # the exported folder
    run: dict[str, Any]  # the values that identify the run, as record.same_run returns them, translated
    # The number of steps of the run when it was written. With checkpoint.best its weights may be those after fewer
    # steps, which results.json names.
    step: int
    # The first file in it, by its path, that the run did not write, or ""; hidden files of the folder do not count.
    added: str = ""


class Delivery(Protocol):
    """What receives the result of a run, for example to export it. `begin` can refuse the run."""

    def begin(self, run: Callable[[], dict[str, Any]], start: int) -> None:
        """Before the first step, perhaps while weights load; what it raises stops the run. run: returns the values that
        identify the run, once weights are loaded. start: steps of earlier processes.
        """

    def finish(self, model: Decoder, run: dict[str, Any], trained: bool) -> None:
        """Once after the last step, while the folder is locked. model: the trained one; with checkpoint.best the best.
        trained: this process made a step.
        """


def read_result(folder: Path) -> Result:
    """The Result in a folder, after a check of every listed file. Files added later are no error (Result.added).
    ValueError without a readable proof, or if a file is missing or differs.
    """
    try:
        proof = read_manifest(folder, PROOF)
        result = Result(folder, translated(proof["run"]), int(proof["step"]))
    except FileNotFoundError:
        raise ValueError(f"{folder} was not written by a run: it has no {PROOF}") from None
    except NewerVersion:
        raise
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{folder} is damaged: {error}") from None
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    known = {*proof["files"], PROOF, model_card.NAME}
    added = (name for name in paths if name not in known and not name.startswith("."))
    return dataclasses.replace(result, added=next(added, ""))


def require_own(folder: Path, run: dict[str, Any], steps: int) -> Result:
    """The result in `folder`, if this run wrote it, perhaps before it was made longer (`steps`: of the whole run now).
    ValueError if it is missing, damaged or another's; the message says what to do.
    """
    fix = f"move it away, or choose another output, such as output={next_name(folder.parent)}"
    try:
        result = read_result(folder)
    except ValueError as error:
        raise ValueError(f"{error}; {fix}") from None
    differences, _ = compare_meta(result.run, run, [*result.run, *run])
    differences = [difference for difference in differences if not difference.is_code]
    if not differences and result.step == steps:
        require_same_code(result.run, run, f"this run is complete, and {folder} is what it led to")
    if result.step < steps:
        differences = [difference for difference in differences if difference.key not in LENGTHENED]
    if differences:
        lines = "\n".join(f"  {difference}" for difference in differences[:8])
        raise ValueError(f"{folder} is the result of another run; {fix}:\n{lines}")
    return result


def require_replaceable(folder: Path, run: dict[str, Any], steps: int) -> None:
    """ValueError unless this run may overwrite `folder`: it is its own, undamaged, and nobody added a file."""
    if added := require_own(folder, run, steps).added:
        raise ValueError(f"{folder} has to be written again, but contains {added}, which no run wrote: move it away")


def holds(folder: Path, run: dict[str, Any], step: int) -> bool:
    """Whether `folder` has this run's result after `step` and need not be written. ValueError as `require_own`, if it
    exists.
    """
    return os.path.lexists(folder) and require_own(folder, run, step).step == step


def write_result(
    folder: Path,
    run: dict[str, Any],
    step: int,
    write: Callable[[Path], object],
    facts: model_card.Facts | None = None,
) -> None:
    """Has `write` fill an empty folder, adds proof and card, and renames it to `folder`, in place of an earlier result
    of this run, whose card stays if a user changed it. ValueError if `folder` is not one, or has files that no run
    wrote.

      run, step: the values that identify the run (record.same_run), and its steps done.
      facts: for the card; None: there is none.
    """
    if os.path.lexists(folder):
        require_replaceable(folder, run, step)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(folder) as temporary:
        write(temporary)
        record = {"run": run, "step": step, "card": facts, "made": model_card.made()}
        write_manifest(temporary, PROOF, record, durable=False)
        if (folder / model_card.NAME).is_file():
            shutil.copyfile(folder / model_card.NAME, temporary / model_card.NAME)
        if facts is not None:
            model_card.write(temporary, facts, folder.name, folder.name)
