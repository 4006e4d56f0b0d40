"""Looks at every step of a run: its metrics, its speed, and when to stop.

**What the speeds in metrics.jsonl count.** The wall clock of a run is divided into steps and what stands between them,
each moment in one of them. A step lasts until the device has finished it, from where the step before it ended or, after
a pause, the pause; the host's own delays, such as fetching a loss one step late, move nothing, because a thread that
waits for the device stamps the moments. Pauses are compiling, loading, saving, evaluating and profiling: each has a
line of its own (`compile_seconds`, `load_seconds`, `save_seconds`, `eval_seconds`, `profile_seconds`) and is in no
step; where programs were compiled, that line has the `plan` in words too, and `collectives_seconds`, that several
devices took to connect. A line of steps says how many of them its
speeds count (`steps`, those since the line before) and their mean (`step_seconds`), so that

    sum of steps x step_seconds + sum of the pauses' seconds = wall clock of the run, to its last line
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxtune.train.callbacks import Callback
from jaxtune.train.config import TrainConfig
from jaxtune.train.data.batches import Batches
from jaxtune.train.display import metrics as m
from jaxtune.train.display.report import measured_lines
from jaxtune.train.planning.devices import memory_peak_bytes
from jaxtune.train.planning.planner import Planner

_SHOWN_STEPS = 10  # that the speed on the screen is a mean of
_LEARNT = 1e-10  # a loss whose gradient may be too small for float32 to square


class TrainingStopped(ValueError):
    """A guard ended the run; the message says what was seen and what to do."""


def finished(arrays: Any, clock: Callable[[], float] = time.perf_counter) -> float:
    """Waits until the device has computed `arrays`; returns the moment."""
    with contextlib.suppress(Exception):  # of the step that failed: it is raised where its values are read
        jax.block_until_ready(arrays)
    return clock()


@dataclasses.dataclass
class _Work:
    """Steps, the time they took and what was done in it; speeds are of one or of several."""

    steps: int = 0
    seconds: float = 0.0
    slots: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    flops: float = 0.0
    data_wait_seconds: float = 0.0

    def __add__(self, other: _Work) -> _Work:
        return _Work(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def speeds(self, peak_flops: float | None) -> dict[str, Any]:
        """The fields of a line."""
        seconds = max(self.seconds, 1e-9)  # of a clock that did not move
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
    """What a Monitor knows of the run that it watches.

    total_steps: of the run. batches: of its steps. unit: what a step's loss is a mean of (Objective.unit). trained:
    names of the trainable tensors. flops: lengths of a step's documents -> model FLOPs of it.
    peak_flops: of all devices together, a second; None where it is not known. history: is given every step's line.
    check_first: is given that of the run's first step, and may raise TrainingStopped.
    """

    config: TrainConfig
    total_steps: int
    batches: Batches
    unit: str
    trained: Sequence[str]
    flops: Callable[[np.ndarray], float]
    peak_flops: float | None
    planner: Planner
    history: list[dict[str, Any]]
    callbacks: Sequence[Callback] = ()
    check_first: Callable[[dict[str, Any]], None] = lambda line: None


class Monitor:
    """Metrics of each step, fetched one step late so that nothing waits, and the guards that read them.

    Use as a context, which begins the run's clock.

    Args:
      finished: waits for a step's metrics and returns the moment at which the device had them.
      clock: the moments of the host, of the same clock.
    """

    def __init__(
        self,
        run: Watched,
        logger: m.MetricsLogger,
        progress: m.Progress,
        finished: Callable[[Any], float] = finished,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.run, self.logger, self.progress = run, logger, progress
        self.waiting: collections.deque[tuple[int, dict, dict, float, Future[float]]] = collections.deque()
        self.bad: list[tuple[int, float, float]] = []
        self.applied = 0  # steps done up to the latest whose update was made
        self.skipped_in_row = 0  # updates not made since
        self.seconds: list[float] = []  # of each step
        self._finished, self._clock = finished, clock
        self._stamps = ThreadPoolExecutor(1, "clock")
        self._pausing = False
        self._counted = clock()  # all before this moment is in a step or a pause
        self._data_wait = 0.0  # of the step that comes next
        self._unlogged = _Work()
        self._recent: collections.deque[_Work] = collections.deque(maxlen=_SHOWN_STEPS)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exc) -> None:
        self._stamps.shutdown()

    @contextlib.contextmanager
    def pause(self, name: str, step: int) -> Iterator[dict[str, Any]]:
        """What is done inside is in no step: it gets a line of its own, `{name}_seconds` and what is put into the dict.

        Seconds put into the dict are of a part of it, and taken off its own. The steps before it are waited for. step:
        those done.
        """
        self.flush()
        values: dict[str, Any] = {}
        within = self._clock() if self._pausing else None  # a pause in another, such as a save in an evaluation
        self._pausing = True
        yield values
        seconds = self.uncounted_seconds() if within is None else self._clock() - within
        self._pausing = within is not None
        parts = sum(value for key, value in values.items() if key.endswith("_seconds"))
        self._counted += seconds
        self.logger.log(step, values | {f"{name}_seconds": seconds - parts})

    @contextlib.contextmanager
    def planned(self, name: str, step: int) -> Iterator[dict[str, Any]]:
        """A pause that compiles: its line says the plan in force, in words."""
        with self.pause(name, step) as values:
            yield values
            values["plan"] = self.run.planner.lines()

    def uncounted_seconds(self) -> float:
        """Since the last step or pause ended."""
        return self._clock() - self._counted

    @contextlib.contextmanager
    def data_wait(self) -> Iterator[None]:
        """The host waits for the rows of the next step; the device may be busy meanwhile."""
        began = self._clock()
        yield
        self._data_wait += self._clock() - began

    def step_dispatched(self, step: int, latest: dict, counts: dict) -> None:
        self.waiting.append((step, latest, counts, self._data_wait, self._stamps.submit(self._finished, latest)))
        self._data_wait = 0.0
        if len(self.waiting) > 1:
            self._take()

    def flush(self) -> None:
        while self.waiting:
            self._take()

    def _take(self) -> None:
        step, latest, counts, data_wait, stamp = self.waiting.popleft()
        config = self.run.config
        values = {key: value for key, value in jax.device_get(latest).items() if key != "grad_norms"}
        now = stamp.result()
        seconds, self._counted = now - self._counted, now
        flops = self.run.flops(counts["lengths"])
        slots = self.run.batches.rows_per_step * self.run.batches.length
        work = _Work(1, seconds, slots, counts["tokens"], counts["trained_tokens"], flops, data_wait)
        done, loss, norm = step + 1, float(values["loss"]), float(values["grad_norm"])
        line = {
            "epoch": round(done / self.run.batches.steps_per_epoch, 4),
            "loss": loss,
            "grad_norm": norm,
            **({"learning_rate": float(values["learning_rate"])} if "learning_rate" in values else {}),
            self.run.unit: int(values["count"]),
            "skipped": int(values["skipped"]),
            **work.speeds(self.run.peak_flops),
            "peak_memory_bytes": memory_peak_bytes(),
        }
        line |= {key: float(value) for key, value in values["own"].items()}
        line |= {key: float(values[key]) for key in ("router_aux_loss", "router_z_loss") if key in values}
        if config.precision == "fp16":
            line["loss_scale"] = float(values["loss_scale"])
        for callback in self.run.callbacks:
            callback.stepped(done, line)
        self.run.history.append({"step": done, **line})
        self._unlogged += work
        if done % config.metrics.log_every == 0 or done == self.run.total_steps or not values["finite"]:
            self.logger.log(done, line | self._unlogged.speeds(self.run.peak_flops))
            self._unlogged = _Work()
        if len(self.seconds) == 1:  # the first step also loads programs: it is shown alone, and then no more
            self._recent.clear()
        self._recent.append(work)
        self.progress.update(
            done,
            loss=loss,
            learning_rate=line.get("learning_rate"),
            grad_norm=norm,
            tokens_per_second=sum(self._recent, _Work()).speeds(None)["tokens_per_second"],
            memory_bytes=line["peak_memory_bytes"],
        )
        self.seconds.append(seconds)
        if len(self.seconds) == 3:
            for text in measured_lines(
                self.run.planner.forecast, self.run.planner.device, self.seconds[1:], line["peak_memory_bytes"]
            ):
                self.progress.print(text)
        self.skipped_in_row = int(values["skipped_in_row"])
        if not self.skipped_in_row:
            self.applied = done
        self._guard(step, loss, norm, values)

    def _guard(self, step: int, loss: float, norm: float, values: dict) -> None:
        done = step + 1
        if values["finite"]:
            self.bad.clear()
            # What is learnt, such as pairs beyond the margin of a hinge, has neither loss nor gradient.
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
        if self.run.config.precision == "fp16" and values["loss_scale"] > 1.0:
            return  # an overflow of the scaled loss: the scale was halved, as it should
        self.bad.append((done, loss, norm))
        sources = self.run.batches.sources_at(step)
        shown = ", ".join(sources[:4]) + (f" and {len(sources) - 4} more" if len(sources) > 4 else "")
        self.progress.print(f"step {done}: loss {loss}, gradient norm {norm}: update skipped; rows {shown}")
        limit = self.run.config.guards.max_nonfinite_in_row
        if int(values["skipped_in_row"]) >= limit:
            history = "; ".join(f"step {s}: loss {a}, gradient norm {b}" for s, a, b in self.bad[-limit:])
            raise TrainingStopped(
                f"{limit} steps in a row were not finite (guards.max_nonfinite_in_row): {history}. Nothing of them was "
                "applied. Lower optim.learning_rate, look at the rows named above, or use precision: bf16 or fp32"
            )
