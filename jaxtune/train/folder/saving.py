"""When a run's state is saved: as the section `checkpoint` of the config says (also at the end of a run, if it asks for
saves at all), after a signal, before an error ends the run, and when a callback asks for it, but never while updates
are being skipped. A save that fails between two steps is reported and made again when the next one is due."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future

from jaxtune.system import processes, shared_errors, waiting
from jaxtune.train.config import CheckpointConfig
from jaxtune.train.display.monitor import Monitor, TrainingStopped
from jaxtune.train.folder.best import BestCheckpoint
from jaxtune.train.folder.checkpoint import Checkpointer, CheckpointError, NoRoom
from jaxtune.train.folder.run_state import write_state
from jaxtune.train.program.step import TrainState
from jaxtune.train.signals import EXIT_SAVED, FINISHING, StopSignal

_DISK_SECONDS = 30.0  # between two looks at the disk


class TrainingInterrupted(RuntimeError):
    """Raised when a signal has ended the run after a finished step. The message says which step is saved: this one, or
    an earlier one if updates were being skipped, or that nothing is saved yet. The same command continues from the
    saved step, or begins anew if there is none. The train command then exits with code 75."""


_WITHOUT_A_SAVE = (TrainingInterrupted, TrainingStopped, CheckpointError)  # saved already, or not to be saved
_OTHERS_SECONDS = 60.0  # that a process which fails waits for the others to save with it


@dataclasses.dataclass
class SavePolicy:
    """Decides when a save is due: after a number of steps, after a number of minutes, or after either if both are set.

    `Saver` has one. `should_save` decides after each step, `time_is_up` between steps, and `saved` records a save. They
    take `now_seconds` from any monotonic clock, such as time.monotonic(). The minutes count from the first call of
    `should_save`, and then from each save.
    """

    every_steps: float | None = None  # whole steps between saves; None or 0: not by steps
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
    """Saves the state of one run while it trains and evaluates. All processes of a run save at the same steps.

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
        state is saved too. False: a run saves only after a signal, before an error ends it, for checkpoint.best, or for
        a callback.
      policy: decides when a save is due.
      saved: the number of steps done in the state that was saved last; `start` before the first save.
      failed: what the last save failed of, until one succeeds; None: it did not.
      best: keeps the checkpoint of the best evaluation (checkpoint.best).
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        config: CheckpointConfig,
        start: int,
        meta: Callable[[int], dict[str, object]],
        monitor: Monitor,
        stop: StopSignal,
    ):
        """Starts the count of minutes to the first save. The class describes the arguments."""
        self.checkpointer, self.meta, self.monitor, self.stop = checkpointer, meta, monitor, stop
        self.enabled = config.saves
        self.policy = SavePolicy(config.every_steps, config.every_minutes)
        self.policy.should_save(start, time.monotonic())
        self.saved = self._before = start
        self.failed: CheckpointError | None = None
        self.best = BestCheckpoint(checkpointer, config)
        self._due = self._warned = self._short = False
        self._ended: int | None = None  # the steps done when an error ended the run
        self._looked = time.monotonic()  # at the disk

    def after_step(self, done: int, state: TrainState, last: bool) -> None:
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

    def poll(self, done: int, state: TrainState) -> None:
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
        due = self._due or self.policy.time_is_up(time.monotonic())
        self._follow(*processes.agree(self._signal(), due), done, state)

    def _signal(self) -> str | None:
        return self.stop.signal_name if self.stop.requested else None

    def _follow(self, signal_name: str | None, due: bool, done: int, state: TrainState) -> None:
        """Saves what all processes agreed on, and raises after a signal."""
        self._due = due
        if signal_name is not None:
            self._save(done, state)
            self.checkpointer.wait()
            processes.all_of(None)  # a barrier: the first process has waited for all files
            kept = "saved" if self.saved == done else f"step {self.saved} is the last one saved"
            kept = kept if self.saved else "nothing is saved yet"
            raise TrainingInterrupted(f"{signal_name} after step {done}; {kept} in {self.checkpointer.folder}")
        if due:
            self.save(done, state)

    @contextlib.contextmanager
    def listening(self, done: int, state: TrainState) -> Iterator[None]:
        """A context of waits, and of the user's code, after `done` steps, while `state`, the TrainState after them, is
        whole: a signal saves it and raises TrainingInterrupted, minutes that are over save it, and a disk that has
        become too full is reported. An exception ends the run, after a save of the state. In a run of several processes
        none acts alone in it: `result` makes each wait for all."""
        alone = processes.count() == 1
        saying = f"saving step {done}, then leaving" if done else "leaving, as no step is done"
        stop = self.stop
        try:
            with (
                stop.announced(saying if alone else FINISHING),
                waiting.listening(
                    functools.partial(self._look, done, state) if alone else lambda: None,
                    stop.arrived if alone else lambda: False,
                    stop.insist,
                    functools.partial(self._leave, done) if alone else None,
                ),
            ):
                yield
        except _WITHOUT_A_SAVE:
            raise
        except BaseException:
            if alone and stop.requested:
                self.poll(done, state)
            if alone:
                self._save_at_an_error(done, state)
            raise
        if alone and stop.requested:  # whatever has caught what a look raised
            self.poll(done, state)

    def _look(self, done: int, state: TrainState) -> None:
        self.poll(done, state)
        now = time.monotonic()
        if now - self._looked > _DISK_SECONDS:
            self._looked, short = now, self.checkpointer.lacks_room(state)
            if short and not self._short:
                self.monitor.progress.print(f"warning: the next save will fail: {short}")
            self._short = short is not None

    def result[T](self, future: Future[T], what: str, done: int, state: TrainState) -> T:
        """What the future of the next step's rows returns or raises (waiting.result). In a run of several processes all
        wait until each has its rows, so that none has given up `state` when one meets a signal or an error."""
        if processes.count() == 1:
            return waiting.result(future, what)

        def failure() -> list | None:
            error = future.exception() if future.done() else None
            return None if error is None else shared_errors.described(error)

        asked = -math.inf  # when a save was due last, which was perhaps not made

        def due() -> bool:
            now = time.monotonic()
            return (self._due or self.policy.time_is_up(now)) and now - asked > _DISK_SECONDS

        while True:
            agreed = processes.meet(future, failure, self._signal, due)
            asked = time.monotonic() if agreed.due else asked
            if agreed.failed is not None:
                self._save_at_an_error(done, state)
                if failure() is not None:
                    future.result()
                raise shared_errors.made(agreed.failed)
            self._follow(agreed.signal_name, agreed.due, done, state)
            if agreed.ready:
                return future.result()

    def in_all[T](self, done: int, state: TrainState, work: Callable[[], T]) -> T:
        """What `work` returns, which each process does alone after `done` steps, and which may fail in one of them: all
        then save and raise. Collective."""
        alone = processes.count() == 1
        try:
            value = work()
        except BaseException as error:
            saves = not isinstance(error, _WITHOUT_A_SAVE)
            said = [shared_errors.described(error), saves]
            found = [said] if alone else processes.all_within(said, _OTHERS_SECONDS) or []
            self._end_in_all([one for one in found if one is not None], done, state)
            raise
        failures = [] if alone else [one for one in processes.all_of(None) if one is not None]
        if failures:
            self._end_in_all(failures, done, state)
            raise shared_errors.made(failures[0][0])
        return value

    def _end_in_all(self, failures: list, done: int, state: TrainState) -> None:
        """Saves before the end, unless one of the failures is not to be saved; none is known if others did not come."""
        self.monitor.callbacks.end()
        if failures and all(saves for _, saves in failures):
            self._save_at_an_error(done, state)

    def _save_at_an_error(self, done: int, state: TrainState) -> None:
        """Saves the state of the last step before an error ends the run, and completes metrics.jsonl; it raises no
        further error."""
        if self._ended == done:
            return
        self._ended = done
        self.monitor.callbacks.end()
        try:
            self._save(done, state)
            self.checkpointer.wait()
        except Exception as error:  # the first error is the one that the user has to see
            self.monitor.progress.print(f"warning: {error}")
        else:
            if self.saved and self.saved == done:
                self.monitor.progress.print(f"step {done} is saved in {self.checkpointer.folder}")

    def _leave(self, done: int, error: BaseException) -> None:
        """Ends the process from the watchdog's thread, because the main thread does not return from the user's code."""
        stopped, folder = isinstance(error, TrainingInterrupted), self.checkpointer.folder.parent
        write_state(folder, "stopped" if stopped else "failed", str(error), self.monitor.run.total_steps)
        self.monitor.logger.close()
        self.checkpointer.unlock()
        again = "The same command continues from there." if stopped else f"Step {done} is not saved."
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            shown = "\x1b[?25h" if os.isatty(2) else ""
            os.write(2, f"{shown}\njaxtune: stopped: {error}. {again}\n".encode())
        os._exit(EXIT_SAVED if stopped else 1)

    def save_for_callback(self, done: int, state: TrainState) -> None:
        """Saves `state`, the TrainState after `done` steps, as `save` does, because a callback asked for it
        (callbacks.Between). If nothing is saved because updates are being skipped, the request stays: a later state is
        saved as soon as steps are finite again. Raises what `save` raises."""
        self._due = True
        self.save(done, state)

    def save(self, done: int, state: TrainState) -> None:
        """Saves `state`, the TrainState after `done` steps, whether a save is due or not, and passes `done` to the
        run's callbacks (Callback.saved), before the files are complete. It does nothing if that state is saved already,
        and nothing while updates are being skipped because steps were not finite, which it prints once; a save that was
        due is then made as soon as they are finite again. A save that fails is reported, and the next one tries again.
        May raise the TrainingStopped of a guard."""
        try:
            self._save(done, state)
        except CheckpointError as error:
            if processes.count() > 1 and not isinstance(error, NoRoom):
                raise  # the others do not know of it
            self._tell(error)
            self.policy.saved(time.monotonic())
            self._due = False

    def _tell(self, error: CheckpointError) -> None:
        """Takes a save that failed for one that was not made."""
        self.failed, self.saved = error, self._before
        self.monitor.progress.print(f"warning: {error}. The run continues, and the next save tries again")

    def _save(self, done: int, state: TrainState) -> None:
        """`save`, which raises the CheckpointError of this save, or of the one before."""
        self.flush(done, state)
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
            self._await_save()
            self._before = self.saved
            self.checkpointer.save(done, {"state": state}, self.meta(done), proven=False)
        self.policy.saved(time.monotonic())
        self.saved, self._due, self._warned, self.failed = done, False, False, None
        if callbacks := self.monitor.callbacks:
            self.in_all(done, state, lambda: callbacks.tell("saved", done))

    def flush(self, done: int, state: TrainState) -> None:
        """Monitor.flush after `done` steps. Collective."""
        if self.monitor.callbacks:
            self.in_all(done, state, self.monitor.flush)
        else:
            self.monitor.flush()

    def _await_save(self) -> None:
        """Waits for the last save. A failure ends a run of several processes, and is reported in one."""
        try:
            self.checkpointer.wait()
        except CheckpointError as error:
            if processes.count() > 1:
                raise
            self._tell(error)

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
        """At the end of a run: waits until the last save is complete. `failed` says if it is not. good: True: the last
        state is known to have finite numbers, and checkpoints beyond checkpoint.keep are removed. False: older ones are
        kept."""
        if self.enabled or self.saved:
            with self.monitor.pause("save", self.saved):
                self._await_save()
        if good and self.failed is None:
            self.checkpointer.confirm()
