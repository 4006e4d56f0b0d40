"""checkpoint-N folders in output_dir, as transformers' Trainer writes them: the trained weights, for PEFT and
transformers. `Checkpoints` writes them in a run and removes old ones, `checkpoints` lists those in a folder, `is_own`
and `require_own` tell jaxtune's from other programs', and `resumed` says from which a run is continued. `save` writes
the weights alone, `save_beside` does so into output_dir, and `write_state` writes trainer_state.json.

The files that a run resumes from (optimizer states, the position in the data) are in output_dir/checkpoints, in
jaxtune's own format.
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
from jaxtune.system.files import temporary_path
from jaxtune.system.terminal import say
from jaxtune.train.folder.checkpoint import saved_steps

STATE = "trainer_state.json"
_WRITER = "written_by"
_NAME = re.compile(r"checkpoint-(\d+)")


def write_state(folder: Path, state: TrainerState) -> None:
    """Writes `state` as trainer_state.json into an existing folder, as transformers does: Checkpoints.write into each
    checkpoint-N folder, and the script's call of save_state into output_dir, where train() writes none. An entry in the
    file marks the folder as written by jaxtune, which is_own looks for. Values that JSON lacks are written as
    floats."""
    values = {**dataclasses.asdict(state), _WRITER: f"jaxtune {jaxtune.__version__}"}
    (folder / STATE).write_text(json.dumps(values, indent=2, default=float) + "\n", encoding="utf-8")


def is_own(folder: Path) -> bool:
    """Whether jaxtune wrote a checkpoint-N folder (True), by an entry in its trainer_state.json; False also if there is
    no such file. `require_own` refuses a run beside folders of other programs, so that none is replaced, and the
    removal of old folders leaves them out."""
    try:
        return _WRITER in json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def checkpoints(output: Path) -> dict[int, Path]:
    """{step: folder} of the checkpoint-N folders in `output`, output_dir, by ascending step, those of other programs
    included; {} if there are none or no such folder. `require_own` and the removal of old folders go through them;
    `resumed` does not: the last checkpoint of a run is found in output_dir/checkpoints."""
    found = {int(name[1]): path for path in output.glob("checkpoint-*") if (name := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def require_own(output: Path) -> None:
    """Raises ValueError if `output`, output_dir, has a checkpoint-N folder of another program (not is_own), which a run
    might replace. SFTTrainer.train calls it before the run."""
    for path in checkpoints(output).values():
        if not is_own(path):
            raise ValueError(
                f"train: output_dir = {str(output)!r} holds {path.name}, which jaxtune did not write: name another "
                "folder, or move it away"
            )


def resumed(given: bool | str | os.PathLike | None, output: Path) -> tuple[bool, int | None]:
    """Decides from the argument of train() whether it continues a run. It reads only names: what a run continues from
    is in output_dir/checkpoints, and a checkpoint-N folder only names the step.

    Args:
      given: resume_from_checkpoint: None or False starts a new run, True continues from the last checkpoint (or starts
        a new run if there is none), and the path of a checkpoint-N folder continues from step N, if output_dir/
        checkpoints still has that step. The folder itself need not exist.
      output: output_dir.
    Returns:
      (True if `given` is True or a path, else False; the step N of the path to continue from, or None for the last one)
    Raises:
      ValueError: a path that is not a checkpoint of the run in output_dir; or output_dir/checkpoints has checkpoints,
        and `given` is None or False.
    """
    steps = saved_steps(output / "checkpoints")
    if given in (None, False):
        if steps:
            raise ValueError(
                f"train: output_dir = {str(output)!r} holds the checkpoints of a run: pass "
                "resume_from_checkpoint=True to continue from them, or name another folder"
            )
        return False, None
    if given is True:
        return True, None
    folder = Path(given).expanduser()
    found = _NAME.fullmatch(folder.name)
    if found is not None and folder.parent.resolve() == output.resolve() and int(found[1]) in steps:
        return True, int(found[1])
    there = ", ".join(str(output / f"checkpoint-{step}") for step in steps[-8:])
    raise ValueError(
        f"train: resume_from_checkpoint = {os.fspath(given)!r} is not a checkpoint of the run in output_dir = "
        f"{str(output)!r}. Instead: "
        + (f"True, or one of {there}" if steps else "output_dir as the folder of that run, or leave it out to start")
    )


def save(module: Decoder, folder: str | os.PathLike, tokenizer: Any = None) -> None:
    """Saves what a script trained, as a checkpoint-N folder or for save_model: a module's adapter as a PEFT folder, or
    the whole model as a folder for transformers if it has no adapter. The folder must not exist, or must be empty, else
    ValueError is raised. tokenizer: is saved with it; None: no tokenizer is saved."""
    (jaxtune.save_adapter if has_adapter(module) else jaxtune.save_pretrained)(module, folder, tokenizer=tokenizer)


def save_beside(module: Decoder, folder: Path, tokenizer: Any = None) -> None:
    """Saves the adapter of `module`, or the whole model if it has none, into a folder that may have other files, as
    output_dir has checkpoint-N folders. SFTTrainer.save_model calls it for output_dir. Files with the names of the new
    ones are replaced, and others stay. tokenizer: is saved too; None: none is."""
    whole = temporary_path(folder / "model")
    save(module, whole, tokenizer)
    for file in sorted(whole.iterdir()):
        os.replace(file, folder / file.name)
    whole.rmdir()


class Checkpoints:
    """Writes the checkpoint-N folders of one call of train(), and removes old ones over a limit.

    Args:
      output: output_dir.
      tokenizer: is saved in each folder.
      state: the TrainerState, which is written to each folder as trainer_state.json.
      limit: how many folders that jaxtune wrote are kept (SFTConfig's save_total_limit), the last one and that of the
        best evaluation among them, even if these are more than the limit; None or 0: all.
    Attributes:
      written: the steps N whose folders this call of train() has written.
    """

    def __init__(self, output: Path, tokenizer: Any, state: TrainerState, limit: int | None):
        self._output, self._tokenizer, self._state, self._limit = output, tokenizer, state, limit
        self.written: set[int] = set()

    def folder(self, step: int) -> Path:
        """The path of a step's folder, output_dir/checkpoint-STEP, which may not exist. `write` writes it, and the
        state's best_model_checkpoint names it."""
        return self._output / f"checkpoint-{step}"

    def write(self, module: Decoder, step: int) -> bool:
        """Writes the weights of `module` as the checkpoint-N folder of a step, in place of one that an earlier call of
        train() wrote, and removes old folders over the limit. Returns True if the folder was written, now or before in
        this call of train(). An error (OSError, ValueError) is printed, the run continues, and False is returned.
        Events calls it after a save that was due or requested, and train() at its end for the final weights, and for
        the best ones with load_best_model_at_end."""
        folder, whole = self.folder(step), temporary_path(self.folder(step))
        if step in self.written:
            return True
        try:
            save(module, whole, self._tokenizer)
            write_state(whole, self._state)
            if folder.exists():  # written by an earlier call, which continued from a step before
                old = temporary_path(folder)
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
        """Removes the oldest folders that jaxtune wrote until no more than the limit are left; without a limit (None or
        0) nothing is removed. The folder of step `latest` and that of the best evaluation are never removed, as in
        transformers. `write` calls it after each new folder."""
        if not self._limit:
            return
        kept = {latest, self._state.best_global_step}
        old = [path for step, path in checkpoints(self._output).items() if step not in kept and is_own(path)]
        spared = len({step for step in kept if step is not None and self.folder(step).exists()})
        for path in old[: max(0, len(old) + spared - max(self._limit, spared))]:
            shutil.rmtree(path, ignore_errors=True)
