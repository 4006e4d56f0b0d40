"""The best checkpoint of a run, by a metric of its evaluations (checkpoint.best): `BestCheckpoint` keeps it during the
run, and `best_saved` finds it in the run's folder. `BestEvaluation` names it in results.json.

Which one it is follows from two things on disk: the evaluations in metrics.jsonl, and the checkpoints that exist. A run
that is resumed reads both, so nothing else must be stored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypedDict

import jax

from jaxtune.system import processes
from jaxtune.train.config import CheckpointConfig, ConfigError
from jaxtune.train.display.metrics import JSONL, ROWS, read_metrics
from jaxtune.train.folder.checkpoint import Checkpointer, CheckpointError, saved_steps
from jaxtune.train.folder.run_folder import CHECKPOINTS

BEST = "best_checkpoint"  # the entry of results.json that names the checkpoint whose weights were exported


class BestEvaluation(TypedDict):
    """The best evaluation of a run, as results.json names it (`best_checkpoint`) and `best_saved` returns it. `jaxtune
    evaluate` says by it which weights it scores."""

    step: int
    """The number of steps done."""
    metric: str
    """The name of the metric, checkpoint.best."""
    value: float
    """Its value."""


def best_saved(output: Path, wanted: CheckpointConfig) -> BestEvaluation | None:
    """The best evaluation of the run in the folder `output` by checkpoint.best and checkpoint.best_is (of `wanted`, the
    section `checkpoint`) among those whose checkpoint exists, on the held-out rows of the last evaluation with that
    metric (or on rows that the file does not name); NaN is never the best, and of equal ones the first is. None if no
    metric is named, or no such evaluation has it. The files are only read, so a run that writes them meanwhile is not
    disturbed. `jaxtune evaluate` chooses by it the checkpoint of a run whose newest one is not exported yet; a run
    itself finds its best one by `BestCheckpoint`."""
    name, path = wanted.best, output / JSONL
    if name is None or not path.exists():
        return None
    lines = [line for line in read_metrics(path) if name in line]
    rows, saved = lines[-1].get(ROWS) if lines else None, saved_steps(output / CHECKPOINTS)
    found = [
        BestEvaluation(step=line["step"], metric=name, value=float(line[name]))
        for line in lines
        if line["step"] in saved and line.get(ROWS, rows) == rows and not math.isnan(line[name])
    ]
    sign = -1 if wanted.best_is_greatest else 1
    return min(found, key=lambda each: sign * each["value"], default=None)  # of equal ones the first, as in a run


@dataclasses.dataclass
class BestCheckpoint:
    """Finds the best evaluation of a run by checkpoint.best, and keeps its checkpoint, whose weights become the run's
    result. `Saver` has one. `resume` finds the best evaluation of earlier processes, `offer` takes a new one if it is
    better, and `weights` reads the weights at the end. With checkpoint.best unset it does nothing."""

    checkpointer: Checkpointer
    """Writes the run's checkpoints; `Checkpointer.best` says which of them to keep."""
    config: CheckpointConfig
    """The section `checkpoint` of the run's config."""
    step: int | None = None
    """The number of steps done at the best evaluation taken so far, whose state is saved; None if there is none."""
    value: float = math.nan
    """The value of the metric in that evaluation."""

    def resume(self, output: Path, start: int, rows: str | None) -> None:
        """Finds the best evaluation of earlier processes of the run, among those whose checkpoint exists, and takes it
        as the best so far, in all processes; with checkpoint.best unset it does nothing. The Trainer calls it at the
        start of each process of the run. A collective call: the first process reads the file for all.

        Args:
          output: the run's folder, whose metrics.jsonl is read.
          start: the number of steps done; evaluations after more steps are left out, as the run repeats these steps.
          rows: what identifies the held-out rows; evaluations of other rows are left out, those that name no rows are
            not.
        """
        if self.config.best is None:
            return
        for step, value in processes.of_first(lambda: self._evaluated(output / JSONL, start, rows)):
            if self._is_better(value):
                self._take(step, value)

    def _evaluated(self, path: Path, start: int, rows: str | None) -> list[tuple[int, float]]:
        """The pairs (step, value of the metric) of the evaluations in the file `path`, as `resume` reads them: of those
        whose checkpoint exists, after at most `start` steps, on the rows `rows` or on rows that the file does not name.
        The values may be NaN. Empty if there is no file."""
        lines, saved = read_metrics(path) if path.exists() else [], self.checkpointer.steps()
        return [
            (line["step"], float(line[self.config.best]))
            for line in lines
            if line["step"] in saved and line["step"] <= start
            if self.config.best in line and line.get(ROWS, rows) == rows
        ]

    def offer(self, step: int, values: Mapping[str, float], save: Callable[[], bool]) -> None:
        """Takes an evaluation as the best one if its metric is better than that of the best one taken so far, and its
        state can be saved. The model before the first step is never taken, and with checkpoint.best unset nothing is
        done. The Saver calls it after each evaluation; while updates are being skipped, its `save` returns False.

        Args:
          step: the number of steps done.
          values: the evaluation's metrics, by name.
          save: saves the state after `step` steps as a checkpoint, unless that exists; returns whether it exists now.
        Raises:
          ConfigError: the evaluation has no such metric.
        """
        name = self.config.best
        if name is None:
            return
        if name not in values:
            found = ", ".join(key for key in values if key.startswith("eval_"))
            raise ConfigError(f"checkpoint.best = {name!r}: the evaluation has no such metric; it has {found}")
        if step and self._is_better(values[name]):
            known = [*self.checkpointer.best]
            self.checkpointer.best.append(step)  # before the save, which removes what need not be kept
            if save():
                self._take(step, values[name])
            else:
                self.checkpointer.best = known

    def weights[T](self, last: T, say: Callable[[str], None]) -> tuple[T, dict[str, BestEvaluation]]:
        """Returns (the trained weights of the best evaluation, read from its checkpoint into the shardings of `last`;
        that evaluation as an entry of results.json, {"best_checkpoint": ...}). If checkpoint.best is unset, no
        evaluation was taken, or its checkpoint cannot be read, it returns (`last`, {}). The Trainer calls it at the end
        of a run, for the weights that the run exports.

        Args:
          last: the trained weights after the last step, a pytree of arrays.
          say: shows a line about which weights they are.
        """
        if self.config.best is None:
            return last, {}
        if self.step is None:
            say(f"checkpoint.best = {self.config.best}: no evaluation has a best value; the last weights are taken")
            return last, {}
        about = f"step {self.step}, where {self.config.best} = {self.value:.4f} was best"
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), last)
        try:
            _, found, _ = self.checkpointer.restore(self.step, like={"state": {"trainable": like}}, partial=True)
        except CheckpointError as error:
            say(f"warning: the weights after {about}, cannot be read, and the last ones are taken: {error}")
            return last, {}
        say(f"the result has the weights after {about}")
        named = BestEvaluation(step=self.step, metric=self.config.best, value=self.value)
        return found["state"]["trainable"], {BEST: named}

    def _is_better(self, value: float) -> bool:
        """Whether `value` of the metric is better than the best one so far: greater or less, as checkpoint.best_is
        says. NaN is never better, nor is an equal one; the first that is not NaN is. `resume` and `offer` ask it."""
        if math.isnan(value) or math.isnan(self.value):
            return not math.isnan(value)
        return value > self.value if self.config.best_is_greatest else value < self.value

    def _take(self, step: int, value: float) -> None:
        """Records the evaluation after `step` steps, with this `value` of the metric, as the best one, and has the
        Checkpointer keep its checkpoint."""
        self.step, self.value = step, float(value)
        if step not in self.checkpointer.best:
            self.checkpointer.best.append(step)
