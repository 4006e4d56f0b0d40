"""The folders that a run exports, each with a proof that this run wrote it.

A folder gets its name when it is complete and contains `jaxtune_run.json`: the values that identify the run
(record.same_run), the number of steps after which it was written, and size and CRC-32 of every file that the run wrote.
A folder without a valid proof is never taken for a result, and never overwritten. At the end of a run the application
(train/app.py) exports the adapter and the merged model by these functions; evaluation (scoring.py) and a run that is
started again recognise these folders by them. `write_result` writes a folder with its proof, and `read_result` checks
one and returns a `Result`. `require_own`, `require_replaceable` and `holds` ask whether a folder is a result of this
run, whether the run may overwrite it, and whether it is up to date. `Delivery` is the interface of what gets the
trained model.
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
from jaxtune.system.files import atomic_write, fingerprints, sync, temporary_path
from jaxtune.train.folder.record import LENGTHENED, compare_meta, require_same_code
from jaxtune.train.folder.run_folder import next_name

PROOF = RUN_RECORD
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Result:
    """A folder that a run exported, as its valid proof describes it. The proof is the file jaxtune_run.json in it,
    which says which run wrote the folder and after how many steps, and lists the size and CRC-32 of every file.
    `read_result` makes it; evaluation chooses by it which weights of a run's folder are the newest."""

    folder: Path  # the exported folder
    run: dict[str, Any]  # the values that identify the run, as record.same_run returns them
    # The number of steps of the run when it was written. With checkpoint.best its weights may be those after fewer
    # steps, which results.json names.
    step: int
    # The first file in it, by its path, that the run did not write, or ""; hidden files of the folder do not count.
    added: str = ""


class Delivery(Protocol):
    """The interface of what receives the result of a run, for example to export it; an argument of Trainer.train, for
    which the train command has app._Delivery. `begin` is called before the steps and can refuse the run, for example
    because a folder that it would write is not of this run; `finish` gets the trained model."""

    def begin(self, run: Callable[[], dict[str, Any]], start: int) -> None:
        """Called before the first step of this process, while the weights may still be loading; what it raises stops
        the run.

        Args:
          run: a function that returns the values that identify the run (record.same_run); it waits until the weights
            are loaded.
          start: the number of steps done by earlier processes of the run.
        """

    def finish(self, model: Decoder, run: dict[str, Any], trained: bool) -> None:
        """Called once after the last step, while the run's folder is still locked, to do something with the model, such
        as exporting it.

        Args:
          model: the trained model, with checkpoint.best the one of the best evaluation.
          run: the values that identify the run (record.same_run).
          trained: True: this process made a step. False: the run had made all its steps already when it was started
            again.
        """


def read_result(folder: Path) -> Result:
    """Returns the Result in a folder that a run exported: which run wrote it and after how many steps, from the
    folder's proof. Evaluation, which takes the result of any run, and `require_own` call it.

    The proof is jaxtune_run.json, which lists the size and CRC-32 of every file; every file is compared with it first.
    Files that were added later are no error; the first of those whose path in the folder does not begin with a dot is
    in Result.added.

    Raises:
      ValueError: the folder has no proof, the proof cannot be read, or a file is missing or differs from what was
        written.
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
            raise ValueError(f"{folder} is damaged: {name} is {found[folder / name]}, but was written as {entry}")
    there = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    added = (name for name in there if name not in expected and name != PROOF and not name.startswith("."))
    return dataclasses.replace(result, added=next(added, ""))


def require_own(folder: Path, run: dict[str, Any], steps: int) -> Result:
    """Returns the result in `folder`, after checking that this run wrote it, or wrote it before it was made longer. The
    train command calls it before the first step for each export that is there already: another run's is an error, and
    if all are complete, nothing is trained. `holds` and `require_replaceable` check by it too. Evaluation takes results
    of any run and does not call it.

    Args:
      folder: the folder of the result.
      run: the values that identify the run, as record.same_run returns them.
      steps: the number of steps of the whole run. A result of fewer steps may be of the run before it was made longer,
        and is compared without the keys that then change (record.LENGTHENED).
    Raises:
      ValueError: the folder is missing or damaged, or was written by another run or by no run; the message says what
        differs and what to do.
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
    """Raises ValueError unless `folder` is a result that this run may overwrite: this run wrote it, perhaps before it
    was made longer, it is not damaged, and nobody has added a file. run: the values that identify the run. steps: the
    number of its steps. The train command calls it before the first step, so that it does not train in vain, and
    `write_result` calls it again."""
    if added := require_own(folder, run, steps).added:
        raise ValueError(f"{folder} has to be written again, but contains {added}, which no run wrote: move it away")


def holds(folder: Path, run: dict[str, Any], step: int) -> bool:
    """Whether `folder` is a result of this run after `step`, so that it need not be written again. False if there is no
    such folder, or the result is of another step of this run. A run that was complete when it was started again asks it
    before it exports. run: the values that identify the run. step: the number of its steps. Raises ValueError if the
    folder is of another run, damaged or no result."""
    return os.path.lexists(folder) and require_own(folder, run, step).step == step


def write_result(folder: Path, run: dict[str, Any], step: int, write: Callable[[Path], Any]) -> None:
    """Writes a result of a run: has `write` fill an empty folder, adds the proof, and then renames the folder to
    `folder`. An earlier result of this run there is replaced. The train command exports the adapter and the merged
    model by it at the end of a run; exports of a single model by `jaxtune export` have no proof.

    Args:
      folder: the path that the result gets.
      run: the values that identify the run, as record.same_run returns them.
      step: the number of steps of the run, which the proof records.
      write: a function that gets the path of an empty folder and writes the files of the result into it.
    Raises:
      ValueError: the folder exists and is not an intact result of this run, or has files that no run wrote.
    """
    if os.path.lexists(folder):
        require_replaceable(folder, run, step)
        old = temporary_path(folder)
    else:
        old = None
    whole = temporary_path(folder)
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
