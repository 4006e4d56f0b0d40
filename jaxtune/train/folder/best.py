"""The best checkpoint of a run, by a metric of its evaluations (checkpoint.best). It follows from metrics.jsonl and the
existing checkpoints, so a resume needs nothing else.
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
from jaxtune.train.display.metrics import JSONL, ROWS, of_rows, read_metrics
from jaxtune.train.folder.checkpoint import Checkpointer, CheckpointError, saved_steps
from jaxtune.train.folder.run_folder import CHECKPOINTS

BEST = "best_checkpoint"  # the entry of results.json that names the checkpoint whose weights were exported


class BestEvaluation(TypedDict):
    """The best evaluation, as results.json names it (`best_checkpoint`)."""

    step: int
    metric: str
    value: float


def best_saved(output: Path, wanted: CheckpointConfig) -> BestEvaluation | None:
    """The best evaluation in the folder `output` by checkpoint.best, among those whose checkpoint exists, on the
    held-out rows of the last one (or unnamed rows); None if there is none. NaN is never best, and the first of equal
    ones is. Reads only, so a run may write meanwhile.
    """
    name, path = wanted.best, output / JSONL
    if name is None or not path.exists():
        return None
    lines = [line for line in read_metrics(path) if name in line]
    rows, saved = lines[-1].get(ROWS) if lines else None, saved_steps(output / CHECKPOINTS)
    evaluations = [
        BestEvaluation(step=line["step"], metric=name, value=float(line[name]))
        for line in lines
        if line["step"] in saved and of_rows(line, rows) and not math.isnan(line[name])
    ]
    sign = -1 if wanted.best_is_greatest else 1
    # Of equal ones the first, as in a run.
    return min(evaluations, key=lambda evaluation: sign * evaluation["value"], default=None)


@dataclasses.dataclass
class BestCheckpoint:
    """Finds a run's best evaluation and keeps its checkpoint, whose weights become the result. Does nothing with
    checkpoint.best unset.
    """

    checkpointer: Checkpointer
    config: CheckpointConfig
    step: int | None = None
    """Steps done at the best evaluation; None if there is none."""
    value: float = math.nan

    def resume(self, output: Path, start: int, rows: str | None) -> None:
        """Takes the best evaluation of earlier processes whose checkpoint exists. Later steps than `start` are
        repeated, so they do not count, nor evaluations of other `rows`. Collective.

          output: the run's folder, whose metrics.jsonl has the evaluations. rows: identity of the held-out rows; None:
          there are none.
        """
        if self.config.best is None:
            return
        for step, value in processes.of_first(lambda: self._evaluated(output / JSONL, start, rows)):
            if self._is_better(value):
                self._take(step, value)

    def _evaluated(self, path: Path, start: int, rows: str | None) -> list[tuple[int, float]]:
        lines, saved = read_metrics(path) if path.exists() else [], self.checkpointer.steps()
        return [
            (line["step"], float(line[self.config.best]))
            for line in lines
            if line["step"] in saved and line["step"] <= start
            if self.config.best in line and of_rows(line, rows)
        ]

    def offer(self, step: int, values: Mapping[str, float], save: Callable[[], bool]) -> None:
        """Takes an evaluation if it is better and its state can be saved; never step 0. save: returns whether the
        checkpoint exists now. ConfigError if `values` lack the metric.
        """
        name = self.config.best
        if name is None:
            return
        if name not in values:
            metric_names = ", ".join(key for key in values if key.startswith("eval_"))
            raise ConfigError(f"checkpoint.best = {name!r}: the evaluation has no such metric; it has {metric_names}")
        if step and self._is_better(values[name]):
            earlier_best = [*self.checkpointer.best]
            self.checkpointer.best.append(step)  # before the save, which removes what need not be kept
            if save():
                self._take(step, values[name])
            else:
                self.checkpointer.best = earlier_best

    def weights[T](self, last: T, say: Callable[[str], None]) -> tuple[T, dict[str, BestEvaluation]]:
        """(the best evaluation's trained weights, in the shardings of `last`; {"best_checkpoint": it}), or (`last`, {})
        if there is none or it cannot be read. say: shows a line about it.
        """
        if self.config.best is None:
            return last, {}
        if self.step is None:
            say(f"checkpoint.best = {self.config.best}: no evaluation has a best value; the last weights are taken")
            return last, {}
        about = f"step {self.step}, where {self.config.best} = {self.value:.4f} was best"
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), last)
        try:
            _, restored, _ = self.checkpointer.restore(self.step, like={"state": {"trainable": like}}, partial=True)
        except CheckpointError as error:
            say(f"warning: the weights after {about}, cannot be read, and the last ones are taken: {error}")
            return last, {}
        say(f"the result has the weights after {about}")
        named = BestEvaluation(step=self.step, metric=self.config.best, value=self.value)
        return restored["state"]["trainable"], {BEST: named}

    def _is_better(self, value: float) -> bool:
        """NaN and an equal value are not better."""
        if math.isnan(value) or math.isnan(self.value):
            return not math.isnan(value)
        return value > self.value if self.config.best_is_greatest else value < self.value

    def _take(self, step: int, value: float) -> None:
        self.step, self.value = step, float(value)
        if step not in self.checkpointer.best:
            self.checkpointer.best.append(step)
