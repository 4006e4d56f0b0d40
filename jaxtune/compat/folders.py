"""output_dir and its checkpoint-N folders: a run replaces what a script wrote before, as transformers does, and never
what anybody else wrote. The resume state is in output_dir/checkpoints; checkpoint-N has weights for other programs.
"""

from __future__ import annotations

import contextlib
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
from jaxtune.system.files import atomic_write, discard, new_folder
from jaxtune.system.terminal import say
from jaxtune.train.config import ConfigError
from jaxtune.train.config.file import load_config
from jaxtune.train.folder.checkpoint import saved_steps
from jaxtune.train.folder.folder_lock import FolderLock
from jaxtune.train.folder.run_folder import CHECKPOINTS, CONFIG, RESULTS, next_name
from jaxtune.train.folder.run_folder import STATE as RUN_STATE
from jaxtune.train.folder.run_state import read_state
from jaxtune.train.log.metrics import JSONL
from jaxtune.train.log.rollouts import ROLLOUTS

STATE = "trainer_state.json"
ROWS = "train_dataset"  # data.train of a script's run
_WRITER = "written_by"
_NAME = re.compile(r"checkpoint-(\d+)")


def write_state(folder: Path, state: TrainerState) -> None:
    """Writes trainer_state.json into an existing folder, with the entry that `is_own` looks for."""
    values = {**dataclasses.asdict(state), _WRITER: f"jaxtune {jaxtune.__version__}"}
    atomic_write(folder / STATE, json.dumps(values, indent=2, default=float) + "\n", durable=False)


def is_own(folder: Path) -> bool:
    """Whether jaxtune wrote a checkpoint-N folder, as an entry of its trainer_state.json says."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(state, dict) and _WRITER in state


def checkpoints(output: Path) -> dict[int, Path]:
    """{step: folder} of the checkpoint-N folders in output_dir by ascending step, other programs' included."""
    folders = {int(name[1]): path for path in output.glob("checkpoint-*") if (name := _NAME.fullmatch(path.name))}
    return dict(sorted(folders.items()))


def require_own(output: Path) -> None:
    """Raises ValueError if output_dir has a checkpoint-N folder of another program, which a run might replace."""
    for path in checkpoints(output).values():
        if not is_own(path):
            raise ValueError(
                f"train: output_dir = {str(output)!r} holds {path.name}, which jaxtune did not write: name another "
                f"folder, such as {str(next_name(output))!r}, or move it away"
            )


def replace_run(output: Path, overwrite: bool) -> bool:
    """Removes an earlier run of a script from output_dir, but not its checkpoint-N folders; False: there was none.

    ValueError: the run is no script's, is running, or could be continued without `overwrite`.
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
                discard(folder)
        for name in (CONFIG, JSONL, ROLLOUTS, RESULTS, RUN_STATE):
            (output / name).unlink(missing_ok=True)
        shutil.rmtree(output / "tensorboard", ignore_errors=True)
    finally:
        lock.release()
    say(f"train: output_dir = {str(output)!r} holds an earlier run, which this one replaces; {instead} would keep it")
    return True


def resumed(resume_from: bool | str | os.PathLike | None, output: Path) -> tuple[bool, int | None]:
    """(whether a run is continued, from which step; None: the last); ValueError for a path that names no saved step."""
    if resume_from in (None, False):
        return False, None
    steps = saved_steps(output / CHECKPOINTS)
    if resume_from is True:
        return bool(steps), None
    folder = Path(resume_from).expanduser()
    step_name = _NAME.fullmatch(folder.name)
    if step_name is not None and folder.parent.resolve() == output.resolve() and int(step_name[1]) in steps:
        return True, int(step_name[1])
    available = ", ".join(str(output / f"checkpoint-{step}") for step in steps[-8:])
    raise ValueError(
        f"train: resume_from_checkpoint = {os.fspath(resume_from)!r} is not a checkpoint of the run in output_dir = "
        f"{str(output)!r}. Instead: "
        + (
            f"True, or one of {available}"
            if steps
            else "output_dir as the folder of that run, or leave it out to start"
        )
    )


class Checkpoints:
    """Writes the checkpoint-N folders of one call of train(), and removes old ones.

    Args:
      limit: how many folders of jaxtune stay, the last and the best always; None or 0: all.
    Attributes:
      written: steps whose folders this call has written.
    """

    def __init__(self, output: Path, tokenizer: object, state: TrainerState, limit: int | None):
        self._output, self._tokenizer, self._state, self._limit = output, tokenizer, state, limit
        self.written: set[int] = set()
        self._earlier = set(checkpoints(output))  # of earlier calls, which go first

    def folder(self, step: int) -> Path:
        """output_dir/checkpoint-STEP, which may not exist."""
        return self._output / f"checkpoint-{step}"

    def write(self, module: Decoder, step: int) -> bool:
        """Writes a step's folder, once in a call of train(). An error is printed and gives False: the run continues."""
        if step in self.written:
            return True
        folder = self.folder(step)
        try:
            with new_folder(folder) as temporary:  # may replace one of an earlier call, continued from a step before
                save(module, temporary, self._tokenizer)
                write_state(temporary, self._state)
        except (OSError, ValueError) as error:
            say(f"warning: {folder} could not be written: {error}")
            return False
        self.written.add(step)
        self._rotate(step)
        return True

    def _rotate(self, latest: int) -> None:
        """Removes the oldest folders over the limit, those of earlier runs first, but never `latest` and the best."""
        if not self._limit:
            return
        spared = {latest, self._state.best_global_step}
        old = [(step, path) for step, path in checkpoints(self._output).items() if step not in spared and is_own(path)]
        old.sort(key=lambda item: item[0] in self.written or item[0] not in self._earlier)
        spared_count = len({step for step in spared if step is not None and self.folder(step).exists()})
        for _, path in old[: max(0, len(old) + spared_count - max(self._limit, spared_count))]:
            with contextlib.suppress(OSError):
                discard(path)
