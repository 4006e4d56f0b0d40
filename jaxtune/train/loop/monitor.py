"""The monitor of a run: metrics of every step, speeds, and the guards that stop a run.

**How speeds are counted.** The wall clock is divided into steps and pauses. A step lasts from the end of the previous
step or pause until the device has finished it; a thread that waits for the device takes these times, so that delays of
the host do not shift them. Pauses are loading, compiling anew, saving, evaluating and profiling, each with a line of
its own (`load_seconds`, which excludes its parts `compile_seconds` and `collectives_seconds`, ...). A line of steps has
their number since the previous line (`steps`) and their mean time (`step_seconds`), so that

    sum of steps x step_seconds + sum of the pauses' seconds = wall clock of the run, up to its last line
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxtune.models.programs import ahead
from jaxtune.system import timing
from jaxtune.train.callbacks import Callback, Callbacks, TrainingStopped
from jaxtune.train.config import TrainConfig
from jaxtune.train.data.batches import BatchSource
from jaxtune.train.log import metrics as m
from jaxtune.train.planning.devices import memory_peak_bytes
from jaxtune.train.planning.plan_text import measured_lines
from jaxtune.train.planning.planner import Planner

_SHOWN_STEPS = 10  # the speed on the screen is the mean of this many steps
_MEASURED_SECONDS = 2.0  # of steps after the first, from which their median is the speed: a run's first ones are slow
_FIRST_STEPS = 3  # steps with a gradient, by which adapters that get none are found


def finished(arrays: Any, clock: Callable[[], float] = time.perf_counter) -> float:
    """Waits until the device has computed `arrays`, and returns the time. A failed step's error is ignored here."""
    with contextlib.suppress(Exception):  # an error of a failed step is raised where its values are read
        jax.block_until_ready(arrays)
    return clock()


