"""Callbacks: objects of the user's class that a run calls between steps and around evaluations and saves."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxtune.models.decoder import Decoder
from jaxtune.system import waiting
from jaxtune.train.data.batches import Rollout


class TrainingStopped(ValueError):
    """Raised when a guard ends the run: steps in a row were not finite, nothing or an adapter does not train, or the
    first step contradicts the reference. Callbacks may raise it too. The Saver may then remove the last checkpoint.
    """


@dataclasses.dataclass
class Between:
    """What a callback learns and can do after a step was dispatched and before the next one is."""

    step: int
    """Steps dispatched so far."""
    last: bool
    wait: Callable[[], None]
    """Waits until the step's metrics are there and `stepped` was called. The device is idle until the next step."""
    evaluate: Callable[[], float]
    """Evaluates held-out rows (once after a step) and returns the loss; NaN if there is none or nothing to evaluate."""
    save: Callable[[], None]
    """Waits as `wait`, then saves a checkpoint, unless it exists. While updates are skipped, a later state is saved
    instead.
    """
    model: Callable[[], Decoder]
    """The model as it is now. The next step donates its arrays: do not use it after `between` has returned."""
    stopped: bool = False
    """Of several processes only the first one's counts."""

    def stop(self) -> None:
        """Ends the run after this step as if it were the last, with final checkpoint and evaluation."""
        self.stopped = True


class Callback:
    """The base class of callbacks for Trainer; override what you need.

    Methods run in the training loop's thread; a signal interrupts them. During `between` and `stepped` the device
    usually computes, so a quick callback costs no time. An exception ends the run after a save; TrainingStopped ends it
    with a message of one line.
    """

    is_users = True  # False: a signal does not interrupt it

    def between(self, moment: Between) -> None:
        """After each step was dispatched, before its evaluations and saves; its metrics come later, to `stepped`."""

    def stepped(self, step: int, metrics: dict[str, Any]) -> None:
        """The metrics of each step (from 1), about one step after it was dispatched, those of a process's first before
        the next is. Entries added to `metrics` go into Trainer.history, and into metrics.jsonl if that logs the step;
        its speeds are means since its previous line.
        """

    def sampled(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """The answers of a generation, as in rollouts.jsonl; `step` is the first that trains on them."""

    def evaluating(self, step: int, model: Callable[[], Decoder]) -> None:
        """Before an evaluation after `step` steps (0: before the first). May be the first call in a process. The next
        step donates the arrays of what `model` returns.
        """

    def evaluated(self, step: int, metrics: dict[str, Any]) -> None:
        """The metrics of an evaluation; added entries go into metrics.jsonl and Trainer.history. `eval_loss` is missing
        if rows are only answered.
        """

    def saved(self, step: int) -> None:
        """A checkpoint's arrays are on the host; a thread still writes its files."""


@contextlib.contextmanager
def users_callback(callback: object, event: str) -> Iterator[None]:
    """Around a method of a user's callback: an exception names it."""
    name = f"{type(callback).__name__}.{event}"
    try:
        with waiting.users_code(name):
            yield
    except BaseException as error:
        if not any(note.startswith("in the callback ") for note in getattr(error, "__notes__", ())):
            error.add_note(f"in the callback {name}")
        raise


class Callbacks:
    """The callbacks of a run, called in the thread that makes it, and no more after one has failed."""

    def __init__(self, callbacks: Sequence[Callback] = ()):
        self._callbacks, self._thread = tuple(callbacks), threading.get_ident()
        self._late: list[tuple[Callback, str, tuple]] = []
        self._ended = self.telling = False
        self.told: Callable[[], None] = lambda: None  # after a call of all of them
        self.hears: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext  # around their methods

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    @property
    def in_their_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def end(self) -> None:
        """No more calls, as the run ends by an error. Does nothing in another thread."""
        self._ended = self._ended or self.in_their_thread

    def tell(self, event: str, *arguments: object) -> None:
        """Calls a method of each; from another thread, such as a save's, the calls are made later."""
        inherited = getattr(Callback, event)
        hearers = (callback for callback in self._callbacks if getattr(type(callback), event) is not inherited)
        self._late += [(callback, event, arguments) for callback in hearers]
        self.tell_late()

    def tell_late(self) -> None:
        """Makes the calls that other threads asked for; nothing in another thread. Within a call, first those that
        were asked for before it.
        """
        if not self.in_their_thread:
            return
        is_outer, self.telling = not self.telling, True
        try:
            while self._late and not self._ended:
                callback, event, arguments = self._late.pop(0)
                user = users_callback(callback, event) if callback.is_users else contextlib.nullcontext()
                with self.hears(), user:
                    getattr(callback, event)(*arguments)
        finally:
            self.telling = not is_outer
        if is_outer:
            self.told()
