"""The monitor of a run: metrics of every step, speeds, and the guards that stop a run (`Monitor`, which raises
`TrainingStopped`). `Watched` is what it needs to know about the run, and `finished` waits for arrays and takes the
time.

**How the speeds in metrics.jsonl are counted.** The wall clock of a run is divided into steps and pauses, so that each
moment belongs to exactly one of them. A step lasts until the device has finished it, starting at the end of the
previous step or pause. Delays of the host, such as fetching a loss one step late, do not shift these moments, because a
thread that waits for the device takes the times. Pauses are loading, compiling anew, saving, evaluating and profiling.
Each has its own line (`load_seconds`, `compile_seconds`, `save_seconds`, `eval_seconds`, `profile_seconds`) and is not
part of any step. The line of loading also has the times of its parts, which `load_seconds` does not include:
`compile_seconds`, and with several devices `collectives_seconds`, the time that they took to connect. The line of a
pause that compiled programs has the `plan` in words. A line of steps says how many steps its speeds count (`steps`,
those since the previous line) and their mean time (`step_seconds`), so that

    sum of steps x step_seconds + sum of the pauses' seconds = wall clock of the run, up to its last line
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxtune.train.callbacks import Callback, Callbacks
from jaxtune.train.config import TrainConfig
from jaxtune.train.data.batches import BatchSource
from jaxtune.train.display import metrics as m
from jaxtune.train.display.report import measured_lines
from jaxtune.train.planning.devices import memory_peak_bytes
from jaxtune.train.planning.planner import Planner

_SHOWN_STEPS = 10  # the speed on the screen is the mean of this many steps
_FIRST_STEPS = 3  # steps with a gradient, by which adapters that get none are found
_LEARNT = 1e-10  # the square of the gradient of a smaller loss may underflow in float32


class TrainingStopped(ValueError):
    """Raised when a guard (a check of a step's metrics) ends the run: several steps in a row were not finite, nothing
    is trained or an adapter is not, or the first step contradicts the reference (Watched.check_first). Callbacks may
    raise it too. It passes through the training loop; on the way the Saver removes a last checkpoint whose state it
    takes to be bad, if there is an older one. The message says what was seen and, in most cases, what to do."""


def finished(arrays: Any, clock: Callable[[], float] = time.perf_counter) -> float:
    """Waits until the device has computed `arrays` (any pytree), and returns the time in seconds, by `clock`, at that
    moment. A thread of the monitor calls it, so that a step's time does not depend on when the host reads its
    metrics. The error of a failed step is ignored here; it is raised where its metrics are read."""
    with contextlib.suppress(Exception):  # an error of a failed step is raised where its values are read
        jax.block_until_ready(arrays)
    return clock()


@dataclasses.dataclass
class _Work:
    """The work of one or several steps: their number, the seconds that they took, and sums over them of tokens and
    FLOPs. Two are added by +, and `speeds` makes metrics of the sums. The Monitor makes one for each step, and adds
    those since the previous line of metrics.jsonl, for its speeds, and the latest ten, for the speed on the screen."""

    steps: int = 0  # how many steps they are
    seconds: float = 0.0  # their duration in all
    slots: int = 0  # positions of tokens in the rows, padding included
    tokens: int = 0  # tokens, without padding
    trained_tokens: int = 0  # tokens that count in the loss
    flops: float = 0.0  # model FLOPs
    data_wait_seconds: float = 0.0  # time that the host waited for rows

    def __add__(self, other: _Work) -> _Work:
        """The work of both, with every field added; sum(works, _Work()) adds several."""
        return _Work(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def speeds(self, peak_flops: float | None) -> dict[str, Any]:
        """The metrics on speed, {name in metrics.jsonl: value}: by second of the steps "tokens_per_second" (padding
        included), "real_tokens_per_second" (without) and "trained_tokens_per_second", "steps" (their number), the means
        "step_seconds" and "data_wait_seconds", and "mfu" (model FLOPs utilisation). There must be at least one step
        (otherwise ZeroDivisionError). peak_flops: the peak FLOP/s of all devices, needed for mfu; None: unknown, and
        mfu is left out. They are in the lines of metrics.jsonl and of `Watched.history`; the terminal shows only
        "tokens_per_second"."""
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
class Watched:
    """What a Monitor needs to know about its run; the Trainer makes it. A line is the dict of a step's metrics, as
    metrics.jsonl has it, but with the speeds of this step alone."""

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


class Monitor:
    """Processes the metrics of each step, which are fetched one step late so that nothing waits: logs and shows them,
    passes them to callbacks, and applies the guards, which stop a run that trains nothing or diverges.

    It is used as a context. The run's clock starts when it is made. The training loop calls `step_dispatched` after
    each step that it dispatched, and does longer work between steps, such as a save, in the context `pause`.

    Args:
      run: what the Monitor needs to know about the run.
      logger: records the lines of metrics.
      progress: shows the metrics on the terminal.
      finished: waits for a step's metrics and returns the time at which the device had computed them.
      clock: returns the host's time in seconds; `finished` must use the same clock.
    Attributes:
      waiting: steps that were dispatched and not processed: (step, its metrics on the device, its counts, seconds that
        the host waited for its rows, the future of the time at which the device has finished it).
      bad: (step, counted from 1, loss, gradient norm) of the latest steps in a row that were not finite, without
        overflows of the scaled loss of fp16; empty after a finite one. The message of the guard lists them.
      applied: the number of steps done when the latest update was made; before the first update of this process 0, or
        what the Trainer sets, the steps done by earlier processes. The Saver finds by it and skipped_in_row which
        states are good.
      skipped_in_row: the number of updates that were skipped since then.
      seconds: the duration of each processed step of this process, in seconds.
    """

    def __init__(
        self,
        run: Watched,
        logger: m.MetricsLogger,
        progress: m.Progress,
        finished: Callable[[Any], float] = finished,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Starts the run's clock, and makes the thread that takes the times of steps. The class describes the
        arguments."""
        self.run, self.logger, self.progress = run, logger, progress
        self.callbacks = Callbacks(run.callbacks)
        self.waiting: collections.deque[tuple[int, dict, dict, float, Future[float]]] = collections.deque()
        self.bad: list[tuple[int, float, float]] = []
        self.applied = 0  # steps done when the latest update was made
        self.skipped_in_row = 0  # updates skipped since then
        # Adapters whose gradient was zero in every step so far, by their B: that of A is zero as long as B is.
        self._idle = [index for index, name in enumerate(run.trained) if name.endswith("lora.b")]
        self._looked_at = 0  # steps by which _idle was reduced
        self.seconds: list[float] = []  # seconds of each step
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
        """Returns this monitor; its clock runs since it was made."""
        return self

    def __exit__(self, *exc) -> None:
        """Waits for the thread that takes the times of steps, and ends it. Steps that are still waiting are not
        processed here (`flush` does that)."""
        self._stamps.shutdown()

    @contextlib.contextmanager
    def pause(self, name: str, step: int) -> Iterator[dict[str, Any]]:
        """A context for work between steps, such as a save, whose time is not part of any step. It first waits for the
        steps that were dispatched, and processes their metrics. It yields a dict, to which the caller may add metrics.
        At the end it logs a line with these and `{name}_seconds`, the duration of the work. The added metrics that end
        in "_seconds" are durations of parts of the work, and are subtracted from `{name}_seconds`. A pause within
        another (a save in an evaluation) counts in its own line only. If the work raises, no line is logged.

        Args:
          name: what the work is: "load" (with the parts "compile" and, on several devices, "collectives"), "compile"
            (anew, after memory ran out), "save", "eval" or "profile".
          step: the number of steps done.
        Raises:
          TrainingStopped: a guard ends the run because of a step that was waited for.
        """
        self.flush()
        values: dict[str, Any] = {}
        # A pause within another, or within a wait, is timed alone: a save in an evaluation, or while rewards are made.
        within = self._clock() if self._pausing or self._waiting else None
        pausing, self._pausing = self._pausing, True
        try:
            yield values
        finally:
            self._pausing = pausing
        seconds = self.uncounted_seconds() if within is None else self._clock() - within
        parts = sum(value for key, value in values.items() if key.endswith("_seconds"))
        self._counted += seconds
        self._paused += seconds
        self.logger.log(step, values | {f"{name}_seconds": seconds - parts})

    @contextlib.contextmanager
    def planned(self, name: str, step: int) -> Iterator[dict[str, Any]]:
        """The context `pause` for work that compiles programs: its line of metrics also has `plan`, the plan of the
        training step that is in force at the end of the work, in words, a list of lines; the page of a run shows it. It
        yields the dict to which the caller may add metrics. name: what the work is, "load", or "compile" after memory
        ran out in the first step. step: the number of steps done."""
        with self.pause(name, step) as values:
            yield values
            values["plan"] = self.run.planner.lines()

    def uncounted_seconds(self) -> float:
        """Seconds of the run until now that are in no processed step and no ended pause yet. `pause` takes them as its
        duration, unless it is within another, and the Trainer, while it loads, as compile_seconds."""
        return self._clock() - self._counted

    @contextlib.contextmanager
    def data_wait(self) -> Iterator[None]:
        """A context in which the host waits for the rows of the next step. Its time is counted, unless an exception
        ends it, and becomes data_wait_seconds of that step (in metrics.jsonl the mean over the steps of the line). It
        is not subtracted from the step's duration: the device may be busy meanwhile."""
        began, paused, self._waiting = self._clock(), self._paused, True
        try:
            yield
        finally:
            self._waiting = False
        self._data_wait += self._clock() - began - (self._paused - paused)  # a save while it waits is no wait

    def step_dispatched(self, step: int, latest: dict, counts: dict) -> None:
        """Records that a step was dispatched to the device, and processes the metrics of the step before it, unless
        `flush` has done that.

        Args:
          step: the step's number, from 0.
          latest: its metrics as arrays on the device, as StepProgram.update returns them.
          counts: what is known on the host, from Engine.load_step, of which these are read: {"tokens",
            "trained_tokens", "lengths" of its documents, and, if there are any, "metrics": {name: value}, those that
            the source of the rows adds}.
        Raises:
          TrainingStopped: a guard ends the run because of the step before.
        """
        self.waiting.append((step, latest, counts, self._data_wait, self._stamps.submit(self._finished, latest)))
        self._data_wait = 0.0
        if len(self.waiting) > 1:
            self._take()

    def news(self, step: int) -> None:
        """Records the answers that were sampled for `step` (from 0), if any were, tells callbacks, and prints what the
        source of the rows says."""
        if rollouts := self.run.batches.rollouts_at(step):
            self.logger.log_rollouts(step + 1, rollouts)
            self.callbacks.tell("sampled", step + 1, rollouts)
        for text in self.run.batches.news():
            self.progress.print(text)

    def flush(self) -> None:
        """Waits for all dispatched steps and processes their metrics. Pauses and saves begin with it, and the training
        loop calls it after the last step. Raises TrainingStopped if a guard ends the run because of one of them."""
        while self.waiting:
            self._take()

    def _take(self) -> None:
        """Waits for the oldest dispatched step and processes its metrics, in this order: passes them to callbacks,
        which may add to them, appends them to Watched.history, logs them at the steps that metrics.log_every selects
        (and at the last of the run and those that are not finite), shows them, updates `applied` and `skipped_in_row`,
        and applies the guards, which may raise TrainingStopped. After the third step of this process it prints the
        plan's forecast beside what was measured, except on a CPU. The error of a step that failed on the device is
        raised."""
        self._record()
        step, latest, counts, data_wait, stamp = self.waiting.popleft()
        config = self.run.config
        values = jax.device_get(latest)
        norms = values.pop("grad_norms", None)
        now = stamp.result()
        seconds, self._counted = now - self._counted, now
        flops = self.run.flops(counts["lengths"])
        slots = self.run.batches.rows_per_step * self.run.batches.length
        work = _Work(1, seconds, slots, counts["tokens"], counts["trained_tokens"], flops, data_wait)
        done, loss, norm = step + 1, float(values["loss"]), float(values["grad_norm"])
        per_epoch = self.run.batches.steps_per_epoch
        line = {
            **({} if per_epoch is None else {"epoch": round(done / per_epoch, 4)}),
            "loss": loss,
            "grad_norm": norm,
            **({"learning_rate": float(values["learning_rate"])} if "learning_rate" in values else {}),
            self.run.unit: int(values["count"]),
            "skipped": int(values["skipped"]),
            **work.speeds(self.run.peak_flops),
            "peak_memory_bytes": memory_peak_bytes(),
        }
        line |= {key: float(value) for key, value in values["own"].items()}
        logs = done % config.metrics.log_every == 0 or done == self.run.total_steps or not values["finite"]
        line |= self._of_source(counts.get("metrics", {}), logs)
        line |= {key: float(value) for key, value in values.get("aux", {}).items()}
        if config.computes_in == "fp16":
            line["loss_scale"] = float(values["loss_scale"])
        self.skipped_in_row = int(values["skipped_in_row"])
        if not self.skipped_in_row:
            self.applied = done
        self._unrecorded = done, line, work, logs
        try:
            self.callbacks.tell("stepped", done, line)
        finally:
            self._record()
        if len(self.seconds) == 1:  # the first step also loads programs, so the speeds of later lines leave it out
            self._recent.clear()
        self._recent.append(work)
        self.progress.update(
            done,
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
        if len(self.seconds) == 3:
            for text in measured_lines(
                self.run.planner.forecast, self.run.planner.device, self.seconds[1:], line["peak_memory_bytes"]
            ):
                self.progress.print(text)
        self._guard(step, loss, norm, values)
        if norms is not None and values["finite"] and norm > 0.0:
            self._guard_adapters(done, norms)

    def _record(self) -> None:
        """Keeps and logs the step whose callbacks are being called, if any is: also when one of them saves."""
        if self._unrecorded is None:
            return
        (done, line, work, logs), self._unrecorded = self._unrecorded, None
        self.run.history.append({"step": done, **line})
        self._unlogged += work
        if logs:
            self.logger.log(done, line | self._unlogged.speeds(self.run.peak_flops))
            self._unlogged = _Work()

    def _of_source(self, metrics: Mapping[str, float], logs: bool) -> dict[str, float]:
        """The metrics that the source of the rows has of a step; if it `logs`, their means over the steps since the
        previous line, as not every step has a generation of its own."""
        self._generation = dict(metrics) or self._generation
        for name, value in metrics.items():
            self._unlogged_source.setdefault(name, []).append(value)
        if not logs:
            return dict(metrics)
        means = {name: sum(values) / len(values) for name, values in self._unlogged_source.items()}
        self._unlogged_source = {}
        return means

    def _guard_adapters(self, done: int, norms: np.ndarray) -> None:
        """Raises TrainingStopped if the gradient of an adapter was exactly zero in each of the first three steps of
        this process that have a gradient (a finite one that is not zero in all tensors). The loss does not depend on
        the module of such an adapter, so it would never train. Of an adapter only B is looked at, because the gradient
        of A is zero as long as B is.

        It is called once for each step that has a gradient. It does nothing after the third one, or if
        guards.adapters_without_gradient allows such adapters.

        Args:
          done: the number of steps done.
          norms: float32[n], the norm of the gradient of each trainable tensor (in the order of Watched.trained), in a
            step in which some are not zero.
        """
        if self._looked_at == _FIRST_STEPS or self.run.config.guards.adapters_without_gradient:
            return
        self._looked_at += 1
        self._idle = [index for index in self._idle if norms[index] == 0.0]
        if self._looked_at < _FIRST_STEPS or not self._idle:
            return
        names = [self.run.trained[index].removesuffix(".lora.b") for index in self._idle]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        raise TrainingStopped(
            f"step {done}: the gradient of {len(names)} adapters was exactly zero in the first {_FIRST_STEPS} steps, "
            f"so they do not train: {shown}. Leave them out of adapter.target_modules, or set "
            "guards.adapters_without_gradient=true to continue"
        )

    def _guard(self, step: int, loss: float, norm: float, values: dict) -> None:
        """Raises TrainingStopped if the run must end: the gradient is zero although the loss is not, a step that is a
        whole epoch (steps_per_epoch = 1) has no token that is trained on, or the updates of guards.max_nonfinite_in_row
        steps in a row were skipped. If an epoch has more steps, one without such tokens does not end the run. A step
        that was not finite is printed with the places of its first rows, and added to `bad`, which a finite step
        empties. In fp16, nothing is done after a step that was not finite if the loss scale is still above 1: that is
        taken for an overflow of the scaled loss. After step 1 of the run, if it is finite and trains on a token,
        `Watched.check_first` is called, which may raise TrainingStopped too; it is called after no other step.

        Args:
          step: the step's number, from 0.
          loss, norm: the step's loss and gradient norm.
          values: the step's metrics by name, as StepProgram.update returns them, but as numpy arrays on the host.
        """
        done = step + 1
        if values["finite"]:
            self.bad.clear()
            # Rows that are learnt, such as pairs beyond the margin of a hinge loss, have neither loss nor gradient.
            if norm == 0.0 and values["count"] > 0 and abs(loss) > _LEARNT:
                raise TrainingStopped(
                    f"step {done}: the gradient norm is exactly zero, so nothing would be trained. Trainable tensors: "
                    f"{len(self.run.trained)}, first {self.run.trained[0]}"
                )
            if done == 1 and values["count"] > 0:
                self.run.check_first(self.run.history[-1])
            if values["count"] == 0 and self.run.batches.steps_per_epoch == 1:
                raise TrainingStopped(f"step {done}: no token of the whole data set is trained on")
            return
        if self.run.config.computes_in == "fp16" and values["loss_scale"] > 1.0:
            return  # an overflow of the scaled loss, after which the scale was halved, is not an error
        self.bad.append((done, loss, norm))
        sources = self.run.batches.sources_at(step)
        shown = ", ".join(sources[:4]) + (f" and {len(sources) - 4} more" if len(sources) > 4 else "")
        self.progress.print(f"step {done}: loss {loss}, gradient norm {norm}: update skipped; rows {shown}")
        limit = self.run.config.guards.max_nonfinite_in_row
        if int(values["skipped_in_row"]) >= limit:
            history = "; ".join(f"step {s}: loss {a}, gradient norm {b}" for s, a, b in self.bad[-limit:])
            raise TrainingStopped(
                f"{limit} steps in a row were not finite (guards.max_nonfinite_in_row): {history}. None of their "
                "updates was applied. Lower optim.learning_rate, look at the rows named above, or "
                "use precision: bf16 or fp32"
            )
