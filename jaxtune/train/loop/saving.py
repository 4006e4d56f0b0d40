"""When a run's state is saved: as `checkpoint` of the config says, after a signal, before an error ends the run, and
for callbacks, but never while updates are skipped. A failed save is reported and tried again when the next is due.
"""

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
from jaxtune.train.callbacks import TrainingStopped
from jaxtune.train.config import CheckpointConfig
from jaxtune.train.folder.best import BestCheckpoint
from jaxtune.train.folder.checkpoint import Checkpointer, CheckpointError, NoRoom
from jaxtune.train.folder.run_state import write_state
from jaxtune.train.loop.monitor import Monitor
from jaxtune.train.program.leaves import Leaves
from jaxtune.train.program.step import TrainState
from jaxtune.train.signals import EXIT_SAVED, FINISHING, StopSignal

_DISK_SECONDS = 30.0  # between two looks at the disk


class TrainingInterrupted(RuntimeError):
    """A signal has ended the run after a finished step; the message says which step is saved. The same command
    continues from there. The train command then exits with code 75.
    """


_WITHOUT_A_SAVE = (TrainingInterrupted, TrainingStopped, CheckpointError)  # saved already, or not to be saved
_LEAVING_SECONDS = 5.0  # for loggers of a process that leaves work that does not return
_OTHERS_SECONDS = 60.0  # that a process which fails waits for the others to save with it


@dataclasses.dataclass
class SavePolicy:
    """Says when a save is due, after steps or minutes. Times are of any monotonic clock; minutes count from the first
    `should_save`, then from each save.
    """

    every_steps: float | None = None  # whole steps between saves; None or 0: not by steps
    every_minutes: float | None = None  # minutes between saves; None or 0: not by time
    _last_seconds: float | None = None  # the time from which the minutes count; None before the first call

    def should_save(self, step: int, now_seconds: float) -> bool:
        """Whether a save is due after `step` steps; once per step. If it is, the save is taken as made."""
        if self._last_seconds is None:
            self._last_seconds = now_seconds
        due = bool(self.every_steps) and step > 0 and step % self.every_steps == 0
        due = due or self.time_is_up(now_seconds)
        if due:
            self._last_seconds = now_seconds
        return due

    def time_is_up(self, now_seconds: float) -> bool:
        """Whether every_minutes have passed since the last save; changes nothing."""
        if not self.every_minutes or self._last_seconds is None:
            return False
        return now_seconds - self._last_seconds >= 60 * self.every_minutes

    def saved(self, now_seconds: float) -> None:
        self._last_seconds = now_seconds


