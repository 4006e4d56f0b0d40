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
from jaxtune.train.folder.checkpoint import Checkpointer, CheckpointError, saved_steps
from jaxtune.train.folder.run_folder import CHECKPOINTS
from jaxtune.train.log.metrics import JSONL, ROWS, evaluations, read_metrics

BEST = "best_checkpoint"  # the entry of results.json that names the checkpoint whose weights were exported


class BestEvaluation(TypedDict):
    """The best evaluation, as results.json names it (`best_checkpoint`)."""

    step: int
    metric: str
    value: float


def is_better(value: float, best: float | None, greatest: bool) -> bool:
    """Whether `value` beats the best so far (None: there is none); NaN and an equal one do not. greatest: larger values
    are better, as for accuracies; False: smaller ones.
    """
    return not math.isnan(value) and (best is None or (value > best if greatest else value < best))


def best_of(evaluations: Mapping[int, float], greatest: bool) -> int | None:
    """The step of the best of {step: value}, of equal ones the first; None if there is none."""
    best = None
    for step, value in evaluations.items():
        if is_better(value, None if best is None else evaluations[best], greatest):
            best = step
    return best


def best_saved(output: Path, wanted: CheckpointConfig) -> BestEvaluation | None:
    """The best evaluation in the folder `output` by checkpoint.best, among those whose checkpoint exists, on the
    held-out rows of the last one (or unnamed rows); None if there is none. Reads only, so a run may write meanwhile.
    """
    name, path = wanted.best, output / JSONL
    if name is None or not path.exists():
        return None
    rows = next((line.get(ROWS) for line in reversed(read_metrics(path)) if name in line), None)
    saved = saved_steps(output / CHECKPOINTS)
    values = {step: value for step, value in evaluations(path, rows, name).items() if step in saved}
    best = best_of(values, wanted.best_is_greatest)
    return None if best is None else BestEvaluation(step=best, metric=name, value=values[best])


@dataclasses.dataclass
class BestCheckpoint:
    """Finds a run's best evaluation and keeps its checkpoint, whose weights become the result. Does nothing with
    checkpoint.best unset.
    """

    checkpointer: Checkpointer
    config: CheckpointConfig
    step: int | None = None
    """Steps done at the best evaluation; None if there is none."""
    value: float | None = None

    def resume(self, output: Path, start: int, rows: str | None) -> None:
        """Takes the best evaluation of earlier processes whose checkpoint exists. Later steps than `start` are
        repeated, so they do not count, nor evaluations of other `rows`. Collective.

          output: the run's folder, whose metrics.jsonl has the evaluations. rows: identity of the held-out rows; None:
          there are none.
        """
        if (name := self.config.best) is None:
            return

        def evaluated() -> list[tuple[int, float]]:
            steps = [step for step in self.checkpointer.steps() if step <= start]
            return [(step, value) for step, value in evaluations(output / JSONL, rows, name).items() if step in steps]

        for step, value in processes.of_first(evaluated):
            if is_better(value, self.value, self.config.best_is_greatest):
                self._take(step, value)

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
        if step and is_better(values[name], self.value, self.config.best_is_greatest):
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
        if self.step is None or self.value is None:
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

    def _take(self, step: int, value: float) -> None:
        self.step, self.value = step, float(value)
        if step not in self.checkpointer.best:
            self.checkpointer.best.append(step)
