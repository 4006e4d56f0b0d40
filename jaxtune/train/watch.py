"""Looks at every step of a run: its metrics, and when to stop."""

from __future__ import annotations

import collections
import time
from typing import Any

import jax

from jaxtune.train import metrics as m
from jaxtune.train.planning.cost import COMPUTE_DTYPES
from jaxtune.train.report import measured_lines


class TrainingStopped(ValueError):
    """A guard ended the run; the message says what was seen and what to do."""


class Watch:
    """Metrics of each step, fetched one step late so that nothing waits, and the guards that read them."""

    def __init__(self, trainer: Any, logger: m.MetricsLogger, progress: m.Progress):
        self.trainer, self.logger, self.progress = trainer, logger, progress
        self.waiting: collections.deque = collections.deque()
        self.timer = m.StepTimer()
        self.restart()
        self.bad: list[tuple[int, float, float]] = []
        self.seconds: list[float] = []  # of each step
        kind = trainer.mesh.devices.flat[0].device_kind
        dtype = COMPUTE_DTYPES[trainer.config.precision]
        peak = m.device_peak_flops(kind, dtype)
        self.peak = None if peak is None else peak * trainer.mesh.size

    def restart(self) -> None:
        """Leaves what lay between, such as an evaluation, out of the next step's time."""
        self.last = time.perf_counter()
        self.timer.restart()

    def step_dispatched(self, step: int, latest: dict, counts: dict) -> None:
        self.waiting.append((step, latest, counts))
        if len(self.waiting) > 1:
            self._take()

    def flush(self) -> None:
        while self.waiting:
            self._take()

    def _take(self) -> None:
        step, latest, counts = self.waiting.popleft()
        config = self.trainer.config
        values = {key: value for key, value in jax.device_get(latest).items() if key != "grad_norms"}
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        done, loss, norm = step + 1, float(values["loss"]), float(values["grad_norm"])
        slots = config.rows_per_step * self.trainer.batches.length
        line = {
            "epoch": round(done / self.trainer.batches.steps_per_epoch, 4),
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": float(values["learning_rate"]),
            "targets": int(values["targets"]),
            "skipped": int(values["skipped"]),
            "tokens_per_second": slots / seconds,
            "real_tokens_per_second": counts["tokens"] / seconds,
            "trained_tokens_per_second": counts["trained_tokens"] / seconds,
            **self.timer.end_step(),
            "peak_memory_bytes": m.memory_peak_bytes(),
        }
        if self.peak is not None:
            line["mfu"] = self.trainer._flops(counts["tokens"], counts["sum_squared"]) / seconds / self.peak
        line |= {key: float(values[key]) for key in ("router_aux_loss", "router_z_loss") if key in values}
        if config.precision == "fp16":
            line["loss_scale"] = float(values["loss_scale"])
        self.trainer.history.append({"step": done, **line})
        if done % config.metrics.log_every == 0 or done == self.trainer.total_steps or not values["finite"]:
            self.logger.log(done, line)
        self.progress.update(
            done,
            loss=loss,
            learning_rate=line["learning_rate"],
            grad_norm=norm,
            tokens_per_second=line["tokens_per_second"],
            memory_bytes=line["peak_memory_bytes"],
        )
        self.seconds.append(seconds)
        if len(self.seconds) == 3:
            for text in measured_lines(self.trainer.planner, self.seconds[1:], line["peak_memory_bytes"]):
                self.progress.print(text)
        self._guard(step, loss, norm, values)

    def _guard(self, step: int, loss: float, norm: float, values: dict) -> None:
        done = step + 1
        if values["finite"]:
            self.bad.clear()
            if norm == 0.0 and values["targets"] > 0:
                raise TrainingStopped(
                    f"step {done}: the gradient norm is exactly zero, so nothing would be trained. Trainable tensors: "
                    f"{len(self.trainer.names)}, first {self.trainer.names[0]}"
                )
            if values["targets"] == 0 and self.trainer.batches.steps_per_epoch == 1:
                raise TrainingStopped(f"step {done}: no token of the whole data set is trained on")
            return
        if self.trainer.config.precision == "fp16" and values["loss_scale"] > 1.0:
            return  # an overflow of the scaled loss: the scale was halved, as it should
        self.bad.append((done, loss, norm))
        sources = self.trainer.batches.sources_at(step)
        shown = ", ".join(sources[:4]) + (f" and {len(sources) - 4} more" if len(sources) > 4 else "")
        self.progress.print(f"step {done}: loss {loss}, gradient norm {norm}: update skipped; rows {shown}")
        limit = self.trainer.config.guards.max_nonfinite_in_row
        if int(values["skipped_in_row"]) >= limit:
            history = "; ".join(f"step {s}: loss {a}, gradient norm {b}" for s, a, b in self.bad[-limit:])
            raise TrainingStopped(
                f"{limit} steps in a row were not finite (guards.max_nonfinite_in_row): {history}. Nothing of them was "
                "applied. Lower optim.learning_rate, look at the rows named above, or use precision: bf16 or fp32"
            )
