"""When a run's state is saved: as the section `checkpoint` of the config says (also at the end of a run, and when rows
cannot be loaded, if it asks for saves at all), after a signal, and when a callback asks for it, but never while updates
are being skipped. `SavePolicy` decides when a save is due, and `Saver` makes it; after a signal it raises
`TrainingInterrupted`."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxtune.system import processes
from jaxtune.train.config import CheckpointConfig
from jaxtune.train.display.monitor import Monitor, TrainingStopped
from jaxtune.train.folder.best import BestCheckpoint
from jaxtune.train.folder.checkpoint import Checkpointer
from jaxtune.train.program.step import TrainState
from jaxtune.train.signals import StopSignal


class TrainingInterrupted(RuntimeError):
    """Raised when a signal has ended the run after a finished step. The message says which step is saved: this one, or
    an earlier one if updates were being skipped, or that nothing is saved yet. The same command continues from the
    saved step, or begins anew if there is none. `Saver.poll` raises it, and the train command then exits with code
    75."""


@dataclasses.dataclass
class SavePolicy:
    """Decides when a save is due: after a number of steps, after a number of minutes, or after either if both are set.

    `Saver` has one. `should_save` decides after each step, `time_is_up` between steps, and `saved` records a save. They
    take `now_seconds` from any monotonic clock, such as time.monotonic(). The minutes count from the first call of
    `should_save`, and then from each save.
    """

    every_steps: int | None = None  # steps between saves; None or 0: not by steps
    every_minutes: float | None = None  # minutes between saves; None or 0: not by time
    _last_seconds: float | None = None  # the time from which the minutes count; None before the first call

    def should_save(self, step: int, now_seconds: float) -> bool:
        """Whether to save when `step` optimizer steps are done, at the time now_seconds: if every_steps divides `step`
        (not at step 0), or every_minutes have passed since the last save. It is called once per step. The first call
        starts the count of minutes; if it returns True, it takes the save as made, and counts them from now."""
        if self._last_seconds is None:
            self._last_seconds = now_seconds
        due = bool(self.every_steps) and step > 0 and step % self.every_steps == 0
        due = due or self.time_is_up(now_seconds)
        if due:
            self._last_seconds = now_seconds
        return due

    def time_is_up(self, now_seconds: float) -> bool:
        """Whether at the time now_seconds `every_minutes` have passed since the last save; False if every_minutes is
        not set, or before the first `should_save`. `Saver.poll` asks it, also during an evaluation, and `should_save`
        does after each step. Unlike `should_save` it changes nothing."""
        if not self.every_minutes or self._last_seconds is None:
            return False
        return now_seconds - self._last_seconds >= 60 * self.every_minutes

    def saved(self, now_seconds: float) -> None:
        """Records that a save was made at the time now_seconds, due or not, so that the minutes are counted from it."""
        self._last_seconds = now_seconds


class Saver:
    """Saves the state of one run while it trains and evaluates. All processes of a run save at the same steps. The
    training loop (run.Run) calls `after_step` after each step, `poll` during an evaluation and after the last one,
    `evaluated` after each evaluation, `save_for_callback` if a callback asks for a save, and `finish` at the end; the
    steps run in the context `guarded`. All saves are made by `save`; if the attribute `enabled` is True, the loop calls
    it after the last step, too, and before an error in loading rows ends the run.

    A saved state is known to be good once a later update was made, or at the end of the run if its last numbers are
    finite (`finish`). Until then earlier checkpoints are kept (Checkpointer.confirm). Nothing is saved while steps are
    not finite and their updates are skipped, because the weights may be ruined already.

    Args:
      checkpointer: writes the checkpoints.
      config: the section `checkpoint` of the run's config, with every_steps and every_minutes.
      start: the number of optimizer steps done when the process starts; if it is not 0, a checkpoint of them exists.
      meta: maps a number of steps done to the mapping that its checkpoint stores with the arrays.
      monitor: says which updates were made and which were skipped.
      stop: says whether a signal asked the run to stop.
    Attributes:
      enabled: whether the config asks for saves after steps or minutes (every_steps, every_minutes). Only then the last
        state is saved too. False: a run saves only after a signal, for checkpoint.best, or for a callback.
      policy: decides when a save is due.
      saved: the number of steps done in the state that was saved last; `start` before the first save.
      best: keeps the checkpoint of the best evaluation (checkpoint.best).
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        config: CheckpointConfig,
        start: int,
        meta: Callable[[int], dict[str, Any]],
        monitor: Monitor,
        stop: StopSignal,
    ):
        """Starts the count of minutes to the first save. The class describes the arguments."""
        self.checkpointer, self.meta, self.monitor, self.stop = checkpointer, meta, monitor, stop
        self.enabled = bool(config.every_steps or config.every_minutes)
        self.policy = SavePolicy(config.every_steps, config.every_minutes)
        self.policy.should_save(start, time.monotonic())
        self.saved = start
        self.best = BestCheckpoint(checkpointer, config)
        self._due = self._warned = False

    def after_step(self, done: int, state: Any, last: bool) -> None:
        """Called after each step: saves if a save is due, and raises if a signal came. After the last step it does
        neither, because the final save (if `enabled`), the last evaluation and `poll` follow in this order; a save that
        was due stays due. If an update was made since the last save, that checkpoint is known to be good
        (Checkpointer.confirm), also after the last step.

        Args:
          done: the number of optimizer steps done.
          state: the TrainState after them.
          last: whether this was the last step of the run.
        Raises:
          TrainingInterrupted: a signal came before the last step; the state was saved if possible.
          TrainingStopped, CheckpointError: as `save` raises them.
        """
        if self.monitor.applied > self.saved:
            self.checkpointer.confirm()
        self._due = self.policy.should_save(done, time.monotonic()) or self._due
        if not last:
            self.poll(done, state)

    def poll(self, done: int, state: Any) -> None:
        """Saves if a save is due. Called whenever the state is complete: after a step, between two batches of an
        evaluation, and at the end of the run. If a signal came, saves the state, waits until its files are complete,
        and raises. A collective call: all processes of a run agree here on whether to save or to stop.

        Args:
          done: optimizer steps done.
          state: the TrainState after them.
        Raises:
          TrainingInterrupted: a signal came; the state was saved, unless updates are being skipped.
          TrainingStopped, CheckpointError: as `save` raises them.
        """
        stop = self.stop
        due = self._due or self.policy.time_is_up(time.monotonic())
        signal_name, self._due = processes.agree(stop.signal_name if stop.requested else None, due)
        if signal_name is not None:
            self.save(done, state)
            self.checkpointer.wait()
            processes.all_of(None)  # a barrier: the first process has waited for all files
            kept = "saved" if self.saved == done else f"step {self.saved} is the last one saved"
            kept = kept if self.saved else "nothing is saved yet"
            raise TrainingInterrupted(f"{signal_name} after step {done}; {kept} in {self.checkpointer.folder}")
        if self._due:
            self.save(done, state)

    def save_for_callback(self, done: int, state: TrainState) -> None:
        """Saves `state`, the TrainState after `done` steps, as `save` does, because a callback asked for it
        (callbacks.Between). If nothing is saved because updates are being skipped, the request stays: a later state is
        saved as soon as steps are finite again. Raises what `save` raises."""
        self._due = True
        self.save(done, state)

    def save(self, done: int, state: Any) -> None:
        """Saves `state`, the TrainState after `done` steps, whether a save is due or not, and passes `done` to the
        run's callbacks (Callback.saved), before the files are complete. The other methods and run.Run call it. It does
        nothing if that state is saved already. It saves nothing either while updates are being skipped because steps
        were not finite, and prints so once; a save that was due is then made as soon as they are finite again. It first
        waits for the metrics of all steps, and may raise the TrainingStopped of a guard, or the CheckpointError of this
        save or the one before. The files are written in a thread (Checkpointer.save)."""
        self.monitor.flush()
        if self.saved == done:
            self._due = False
            return
        if self.monitor.skipped_in_row:
            if not self._warned:
                kept = f"; step {self.saved} stays" if self.saved else ""
                self.monitor.progress.print(f"step {done}: not saved while updates are being skipped{kept}")
            self._warned = True
            return
        with self.monitor.pause("save", done):
            self.checkpointer.save(done, {"state": state}, self.meta(done), proven=False)
        for callback in self.monitor.run.callbacks:
            callback.saved(done)
        self.policy.saved(time.monotonic())
        self.saved, self._due, self._warned = done, False, False

    def evaluated(self, done: int, state: TrainState, values: Mapping[str, float]) -> None:
        """Called after an evaluation: saves `state`, the TrainState after `done` steps, if checkpoint.best names a
        metric that is better than in the best evaluation taken so far (`BestCheckpoint.offer`), and `done` is not 0.
        With checkpoint.best unset it does nothing. While updates are being skipped nothing is saved, and the
        evaluation is not taken. values: the evaluation's metrics, by name. Raises ConfigError if that metric is not
        among them, and what `save` raises."""

        def save() -> bool:
            """Saves the state unless updates are being skipped; returns whether it is saved now."""
            self.save(done, state)
            return self.saved == done

        self.best.offer(done, values, save)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """A context around all steps of a run (run.Run.steps). If a guard ends the run in it (TrainingStopped), and all
        updates since the last checkpoint were skipped, its state is taken to be bad: the checkpoint is removed if there
        is an older one (Checkpointer.reject), which is then the newest. The exception passes on."""
        try:
            yield
        except TrainingStopped:
            if self.monitor.skipped_in_row and self.monitor.applied <= self.saved:
                self.checkpointer.reject()
            raise

    def finish(self, good: bool) -> None:
        """Called at the end of a run, or before an error in loading rows ends it: waits until the last save is
        complete, and raises its CheckpointError if it failed. good: True: the last state is known to have finite
        numbers, and checkpoints beyond checkpoint.keep are removed. False: older ones are kept."""
        if self.enabled or self.saved:
            with self.monitor.pause("save", self.saved):
                self.checkpointer.wait()
        if good:
            self.checkpointer.confirm()
