"""Callbacks: an object of a user's own class (`Callback`) whose methods a run calls between steps, with metrics, and
before and after evaluations and after saves. One of them, `between`, gets a `Between`, by which it can ask the run to
evaluate, save or stop."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxtune.models.decoder import Decoder
from jaxtune.system import waiting
from jaxtune.train.data.batches import Rollout


@dataclasses.dataclass
class Between:
    """What a callback learns and can do after a step was dispatched to the device and before the next one is; an
    argument of `Callback.between`."""

    step: int
    """The number of steps dispatched so far."""
    last: bool
    """Whether this is the last step of the run."""
    wait: Callable[[], None]
    """Waits until the step's metrics are there and `stepped` was called with them. The device is idle until the next
    step is dispatched."""
    evaluate: Callable[[], float]
    """Evaluates the held-out rows and returns the loss, NaN if there is none (the rows are only answered);
    `Callback.evaluating` and `Callback.evaluated` are called. The run evaluates at most once after a step, so further
    calls return the same loss. Without anything to evaluate it returns NaN and calls neither."""
    save: Callable[[], None]
    """Saves a checkpoint of the state after this step, and then `Callback.saved` is called. It first waits as `wait`
    does. Nothing is saved if that checkpoint exists already. While updates are skipped because numbers are not finite,
    nothing is saved either; the state after a later step is then saved, as soon as numbers are finite again."""
    model: Callable[[], Decoder]
    """Returns the model as it is now. The next step donates its trained arrays, so what it returned must not be used
    after `Callback.between` has returned."""
    stopped: bool = False
    """Whether `stop` was called. In a run of several processes only that of the first process counts."""

    def stop(self) -> None:
        """Ends the run after this step as if it were the last one: the final checkpoint and evaluation are made if the
        config asks for them, and the run returns the trained model. A callback calls it to stop early; jaxtune.compat
        does so when a script's callback sets should_training_stop."""
        self.stopped = True


class Callback:
    """The base class of callbacks for Trainer; subclasses override the methods that they need. `between` is called
    after each step was dispatched, and can evaluate, save or stop; `stepped` gets the metrics of a step; `evaluating`
    and `evaluated` are called before and after an evaluation, and `saved` after a checkpoint.

    All methods are called in the thread of the training loop, between steps, in which a signal interrupts them. During
    `between` and `stepped` the device usually computes, so that a quick callback costs no time; during the others it is
    idle. An exception ends the run, after the state is saved; TrainingStopped (monitor.py) ends it with a message of
    one line.
    """

    is_users = True  # False: a signal does not interrupt it

    def between(self, moment: Between) -> None:
        """Called after each step was dispatched to the device, before the evaluations and saves that the config asks
        for at this step. The step's metrics are not there yet; `stepped` gets them. moment: has the number of steps
        dispatched, and functions that evaluate, save or stop the run after this step. In this base class it does
        nothing."""

    def stepped(self, step: int, metrics: dict[str, Any]) -> None:
        """Called with the metrics of optimizer step `step` (counted from 1), about one step after it was dispatched. It
        is called for every step; metrics.jsonl has only the steps that metrics.log_every selects, the last one, and
        those whose numbers are not finite, and its speeds are means over the steps since the previous line. Entries
        that are added to `metrics` go into Trainer.history, and into metrics.jsonl if that has the step. It is for
        callbacks that log or watch the training loss; in this base class it does nothing."""

    def sampled(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Called with the answers of a generation, as rollouts.jsonl has them, after `step` was dispatched, the first
        that trains on them. In this base class it does nothing."""

    def evaluating(self, step: int, model: Callable[[], Decoder]) -> None:
        """Called before the held-out rows are evaluated after `step` steps (0: before the first one). It may be the
        first method that is called in a process. model: a function that returns the model that is evaluated. The next
        step donates the model's trained arrays, so they must not be used once that step is dispatched. In this base
        class it does nothing."""

    def evaluated(self, step: int, metrics: dict[str, Any]) -> None:
        """Called with the metrics of an evaluation after `step` steps, such as eval_loss. Entries that are added to
        `metrics` go into metrics.jsonl and Trainer.history too. `eval_loss` is missing if the rows are only answered.
        In this base class it does nothing."""

    def saved(self, step: int) -> None:
        """Called when the arrays of a checkpoint of the state after `step` steps were copied to the host. A thread
        writes the files, which may not be complete yet. A callback that reads the files must wait for them itself. In
        this base class it does nothing."""


@contextlib.contextmanager
def users_callback(callback: object, event: str) -> Iterator[None]:
    """Around a method of a user's callback: it is the user's code, and an exception names it."""
    name = f"{type(callback).__name__}.{event}"
    try:
        with waiting.users_code(name):
            yield
    except BaseException as error:
        if not any(note.startswith("in the callback ") for note in getattr(error, "__notes__", ())):
            error.add_note(f"in the callback {name}")
        raise


class Callbacks:
    """The callbacks of a run, which are called in the thread that makes it, and no more after one has failed."""

    def __init__(self, callbacks: Sequence[Callback] = ()):
        self._callbacks, self._thread = tuple(callbacks), threading.get_ident()
        self._late: list[tuple[str, tuple]] = []
        self._ended = False
        self.hears: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext  # around their methods

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def end(self) -> None:
        """Has no more of them called, as the run ends by an error."""
        self._ended = True

    def tell(self, event: str, *arguments: object) -> None:
        """Calls a method of each. In another thread, that of a save while the run is in the user's code, the call is
        made later."""
        self._late.append((event, arguments))
        if threading.get_ident() != self._thread:
            return
        while self._late and not self._ended:
            event, arguments = self._late.pop(0)
            for callback in self._callbacks:
                if getattr(type(callback), event) is getattr(Callback, event):
                    continue
                user = users_callback(callback, event) if callback.is_users else contextlib.nullcontext()
                with self.hears(), user:
                    getattr(callback, event)(*arguments)
