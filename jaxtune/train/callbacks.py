"""What a user's own code is told while a run goes on."""

from __future__ import annotations

from typing import Any


class Callback:
    """Base of callbacks given to Trainer: overwrite what is wanted. All are called in the loop's thread, between steps;
    what they do is in no step's time only if it is quick, because the device goes on meanwhile.

    What one raises ends the run; TrainingStopped (monitor.py) does so in one line.
    """

    def stepped(self, step: int, metrics: dict[str, Any]) -> None:
        """The numbers of optimizer step `step` (counted from 1) have come, a step or so late: as in metrics.jsonl, but
        for every step. What is put into `metrics` is logged with them."""

    def evaluated(self, step: int, metrics: dict[str, Any]) -> None:
        """An evaluation after `step` steps gave these numbers. What is put into `metrics` is logged with them."""

    def saved(self, step: int) -> None:
        """A checkpoint of the state after `step` steps was handed over to be written."""
