"""The end of a run whose evaluations no longer become better (guards.patience)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from jaxtune.system import processes
from jaxtune.system.terminal import say
from jaxtune.train.callbacks import Between, Callback
from jaxtune.train.config import ConfigError
from jaxtune.train.config.sections import EvaluationConfig, GuardConfig
from jaxtune.train.folder.best import is_better
from jaxtune.train.log.metrics import JSONL, evaluations


def waited(count: int, value: float, best: float | None, greatest: bool, min_change: float) -> int:
    """Evaluations in a row, this one included, that were not better by more than `min_change`. count: the number
    before. best: the best value so far; None: there is none. greatest: larger values are better.
    """
    better = is_better(value, best, greatest) and (best is None or abs(value - best) > min_change)
    return 0 if better else count + 1


class EarlyStop(Callback):
    """Ends a run after guards.patience evaluations without improvement; a resumed one continues the count. output: its
    metrics.jsonl has earlier processes' evaluations, of which those of the same `rows` (rows_identity) count.
    """

    def __init__(self, guards: GuardConfig, evaluation: EvaluationConfig, output: Path, rows: str | None):
        self._guards, self._evaluation, self._output, self._rows = guards, evaluation, output, rows
        self._greatest = guards.greatest
        self._best: float | None = None
        self._count = 0
        self._knows = False

    def between(self, moment: Between) -> None:
        if moment.last or not self._evaluation.between(moment.step):
            return
        moment.evaluate()
        if self._count >= (self._guards.patience or math.inf):
            say(
                f"step {moment.step}: {self._guards.metric} did not become better in {self._count} evaluations "
                "(guards.patience)"
            )
            moment.stop()

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        name = self._guards.metric
        if name not in metrics:
            metric_names = ", ".join(key for key in metrics if key.startswith("eval_"))
            raise ConfigError(f"guards.metric = {name!r}: the evaluation has no such metric; it has {metric_names}")
        if not self._knows:
            for value in processes.of_first(lambda: self._before(step)):
                self._hear(value)
            self._knows = True
        self._hear(float(metrics[name]))

    def _before(self, step: int) -> list[float]:
        values = evaluations(self._output / JSONL, self._rows, self._guards.metric)
        return [value for earlier, value in values.items() if earlier < step]

    def _hear(self, value: float) -> None:
        self._count = waited(self._count, value, self._best, self._greatest, self._guards.min_change)
        if is_better(value, self._best, self._greatest):
            self._best = value