@dataclasses.dataclass
class _Work:
    """The work of one or several steps; works are added by +."""

    steps: int = 0  # how many steps they are
    seconds: float = 0.0  # their duration in all
    slots: int = 0  # positions of tokens in the rows, padding included
    tokens: int = 0  # tokens, without padding
    trained_tokens: int = 0  # tokens that count in the loss
    flops: float = 0.0  # model FLOPs
    data_wait_seconds: float = 0.0  # time that the host waited for rows

    def __add__(self, other: _Work) -> _Work:
        return _Work(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def speeds(self, peak_flops: float | None) -> dict[str, Any]:
        """Metrics on speed, such as tokens_per_second (padding included) and mfu; peak_flops: FLOP/s of all devices."""
        seconds = max(self.seconds, 1e-9)  # the clock may not have moved
        speeds = {
            "tokens_per_second": self.slots / seconds,
            "real_tokens_per_second": self.tokens / seconds,
            "trained_tokens_per_second": self.trained_tokens / seconds,
            "steps": self.steps,
            "step_seconds": self.seconds / self.steps,
            "data_wait_seconds": self.data_wait_seconds / self.steps,
        }
        return speeds if peak_flops is None else speeds | {"mfu": self.flops / seconds / peak_flops}


@dataclasses.dataclass(frozen=True)
class MonitoredRun:
    """What a Monitor needs to know about its run. A line is a step's metrics with the speeds of this step alone."""

    config: TrainConfig  # the run's
    total_steps: int  # optimizer steps of the whole run
    batches: BatchSource  # the source of the rows of the steps
    unit: str  # what a step's loss is a mean over, such as "tokens" (Objective.unit)
    trained: Sequence[str]  # names of the trainable tensors
    flops: Callable[[np.ndarray], float]  # maps the lengths of a step's documents to its model FLOPs
    peak_flops: float | None  # the peak FLOP/s of all devices; None: unknown
    planner: Planner  # of the training step; it has the plan in words, and its forecast
    history: list[dict[str, Any]]  # every step's line, with its "step", is appended to it
    callbacks: Sequence[Callback] = ()  # each gets every step's line
    # called with the line of the first step of the whole run, if the step is finite and trains on a token; raises
    # TrainingStopped if that step contradicts the reference of a preference objective (references.first_check)
    check_first: Callable[[dict[str, Any]], None] = lambda line: None
    # why a step with such a line may have no gradient (Objective.zero_gradient)
    zero_gradient: Callable[[Mapping[str, float]], str | None] = lambda line: None


class Monitor:
    """Fetches the metrics of each step one step late, so that nothing waits, but of the first step at once (Run); logs
    and shows them, passes them to callbacks, and applies the guards.

    The run's clock starts when it is made. Call `step_dispatched` after each dispatched step, and do longer work
    between steps within `pause`.

    Args:
      finished: waits for a step's metrics, and returns the time by `clock`.
    Attributes:
      waiting: (step, metrics on the device, counts, seconds of waiting for rows, future of the time at which the device
        has finished it) of dispatched steps.
      bad: (step from 1, loss, gradient norm) of the latest steps in a row that were not finite, without fp16's
        overflows.
      applied: the steps done at the latest update, from which the Saver knows which states are good.
      skipped_in_row: updates skipped since then.
      seconds: of each step of this process.
    """

    def __init__(
        self,
        run: MonitoredRun,
        logger: m.MetricsLogger,
        progress: m.Progress,
        finished: Callable[[Any], float] = finished,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.run, self.logger, self.progress = run, logger, progress
        self.callbacks = Callbacks(run.callbacks)
        self.callbacks.told = self._raise_late
        self.waiting: collections.deque[tuple[int, dict, dict, float, Future[float]]] = collections.deque()
        self.bad: list[tuple[int, float, float]] = []
        self.applied = 0  # steps done when the latest update was made
        self.skipped_in_row = 0  # updates skipped since then
        # Adapters whose gradient was zero in every step so far, by their B: that of A is zero as long as B is.
        self._idle = [index for index, name in enumerate(run.trained) if name.endswith("lora.b")]
        self._looked_at = 0  # steps by which _idle was reduced
        self._moved = False  # whether a step had a gradient
        self._said_zero = False  # whether one without was named
        self.seconds: list[float] = []  # seconds of each step
        self._measured = False  # whether the plan's prediction was compared with them
        self._peak_before = 0  # bytes of device memory at the peak of loading and compiling
        self._unraised: BaseException | None = None  # of a step that another thread took
        self._raised_in: types.TracebackType | None = None  # that error's traceback
        self._finished, self._clock = finished, clock
        self._stamps = ThreadPoolExecutor(1, "clock")
        self._pausing = self._waiting = False
        self._counted = clock()  # all time before this moment is counted in a step or a pause
        self._paused = 0.0  # seconds of all pauses
        self._data_wait = 0.0  # seconds that the host waited for the rows of the next step
        self._unlogged = _Work()
        self._unrecorded: tuple[int, dict[str, Any], _Work, bool] | None = None
        self._generation: dict[str, float] = {}  # the metrics of the latest generation of sampled answers
        self._unlogged_source: dict[str, list[float]] = {}  # those that the source had since the last line
        self._recent: collections.deque[_Work] = collections.deque(maxlen=_SHOWN_STEPS)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exc) -> None:
        """Does not process waiting steps: see `flush`."""
        self._stamps.shutdown()

    @contextlib.contextmanager
    def pause(self, name: str, step: int) -> Iterator[dict[str, Any]]:
        """Work between steps, such as a save, that is part of no step. Processes dispatched steps first, which may
        raise TrainingStopped; logs a line with `{name}_seconds` at the end, unless the work raises.

        The yielded dict takes more metrics of the line; those named ..._seconds are parts of the work, and subtracted.
        A pause within another counts in its own line only.
          name: "load", "compile", "save", "eval" or "profile".
          step: the steps done.
        """
        self.flush()
        values: dict[str, Any] = {}
        # A pause within another, or within a wait, is timed alone: a save in an evaluation, or while rewards are made.
        inner_start = self._clock() if self._pausing or self._waiting else None
        pausing, self._pausing = self._pausing, True
        try:
            with timing.phase(name):
                yield values
        finally:
            self._pausing = pausing
        seconds = self.uncounted_seconds() if inner_start is None else self._clock() - inner_start
        part_seconds = sum(value for key, value in values.items() if key.endswith("_seconds"))
        self._counted += seconds
        self._paused += seconds
        self.logger.log(step, values | {f"{name}_seconds": seconds - part_seconds})
        self.logger.flush()

    @contextlib.contextmanager
    def planned(self, name: str, step: int) -> Iterator[dict[str, Any]]:
        """A `pause` that compiles programs: its line also has `plan`, in words."""
        with self.pause(name, step) as values:
            yield values
            values["plan"] = self.run.planner.lines()

    def uncounted_seconds(self) -> float:
        """Seconds until now in no processed step and no ended pause."""
        return self._clock() - self._counted

    @contextlib.contextmanager
    def data_wait(self) -> Iterator[None]:
        """Waiting for the rows of the next step: its data_wait_seconds, which stay in the step's duration, because the
        device may be busy meanwhile.
        """
        start_time, paused, self._waiting = self._clock(), self._paused, True
        try:
            with timing.phase("wait", "rows"):
                yield
        finally:
            self._waiting = False
        self._data_wait += self._clock() - start_time - (self._paused - paused)  # a save while it waits is no wait

    def step_dispatched(self, step: int, latest: dict, counts: dict) -> None:
        """Records a dispatched step, and processes the one before it, which may raise TrainingStopped.

        step: its number, from 0.
        latest: its metrics on the device.
        counts: host values: "tokens", "trained_tokens", "lengths" of documents, and perhaps the source's "metrics".
        """
        self.waiting.append((step, latest, counts, self._data_wait, self._stamps.submit(self._finished, latest)))
        self._data_wait = 0.0
        self._raise_late()
        if len(self.waiting) > 1:
            self._take()

    def news(self, step: int) -> None:
        """Records the answers that were sampled for `step` (from 0), tells callbacks, and prints the source's
        remarks.
        """
        if rollouts := self.run.batches.rollouts_at(step):
            self.logger.log_rollouts(step + 1, rollouts)
            self.callbacks.tell("sampled", step + 1, rollouts)
        for text in self.run.batches.news():
            self.progress.print(text)

    def begin_steps(self) -> None:
        """Of loading and compiling, whose peak of memory is not the steps'."""
        self._peak_before = memory_peak_bytes()

    def flush(self) -> None:
        """Waits for all dispatched steps, processes them and waits until their lines are written; may raise
        TrainingStopped. Any thread may call it, and the callbacks' one raises later what another has raised.
        """
        self._raise_late()
        while self.waiting:
            self._take()
        self.logger.flush()

    def _raise_late(self) -> None:
        """Raises the error of a step that another thread took; once in the callbacks' thread, when all are told."""
        in_their_thread = self.callbacks.in_their_thread
        if (error := self._unraised) is None or (in_their_thread and self.callbacks.telling):
            return
        try:
            raise error.with_traceback(self._raised_in)  # which would grow each time
        finally:
            if in_their_thread:
                self._unraised = None
                self.callbacks.tell_late()

    def _take(self) -> None:
        """Processes the oldest dispatched step, and raises its error."""
        try:
            self._process()
        except BaseException as error:
            if not self.callbacks.in_their_thread:
                self._unraised, self._raised_in = error, error.__traceback__
            raise

    def _process(self) -> None:
        """Callbacks, then history, log, screen, guards. In a callback another thread may process the next step."""
        self._record()
        step, latest, counts, data_wait, stamp = self.waiting.popleft()
        config = self.run.config
        with timing.phase("wait", "the device"):
            values = jax.device_get(latest)
        ahead.end()
        norms = values.pop("grad_norms", None)
        now = stamp.result()
        seconds, self._counted = now - self._counted, now
        flops = self.run.flops(counts["lengths"])
        slots = self.run.batches.rows_per_step * self.run.batches.length
        work = _Work(1, seconds, slots, counts["tokens"], counts["trained_tokens"], flops, data_wait)
        steps_done, loss, norm = step + 1, float(values["loss"]), float(values["grad_norm"])
        per_epoch = self.run.batches.steps_per_epoch
        line = {
            **({} if per_epoch is None else {"epoch": round(steps_done / per_epoch, 4)}),
            "loss": loss,
            "grad_norm": norm,
            **({"learning_rate": float(values["learning_rate"])} if "learning_rate" in values else {}),
            self.run.unit: int(values["count"]),
            "skipped": int(values["skipped"]),
            **work.speeds(self.run.peak_flops),
            "peak_memory_bytes": memory_peak_bytes(),
        }
        line |= {key: float(value) for key, value in values["own"].items()}
        logs = steps_done % config.metrics.log_every == 0 or steps_done == self.run.total_steps or not values["finite"]
        line |= self._of_source(counts.get("metrics", {}), logs)
        line |= {key: float(value) for key, value in values.get("aux", {}).items()}
        if config.computes_in == "fp16":
            line["loss_scale"] = float(values["loss_scale"])
        self.skipped_in_row = int(values["skipped_in_row"])
        if not self.skipped_in_row:
            self.applied = steps_done
        self._unrecorded = steps_done, line, work, logs
        try:
            self.callbacks.tell("stepped", steps_done, line)
        finally:
            self._record()
        if len(self.seconds) == 1:  # the first step also loads programs, so the speeds of later lines leave it out
            self._recent.clear()
        self._recent.append(work)
        self.progress.update(
            steps_done,
            loss=loss,
            learning_rate=line.get("learning_rate"),
            grad_norm=norm,
            tokens_per_second=sum(self._recent, _Work()).speeds(None)["tokens_per_second"],
            memory_bytes=line["peak_memory_bytes"],
            reward=self._generation.get("reward"),
            all_equal=self._generation.get("frac_reward_zero_std") == 1.0,
        )
        for text in self.run.batches.remarks(step, line):
            self.progress.print(text)
        self.seconds.append(seconds)
        if not self._measured and len(self.seconds) >= 3 and sum(self.seconds[1:]) >= _MEASURED_SECONDS:
            self._measured = True
            planner = self.run.planner
            seconds = [] if self.run.batches.needs_model else self.seconds[1:]
            peak = line["peak_memory_bytes"]
            for text in measured_lines(planner.forecast, planner.device, seconds, peak, peak > self._peak_before):
                self.progress.print(text)
        self._guard(step, loss, norm, values, line)
        if norms is not None and values["finite"] and norm > 0.0:
            self._guard_adapters(steps_done, norms)

    def _record(self) -> None:
        """Keeps and logs the step whose callbacks are being called, if any: also when one of them saves."""
        if self._unrecorded is None:
            return
        (steps_done, line, work, logs), self._unrecorded = self._unrecorded, None
        self.run.history.append({"step": steps_done, **line})
        self._unlogged += work
        if logs:
            self.logger.log(steps_done, line | self._unlogged.speeds(self.run.peak_flops))
            self._unlogged = _Work()

    def _of_source(self, metrics: Mapping[str, float], logs: bool) -> dict[str, float]:
        """A step's metrics of the rows' source; if it `logs`, means since the last line: not every step has a
        generation.
        """
        self._generation = dict(metrics) or self._generation
        for name, value in metrics.items():
            self._unlogged_source.setdefault(name, []).append(value)
        if not logs:
            return dict(metrics)
        means = {name: sum(values) / len(values) for name, values in self._unlogged_source.items()}
        self._unlogged_source = {}
        return means

    def _guard_adapters(self, steps: int, norms: np.ndarray) -> None:
        """TrainingStopped if an adapter's gradient, `norms` float32[n], was zero in the first three steps with any."""
        if self._looked_at == _FIRST_STEPS or self.run.config.guards.adapters_without_gradient:
            return
        self._looked_at += 1
        self._idle = [index for index in self._idle if norms[index] == 0.0]
        if self._looked_at < _FIRST_STEPS or not self._idle:
            return
        names = [self.run.trained[index].removesuffix(".lora.b") for index in self._idle]
        listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        raise TrainingStopped(
            f"step {steps}: the gradient of {len(names)} adapters was exactly zero in the first {_FIRST_STEPS} steps, "
            f"so they do not train: {listed}. Leave them out of adapter.target_modules, or set "
            "guards.adapters_without_gradient=true to continue"
        )

    def _guard_zero(self, nth: int, line: Mapping[str, float]) -> None:
        """TrainingStopped for a step without a gradient, unless its objective knows why, or an earlier step had one, so
        that the weights train and its rows alone give none.
        """
        why = self.run.zero_gradient(line)
        if why is None and not self._moved:
            raise TrainingStopped(
                f"step {nth}: the gradient norm is exactly zero, so nothing would be trained. Trainable tensors: "
                f"{len(self.run.trained)}, first {self.run.trained[0]}"
            )
        if not self._said_zero and (why is None or abs(line["loss"]) > 0.0):
            self._said_zero = True
            self.progress.print(f"step {nth}: the gradient norm is exactly zero: {why or 'its rows give no gradient'}")

    def _guard(self, step: int, loss: float, norm: float, values: dict, line: dict[str, Any]) -> None:
        """TrainingStopped if the run must end, by a step's metrics and its line. In fp16 an overflow is no error."""
        nth = step + 1
        if values["finite"]:
            self.bad = [later for later in self.bad if later[0] > nth]
            if norm == 0.0 and values["count"] > 0:
                self._guard_zero(nth, line)
            self._moved |= norm > 0.0
            if nth == 1 and values["count"] > 0:
                self.run.check_first(line)
            if values["count"] == 0 and self.run.batches.steps_per_epoch == 1:
                raise TrainingStopped(f"step {nth}: no token of the whole data set is trained on")
            return
        if self.run.config.computes_in == "fp16" and values["loss_scale"] > 1.0:
            return  # an overflow of the scaled loss, after which the scale was halved, is not an error
        self.bad = sorted([*self.bad, (nth, loss, norm)])
        sources = self.run.batches.sources_at(step)
        listed = ", ".join(sources[:4]) + (f" and {len(sources) - 4} more" if len(sources) > 4 else "")
        self.progress.print(f"step {nth}: loss {loss}, gradient norm {norm}: update skipped; rows {listed}")
        limit = self.run.config.guards.max_nonfinite_in_row
        if int(values["skipped_in_row"]) >= limit:
            history = "; ".join(f"step {s}: loss {a}, gradient norm {b}" for s, a, b in self.bad[-limit:])
            raise TrainingStopped(
                f"{limit} steps in a row were not finite (guards.max_nonfinite_in_row): {history}. None of their "
                "updates was applied. Lower optim.learning_rate, look at the rows named above, or "
                "use precision: bf16 or fp32"
            )
