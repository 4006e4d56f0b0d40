"""What a user's own code is told while a run goes on, and what it can have done."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtune.models.decoder import Decoder


@dataclasses.dataclass
class Between:
    """The moment after `step` steps were handed to the device, before the next one is: what can be done in it.

    wait: until the numbers of the step have come, which `stepped` is called with; the device is idle meanwhile.
    evaluate: on the held-out rows, once a step however often it is asked for; `evaluated` is called. save: a
    checkpoint of this state; `saved` is called. model: the model as it is now, whose trained arrays the next step uses
    up. last: whether no step follows anyway.
    """

    step: int
    last: bool
    wait: Callable[[], None]
    evaluate: Callable[[], float]
    save: Callable[[], None]
    model: Callable[[], Decoder]
    stopped: bool = False

    def stop(self) -> None:
        """The run ends here, as if it had no more steps: what is saved and evaluated at its end is."""
        self.stopped = True


class Callback:
    """Base of callbacks given to Trainer: overwrite what is wanted. All are called in the loop's thread, between steps;
    what they do is in no step's time only if it is quick, because the device goes on meanwhile.

    What one raises ends the run; TrainingStopped (monitor.py) does so in one line.
    """

    def between(self, moment: Between) -> None:
        """A step was handed to the device. What `moment` offers comes before what the config asks for at this step."""

    def stepped(self, step: int, metrics: dict[str, Any]) -> None:
        """The numbers of optimizer step `step` (counted from 1) have come, a step or so late: as in metrics.jsonl, but
        for every step. What is put into `metrics` is logged with them."""

    def evaluating(self, step: int, model: Callable[[], Decoder]) -> None:
        """An evaluation after `step` steps begins, perhaps before the first step that this process makes, or without
        one. model: gives what is evaluated, whose trained arrays the next step uses up."""

    def evaluated(self, step: int, metrics: dict[str, Any]) -> None:
        """An evaluation after `step` steps gave these numbers. What is put into `metrics` is logged with them."""

    def saved(self, step: int) -> None:
        """A checkpoint of the state after `step` steps was handed over to be written."""
