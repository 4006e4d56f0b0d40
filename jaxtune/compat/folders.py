"""output_dir and its checkpoint-N folders, for scripts that are run more than once: what a script wrote before is
replaced, as transformers does; what anybody else wrote never is.

A run's resume state (optimizer states, the position in the data) is in output_dir/checkpoints, in jaxtune's format; a
checkpoint-N folder has the weights for PEFT and transformers.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import jaxtune
from jaxtune.compat.callbacks import TrainerState
from jaxtune.compat.saves import save
from jaxtune.models.decoder import Decoder
from jaxtune.system.files import temporary_path
from jaxtune.system.terminal import say
from jaxtune.train.config import ConfigError
from jaxtune.train.config.file import load_config
from jaxtune.train.display.metrics import JSONL
from jaxtune.train.display.rollouts import ROLLOUTS
from jaxtune.train.folder.checkpoint import saved_steps
from jaxtune.train.folder.folder_lock import FolderLock
from jaxtune.train.folder.run_folder import CHECKPOINTS, CONFIG, RESULTS, next_name
from jaxtune.train.folder.run_folder import STATE as RUN_STATE
from jaxtune.train.folder.run_state import read_state

STATE = "trainer_state.json"
ROWS = "train_dataset"  # data.train of a script's run
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
    """Raises ValueError if `output`, output_dir, has a checkpoint-N folder of another program, which a run might
    replace."""
    for path in checkpoints(output).values():
        if not is_own(path):
            raise ValueError(
                f"train: output_dir = {str(output)!r} holds {path.name}, which jaxtune did not write: name another "
                f"folder, such as {str(next_name(output))!r}, or move it away"
            )


def replace_run(output: Path, overwrite: bool) -> bool:
    """Removes what an earlier run of a script left in `output`, output_dir, but its checkpoint-N folders, and says so;
    False: there was none. overwrite: also of a run that has not finished and could be continued.

    Raises:
      ValueError: the run is no script's, is running, or could be continued and `overwrite` is False.
    """
    steps = saved_steps(output / CHECKPOINTS)
    if not steps and not any((output / name).exists() for name in (CONFIG, JSONL)):
        return False
    instead = f"output_dir={str(next_name(output))!r}"
    try:
        scripts = load_config(str(output / CONFIG)).data.train == ROWS
    except (OSError, ConfigError):
        scripts = False
    if not scripts:
        raise ValueError(f"train: output_dir = {str(output)!r} holds a run that no script made: name {instead}")
    lock = FolderLock(output / CHECKPOINTS)
    try:
        # Whose lock could be taken does not run any more.
        state = {"running": "killed"}.get(name := read_state(output).name, name)
        if steps and state != "finished" and not overwrite:
            raise ValueError(
                f"train: output_dir = {str(output)!r} holds a run that was {state} after step {steps[-1]}: "
                "train(resume_from_checkpoint=True) continues it, overwrite_output_dir=True begins anew, and "
                f"{instead} leaves it alone"
            )
        for folder in (output / CHECKPOINTS).iterdir():
            if folder.is_dir():
                shutil.rmtree(folder)
        for name in (CONFIG, JSONL, ROLLOUTS, RESULTS, RUN_STATE):
            (output / name).unlink(missing_ok=True)
        shutil.rmtree(output / "tensorboard", ignore_errors=True)
    finally:
        lock.release()
    say(f"train: output_dir = {str(output)!r} holds an earlier run, which this one replaces; {instead} would keep it")
    return True


def resumed(given: bool | str | os.PathLike | None, output: Path) -> tuple[bool, int | None]:
    """What resume_from_checkpoint asks for: (whether a run is continued, from which step; None: the last). ValueError
    for a path that names no step in output_dir/checkpoints, where the state of a run is."""
    if given in (None, False):
        return False, None
    steps = saved_steps(output / CHECKPOINTS)
    if given is True:
        return bool(steps), None
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


class Checkpoints:
    """Writes the checkpoint-N folders of one call of train(), and removes old ones over a limit.

    Args:
      output: output_dir.
      tokenizer, state: are saved in each folder.
      limit: how many folders that jaxtune wrote are kept (save_total_limit), the last one and that of the best
        evaluation among them, even if these are more; None or 0: all.
    Attributes:
      written: the steps N whose folders this call of train() has written.
    """

    def __init__(self, output: Path, tokenizer: object, state: TrainerState, limit: int | None):
        self._output, self._tokenizer, self._state, self._limit = output, tokenizer, state, limit
        self.written: set[int] = set()
        self._earlier = set(checkpoints(output))  # of earlier calls, which go first

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
        """Removes the oldest folders that jaxtune wrote over the limit, those of earlier runs first, but never that of
        step `latest` and that of the best evaluation."""
        if not self._limit:
            return
        kept = {latest, self._state.best_global_step}
        old = [(step, path) for step, path in checkpoints(self._output).items() if step not in kept and is_own(path)]
        old.sort(key=lambda item: item[0] in self.written or item[0] not in self._earlier)
        spared = len({step for step in kept if step is not None and self.folder(step).exists()})
        for _, path in old[: max(0, len(old) + spared - max(self._limit, spared))]:
            shutil.rmtree(path, ignore_errors=True)
