"""Callbacks: an object of a user's own class (`Callback`) whose methods a run calls between steps, and what they can
ask the run to do there (`Between`): evaluate, save or stop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtune.models.decoder import Decoder


@dataclasses.dataclass
class Between:
    """What a callback learns and can do after a step was dispatched to the device and before the next one is; an
    argument of `Callback.between`."""

    step: int
    """The number of steps dispatched so far."""
    last: bool
    """Whether this is the last step of the run."""
    wait: Callable[[], None]
    """Waits until the step's metrics are there and `stepped` was called with them. The device is idle meanwhile."""
    evaluate: Callable[[], float]
    """Evaluates the held-out rows and returns the loss, NaN if there is none; `Callback.evaluated` is called. Several
    calls at a step evaluate once."""
    save: Callable[[], None]
    """Saves a checkpoint of the state after this step; `Callback.saved` is called."""
    model: Callable[[], Decoder]
    """Returns the model as it is now. The next step donates its trained arrays, so what it returned must not be used
    after `Callback.between` has returned."""
    stopped: bool = False
    """Whether `stop` was called."""

    def stop(self) -> None:
        """Ends the run after this step as if it were the last one; the final checkpoint and evaluation are made."""
        self.stopped = True


class Callback:
    """The base class of callbacks for Trainer; subclasses override the methods that they need. `between` is called
    after each step was dispatched, and can evaluate, save or stop; `stepped` gets the metrics of a step; `evaluating`
    and `evaluated` are called before and after an evaluation, and `saved` after a checkpoint.

    All methods are called in the thread of the training loop, between steps. The device computes meanwhile, so a quick
    callback costs no time. An exception ends the run; TrainingStopped (monitor.py) ends it with a message of one line.
    """

    def between(self, moment: Between) -> None:
        """Called after each step was dispatched to the device, before the evaluations and saves that the config asks
        for at this step. The step's metrics are not there yet; `stepped` gets them. moment: has the number of the step,
        and functions that evaluate, save or stop the run at it."""

    def stepped(self, step: int, metrics: dict[str, Any]) -> None:
        """Called with the metrics of optimizer step `step` (counted from 1), about one step after it was dispatched.
        They are those of metrics.jsonl, but come for every step. Entries that are added to `metrics` are logged too."""

    def evaluating(self, step: int, model: Callable[[], Decoder]) -> None:
        """Called before the held-out rows are evaluated after `step` steps (0: before the first one). It may be the
        first method that is called in a process. model: a function that returns the model that is evaluated; the next
        step donates its trained arrays, so they must not be used after that step."""

    def evaluated(self, step: int, metrics: dict[str, Any]) -> None:
        """Called with the metrics of an evaluation after `step` steps. Entries that are added to `metrics` are logged
        too."""

    def saved(self, step: int) -> None:
        """Called when a checkpoint of the state after `step` steps was given to the thread that writes it, so its files
        may not be complete yet."""