class Saver:
    """Saves the state of one run; all processes save at the same steps. A state is proven once a later update was made,
    or at the end if its numbers are finite; until then earlier checkpoints stay. Nothing is saved while updates are
    skipped, as the weights may be ruined.

      start: steps done when the process starts.
      meta: steps done -> what the checkpoint stores.

    `enabled`: the config asks for saves by steps or minutes; only then the last state is saved, too. `saved`: steps
    done in the last saved state. `failed`: why the last save failed.
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

    def after_step(self, steps_done: int, state: Leaves[TrainState], last: bool) -> None:
        """Saves if due, and raises after a signal; after the last step neither, as final save, evaluation and `poll`
        follow. An update since the last save proves that checkpoint. Raises as `poll`. last: `steps_done` is the run's
        last.
        """
        if self.monitor.applied > self.saved:
            self.checkpointer.confirm()
        self._due = self.policy.should_save(steps_done, time.monotonic()) or self._due
        if not last:
            self.poll(steps_done, state)

    def poll(self, steps_done: int, state: Leaves[TrainState]) -> None:
        """Saves if due; after a signal saves, waits for the files and raises TrainingInterrupted. For whenever the
        state is complete. Collective. Raises as `save`, too.
        """
        due = self._due or self.policy.time_is_up(time.monotonic())
        self._follow(*processes.agree(self._signal(), due), steps_done, state)

    def _signal(self) -> str | None:
        return self.stop.signal_name if self.stop.requested else None

    def _follow(self, signal_name: str | None, due: bool, steps_done: int, state: Leaves[TrainState]) -> None:
        self._due = due
        if signal_name is not None:
            self._save(steps_done, state)
            self.checkpointer.wait()
            processes.all_of(None)  # a barrier: the first process has waited for all files
            kept_words = "saved" if self.saved == steps_done else f"step {self.saved} is the last one saved"
            kept_words = kept_words if self.saved else "nothing is saved yet"
            raise TrainingInterrupted(
                f"{signal_name} after step {steps_done}; {kept_words} in {self.checkpointer.folder}"
            )
        if due:
            self.save(steps_done, state)

    @contextlib.contextmanager
    def listening(self, steps_done: int, state: Leaves[TrainState]) -> Iterator[None]:
        """A context of waits and user's code, while `state` is whole: a signal saves and raises TrainingInterrupted,
        time saves, a full disk is reported, an exception ends the run after a save. Several processes do not act in it;
        `result` makes them agree.
        """
        alone = processes.count() == 1
        saying = f"saving step {steps_done}, then leaving" if steps_done else "leaving, as no step is done"
        stop = self.stop
        try:
            with (
                stop.announced(saying if alone else FINISHING),
                waiting.listening(
                    functools.partial(self._look, steps_done, state) if alone else lambda: None,
                    stop.arrived if alone else lambda: False,
                    stop.insist,
                    functools.partial(self._leave, steps_done) if alone else None,
                ),
            ):
                yield
        except _WITHOUT_A_SAVE:
            raise
        except BaseException:
            if alone and stop.requested:
                self.poll(steps_done, state)
            if alone:
                self._save_at_an_error(steps_done, state)
            raise
        if alone and stop.requested:  # whatever has caught what a look raised
            self.poll(steps_done, state)

    def _look(self, steps_done: int, state: Leaves[TrainState]) -> None:
        self.poll(steps_done, state)
        now_seconds = time.monotonic()
        if now_seconds - self._looked > _DISK_SECONDS:
            self._looked, short = now_seconds, self.checkpointer.lacks_room(state)
            if short and not self._short:
                self.monitor.progress.print(f"warning: the next save will fail: {short}")
            self._short = short is not None

    def result[T](self, future: Future[T], what: str, steps_done: int, state: Leaves[TrainState]) -> T:
        """The future's result. Several processes wait until each has its rows, so that none has given up `state` when
        one meets a signal or an error.

          what: the work in words, for messages. steps_done, state: what is saved if it fails or a signal comes.
        """
        if processes.count() == 1:
            return waiting.result(future, what)

        def failure() -> list | None:
            error = future.exception() if future.done() else None
            return None if error is None else shared_errors.described(error)

        asked_seconds = -math.inf  # when a save was due last, which was perhaps not made

        def due() -> bool:
            now_seconds = time.monotonic()
            return (self._due or self.policy.time_is_up(now_seconds)) and now_seconds - asked_seconds > _DISK_SECONDS

        while True:
            agreed = processes.meet(future, failure, self._signal, due)
            asked_seconds = time.monotonic() if agreed.due else asked_seconds
            if agreed.failed is not None:
                self._save_at_an_error(steps_done, state)
                if failure() is not None:
                    future.result()
                raise shared_errors.exception_of(agreed.failed)
            self._follow(agreed.signal_name, agreed.due, steps_done, state)
            if agreed.ready:
                return future.result()

    def in_all[T](self, steps_done: int, state: Leaves[TrainState], work: Callable[[], T]) -> T:
        """What `work` returns; if it fails in one process, all save and raise. Collective. steps_done, state: what is
        saved.
        """
        alone = processes.count() == 1
        try:
            value = work()
        except BaseException as error:
            saves = not isinstance(error, _WITHOUT_A_SAVE)
            report = [shared_errors.described(error), saves]
            reports = [report] if alone else processes.all_within(report, _OTHERS_SECONDS) or []
            self._end_in_all([failure for failure in reports if failure is not None], steps_done, state)
            raise
        failures = [] if alone else [failure for failure in processes.all_of(None) if failure is not None]
        if failures:
            self._end_in_all(failures, steps_done, state)
            raise shared_errors.exception_of(failures[0][0])
        return value

    def _end_in_all(self, failures: list, steps_done: int, state: Leaves[TrainState]) -> None:
        self.monitor.callbacks.end()
        if failures and all(saves for _, saves in failures):
            self._save_at_an_error(steps_done, state)

    def _save_at_an_error(self, steps_done: int, state: Leaves[TrainState]) -> None:
        """Saves the last step's state before an error ends the run; raises no further error. The watchdog leaves it to
        the run's thread, in which its error is raised again.
        """
        if self._ended == steps_done or not self.monitor.callbacks.in_their_thread:
            return
        self._ended = steps_done
        self.monitor.callbacks.end()
        try:
            self._save(steps_done, state)
            self.checkpointer.wait()
        except Exception as error:  # the first error is the one that the user has to see
            self.monitor.progress.print(f"warning: {error}")
        else:
            if self.saved and self.saved == steps_done:
                self.monitor.progress.print(f"step {steps_done} is saved in {self.checkpointer.folder}")

    def _leave(self, steps_done: int, error: BaseException) -> None:
        """Ends the process from the watchdog's thread, as the main thread does not return from the user's code."""
        stopped, folder = isinstance(error, TrainingInterrupted), self.checkpointer.folder.parent
        write_state(folder, "stopped" if stopped else "failed", str(error), self.monitor.run.total_steps)
        self.monitor.logger.close(_LEAVING_SECONDS)
        self.checkpointer.unlock()
        again = "The same command continues from there." if stopped else f"Step {steps_done} is not saved."
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            show_cursor = "\x1b[?25h" if os.isatty(2) else ""
            os.write(2, f"{show_cursor}\njaxtune: stopped: {error}. {again}\n".encode())
        os._exit(EXIT_SAVED if stopped else 1)

    def save_for_callback(self, steps_done: int, state: Leaves[TrainState]) -> None:
        """`save`; if updates are being skipped, the request stays until steps are finite again."""
        self._due = True
        self.save(steps_done, state)

    def save(self, steps_done: int, state: Leaves[TrainState]) -> None:
        """Saves `state`, unless it is saved or updates are being skipped (then later), and calls Callback.saved before
        the files are complete. A failure is reported, and the next save tries again. May raise TrainingStopped.
        """
        try:
            self._save(steps_done, state)
        except CheckpointError as error:
            if processes.count() > 1 and not isinstance(error, NoRoom):
                raise  # the others do not know of it
            self._tell(error)
            self.policy.saved(time.monotonic())
            self._due = False

    def _tell(self, error: CheckpointError) -> None:
        self.failed, self.saved = error, self._before
        self.monitor.progress.print(f"warning: {error}. The run continues, and the next save tries again")

    def _save(self, steps_done: int, state: Leaves[TrainState]) -> None:
        """`save` that raises the CheckpointError of this save and, in a run of several processes, of the last one."""
        self.flush(steps_done, state)
        if self.saved == steps_done:
            self._due = False
            return
        if self.monitor.skipped_in_row:
            if not self._warned:
                kept_words = f"; step {self.saved} stays" if self.saved else ""
                self.monitor.progress.print(f"step {steps_done}: not saved while updates are being skipped{kept_words}")
            self._warned = True
            return
        with self.monitor.pause("save", steps_done):
            self._await_save()
            self._before = self.saved
            self.checkpointer.save(steps_done, {"state": state.tree}, self.meta(steps_done), proven=False)
        self.policy.saved(time.monotonic())
        self.saved, self._due, self._warned, self.failed = steps_done, False, False, None
        if callbacks := self.monitor.callbacks:
            self.in_all(steps_done, state, lambda: callbacks.tell("saved", steps_done))

    def flush(self, steps_done: int, state: Leaves[TrainState]) -> None:
        if self.monitor.callbacks:
            self.in_all(steps_done, state, self.monitor.flush)
        else:
            self.monitor.flush()

    def _await_save(self) -> None:
        """A failed last save ends a run of several processes, and is reported in one."""
        try:
            self.checkpointer.wait()
        except CheckpointError as error:
            if processes.count() > 1:
                raise
            self._tell(error)

    def evaluated(self, steps_done: int, state: Leaves[TrainState], values: Mapping[str, float]) -> None:
        """Saves `state` if checkpoint.best's metric is the best so far; not at step 0 or while updates are skipped.
        ConfigError if `values` lack it; else as `save`.
        """

        def save() -> bool:
            self.save(steps_done, state)
            return self.saved == steps_done

        self.best.offer(steps_done, values, save)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """A context around all steps: if a guard ends the run and all updates since the last checkpoint were skipped,
        that one goes if one is older.
        """
        try:
            yield
        except TrainingStopped:
            if self.monitor.skipped_in_row and self.monitor.applied <= self.saved:
                self.checkpointer.reject()
            raise

    def finish(self, good: bool) -> None:
        """Waits for the last save. good: the last numbers are finite, so checkpoints beyond checkpoint.keep go."""
        if self.enabled or self.saved:
            with self.monitor.pause("save", self.saved):
                self._await_save()
        if good and self.failed is None:
            self.checkpointer.confirm()
