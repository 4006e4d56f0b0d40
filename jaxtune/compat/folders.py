"""checkpoint-N folders in output_dir, as transformers' Trainer leaves them: what trained, for PEFT and transformers.

What a run goes on from (optimizer states, the place in the data) is jaxtune's own and lies in output_dir/checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jaxtune
from jaxtune.compat.callbacks import TrainerState
from jaxtune.models.decoder import Decoder
from jaxtune.models.lora import has_adapter
from jaxtune.system.files import unfinished_name
from jaxtune.system.terminal import say

STATE = "trainer_state.json"
_WRITER = "written_by"
_NAME = re.compile(r"checkpoint-(\d+)")


def write_state(folder: Path, state: TrainerState) -> None:
    """trainer_state.json, by which a folder is known as one that was written here."""
    values = {**dataclasses.asdict(state), _WRITER: f"jaxtune {jaxtune.__version__}"}
    (folder / STATE).write_text(json.dumps(values, indent=2, default=float) + "\n", encoding="utf-8")


def is_own(folder: Path) -> bool:
    try:
        return _WRITER in json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def checkpoints(output: Path) -> dict[int, Path]:
    """{step: folder} of output_dir's checkpoint-N folders, the first step first."""
    found = {int(name[1]): path for path in output.glob("checkpoint-*") if (name := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def require_own(output: Path) -> None:
    """Raises ValueError where output_dir holds a checkpoint-N folder of another program, which would be replaced."""
    for path in checkpoints(output).values():
        if not is_own(path):
            raise ValueError(
                f"train: output_dir = {str(output)!r} holds {path.name}, which jaxtune did not write: name another "
                "folder, or move it away"
            )


def save(module: Decoder, folder: str | os.PathLike, tokenizer: Any = None) -> None:
    """The adapter as a PEFT folder, or the whole model where there is no adapter."""
    (jaxtune.save_adapter if has_adapter(module) else jaxtune.save_pretrained)(module, folder, tokenizer=tokenizer)


def save_beside(module: Decoder, folder: Path, tokenizer: Any = None) -> None:
    """As `save`, into a folder that holds other things; files of the same names are replaced."""
    whole = unfinished_name(folder / "model")
    save(module, whole, tokenizer)
    for file in sorted(whole.iterdir()):
        os.replace(file, folder / file.name)
    whole.rmdir()


class Checkpoints:
    """Writes the checkpoint-N folders of one call of train().

    Args:
      limit: how many are kept, of those that were written here: SFTConfig's save_total_limit.
    """

    def __init__(self, output: Path, tokenizer: Any, state: TrainerState, limit: int | None):
        self._output, self._tokenizer, self._state, self._limit = output, tokenizer, state, limit
        self.written: set[int] = set()

    def folder(self, step: int) -> Path:
        return self._output / f"checkpoint-{step}"

    def write(self, module: Decoder, step: int) -> bool:
        """Whether the folder of a step is there, with this model; says why where it cannot be: the run goes on."""
        folder, whole = self.folder(step), unfinished_name(self.folder(step))
        if step in self.written:
            return True
        try:
            save(module, whole, self._tokenizer)
            write_state(whole, self._state)
            if folder.exists():  # of an earlier call, which went on from a step before
                old = unfinished_name(folder)
                os.rename(folder, old)
                os.rename(whole, folder)
                shutil.rmtree(old)
            else:
                os.rename(whole, folder)
        except (OSError, ValueError) as error:
            shutil.rmtree(whole, ignore_errors=True)
            say(f"warning: {folder} could not be written: {error}")
            return False
        self.written.add(step)
        self._rotate(step)
        return True

    def _rotate(self, latest: int) -> None:
        """Removes the oldest folders over the limit, but for the best one's, as transformers does."""
        if not self._limit:
            return
        kept = {latest, self._state.best_global_step}
        old = [path for step, path in checkpoints(self._output).items() if step not in kept and is_own(path)]
        spared = len({step for step in kept if step is not None and self.folder(step).exists()})
        for path in old[: max(0, len(old) + spared - max(self._limit, spared))]:
            shutil.rmtree(path, ignore_errors=True)
