"""What reward functions log beside rewards, by TRL's arguments `log_metric` and `log_extra`."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class RewardLog:
    """Collects from any thread what reward functions log.

    ```python
    def right(completions, answer, log_metric, log_extra):
        log_metric("digits", 3.5)  # a metric of the step: the mean of a generation's calls
        log_extra("expected", answer)  # a column of rollouts.jsonl, a value for each answer
        return [1.0] * len(completions)
    ```
    """

    _metrics: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    _columns: dict[str, list[object]] = dataclasses.field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Callable[..., None]]:
        """The functions by their parameters' names."""
        return {"log_metric": self._log_metric, "log_extra": self._log_extra}

    def _log_metric(self, name: str, value: float) -> None:
        self._metrics.setdefault(str(name), []).append(float(value))

    def _log_extra(self, column: str, values: Sequence[object]) -> None:
        self._columns.setdefault(str(column), []).extend(values)

    def taken(self, answers: int) -> tuple[dict[str, float], dict[str, list[object]]]:
        """({metric: mean of finite numbers}, {column: values of `answers`}) since the last call; a column of another
        length is left out, with a warning.
        """
        metrics, columns = self._metrics, self._columns
        self._metrics, self._columns = {}, {}
        means = {}
        for name, values in metrics.items():
            finite = [value for value in values if math.isfinite(value)]
            if finite:
                means[name] = math.fsum(finite) / len(finite)
        for name in [name for name, values in columns.items() if len(values) != answers]:
            logger.warning("log_extra: %s has %d values for %d answers: left out", name, len(columns[name]), answers)
            del columns[name]
        return means, columns
