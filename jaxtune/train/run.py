"""The loop of a run: its steps, and what stands between them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jaxtune.models.decoder import Decoder
from jaxtune.models.placement import partition
from jaxtune.profile import capture
from jaxtune.system import processes
from jaxtune.train.answer_metrics import SAMPLES, Answered, AnswerMetrics
from jaxtune.train.callbacks import Between
from jaxtune.train.config import EvaluationConfig
from jaxtune.train.data.batches import Batch, Batches
from jaxtune.train.data.packing import Documents
from jaxtune.train.display import metrics as m
from jaxtune.train.display.monitor import Monitor
from jaxtune.train.folder.saving import Saver
from jaxtune.train.planning.phases import phase
from jaxtune.train.program.programs import Engine, LoadedStep, Programs
from jaxtune.train.program.step import Sums, TrainState


@dataclasses.dataclass(frozen=True)
class Profile:
    """`steps` steps to trace, 0 for none, from the one with number `start` of this process on, into `folder`. meta:
    what the trace says of the run."""

    folder: Path
    steps: int
    start: int
    meta: Callable[[], dict[str, Any]]

    def lacking(self, left: int) -> str | None:
        """What of it a process with `left` steps to make will not trace, in words; None if it traces all."""
        traced = min(self.steps, max(left - self.start, 0))
        if traced == self.steps:
            return None
        found = f"only {traced} of profile.steps = {self.steps}" if traced else "no step"
        remedy = "" if traced or left == 1 else f"; set it below {left}"
        return (
            f"warning: the profile will hold {found}: {left} {'step is' if left == 1 else 'steps are'} left, of which "
            f"the first profile.start = {self.start} are not traced{remedy}"
        )


def is_owed(wanted: EvaluationConfig, start: int, total_steps: int, output: Path, rows: str | None) -> bool:
    """Whether a process that begins after `start` steps has to evaluate first: because it is due before the first step,
    or was due after the last one of a process that was interrupted before it was done, or had other rows. rows: their
    identity; None: there are none."""
    if rows is None:
        return False
    if start == 0:
        return wanted.at_start
    due = wanted.after_last(start) if start >= total_steps else wanted.between(start)
    return due and not processes.of_first(lambda: start in _evaluated_steps(output / m.JSONL, rows))


def _evaluated_steps(path: Path, rows: str) -> set[int]:
    """Steps of the evaluations of these rows in a metrics.jsonl, those without a loss too."""
    lines = m.read_metrics(path) if path.exists() else []
    found = [line for line in lines if "eval_loss" in line or m.ROWS in line]
    return {line["step"] for line in found if line.get(m.ROWS, rows) == rows}


def rows_identity(documents: Documents | None, answers: AnswerMetrics | None) -> str | None:
    """What tells the rows of an evaluation from others; None without rows."""
    if documents is not None:
        return documents.identity
    return None if answers is None else answers.identity


class _StepRows:
    """The rows of each step, on the device: loaded while the step before is computed, unless their source has to see
    the model that it leads to.

    Args:
      total_steps: of the run. model: gives the model of a state.
    """

    def __init__(
        self, engine: Engine, pool: ThreadPoolExecutor, total_steps: int, model: Callable[[TrainState], Decoder]
    ):
        self._engine, self._pool, self._total_steps, self._model = engine, pool, total_steps, model
        self._loading: tuple[int, Future[LoadedStep]] | None = None

    def of(self, step: int, state: TrainState) -> LoadedStep:
        """As Engine.load_step. state: that the step begins with."""
        if self._engine.batches.sees_model:
            return self._engine.load_step(step, lambda: self._model(state))
        if self._loading is None or self._loading[0] != step:
            self.load(step)
        assert self._loading is not None
        loaded = self._loading[1].result()
        self.load(step + 1)
        return loaded

    def load(self, step: int) -> None:
        """Begins to load a step, if the run has it and its source does not see the model; again, if it was loaded."""
        if step < self._total_steps and not self._engine.batches.sees_model:
            self._loading = step, self._pool.submit(self._engine.load_step, step)


@dataclasses.dataclass(frozen=True)
class Run:
    """What the loop works with.

    total_steps: of the run, from 0. owed: whether an evaluation comes before the first step that this process makes.
    held_out: gives the batches of an evaluation by the plan in force, or None. model: gives the model with the
    trainable tensors of a state. answers: measures answers to held-out rows, or None.
    """

    engine: Engine
    monitor: Monitor
    saver: Saver
    total_steps: int
    evaluation: EvaluationConfig
    owed: bool
    held_out: Callable[[], Batches | None]
    profile: Profile
    model: Callable[[Any], Decoder]
    answers: AnswerMetrics | None

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.held_out() is not None or self.answers is not None

    def steps(self, programs: Programs, state: TrainState, sums: Sums, frozen, start: int) -> tuple[TrainState, int]:
        """Makes all steps from `start` on, or those up to where a callback ends the run; returns (the last state, steps
        done). `state` and `sums` are donated.

        Raises:
          TrainingInterrupted, TrainingStopped: a signal came, or a guard refused to go on.
        """
        engine, monitor, saver, progress = self.engine, self.monitor, self.saver, self.monitor.progress
        profile = self.profile

        def at(step: int) -> Programs:
            return engine.at(programs, step)

        losses: dict[int, float] = {}  # of the evaluations: a callback may ask for one that is due anyway

        def evaluate(step: int) -> float:
            if step not in losses:
                between = functools.partial(saver.poll, step, state) if step else lambda: None
                losses[step] = self.evaluate(at(step).evaluate, state, frozen, step, between)
            return losses[step]

        if self.owed:
            evaluate(start)
        tracing, done = False, start
        remedy = "the same command goes on from what is saved; a smaller memory.budget_gb leaves more to fragments"
        with (
            saver.guarded(),
            phase("step", remedy),
            ThreadPoolExecutor(1, "batches") as pool,
            contextlib.ExitStack() as trace,
        ):
            rows = _StepRows(engine, pool, self.total_steps, lambda state: self.model(state.trainable))
            for step in range(start, self.total_steps):
                with monitor.data_wait(), self._saved_at_an_error(done, state):
                    parts, counts = rows.of(step, state)
                if profile.steps and step - start == profile.start:
                    with monitor.pause("profile", step):
                        m.decorate("the profile", lambda: trace.enter_context(self._capture(at(step))))  # noqa: B023
                    tracing = True
                with jax.profiler.StepTraceAnnotation("train", step_num=step):  # a profile counts steps by them
                    if step == start:
                        planned = engine.planner.plan
                        again = functools.partial(monitor.planned, "compile", start)
                        programs, sums = engine.first_step(
                            programs, sums, state, frozen, parts, step, progress.print, again
                        )
                        if engine.planner.plan != planned:
                            rows.load(step + 1)  # in micro-batches of the new plan
                    else:
                        sums = engine.accumulate(at(step), sums, state, frozen, parts[: counts["filled"]])
                    state, sums, latest = programs.update(state, sums)
                done = step + 1
                monitor.step_dispatched(step, latest, counts)
                for text in engine.batches.news():
                    progress.print(text)
                stopped = self._between(done, evaluate, saver, state)
                if tracing and (step - start == profile.start + profile.steps - 1 or done == self.total_steps):
                    with monitor.pause("profile", done):
                        m.decorate("the profile", trace.close)
                    tracing = False
                saver.after_step(done, state, last=done == self.total_steps)
                if done == self.total_steps or stopped:
                    monitor.flush()
                if self.evaluation.between(done) and done < self.total_steps:
                    evaluate(done)
                if stopped:
                    progress.print(f"step {done}: a callback ends the run")
                    break
            if saver.enabled:
                saver.save(done, state)
            if skipped := monitor.skipped_in_row:
                progress.print(f"warning: the last {skipped} updates were skipped, as their numbers were not finite")
            loss = evaluate(done) if self.evaluation.after_last(done) and self.evaluates else math.nan
            has_loss = self.evaluation.after_last(done) and self.held_out() is not None
            good = math.isfinite(loss) if has_loss else self._is_finite(at(done), sums, state, frozen, parts)
            saver.poll(done, state)
            saver.finish(good)
            if not good:
                progress.print("warning: the loss of the trained weights is not finite")
        return state, done

    @contextlib.contextmanager
    def _saved_at_an_error(self, done: int, state: TrainState) -> Iterator[None]:
        """An error inside, of rows that cannot be read, ends the run; what was trained before is saved. Of several
        processes the others do not know of it, and a save is made by all: the last checkpoint stays."""
        try:
            yield
        except Exception:
            if self.saver.enabled and processes.count() == 1 and done > self.saver.saved:
                self.saver.save(done, state)
                self.saver.finish(good=False)
            raise

    def _between(self, done: int, evaluate: Callable[[int], float], saver: Saver, state: TrainState) -> bool:
        """Lets the callbacks do what they want after `done` steps; whether one of them ends the run."""
        moment = Between(
            done,
            done == self.total_steps,
            wait=self.monitor.flush,
            evaluate=lambda: evaluate(done),
            save=lambda: saver.save(done, state),
            model=lambda: self.model(state.trainable),
        )
        callbacks = self.monitor.run.callbacks
        for callback in callbacks:
            callback.between(moment)
        return processes.of_first(lambda: moment.stopped) if callbacks else False

    def _is_finite(self, programs: Programs, sums: Sums, state: TrainState, frozen, parts: list[Batch]) -> bool:
        """Whether the state gives a finite loss, on the rows of the last step; `sums` is used up."""
        first = self.engine.micro_index[0]
        loss = programs.accumulate(sums, state, frozen, parts[0], first).loss
        return math.isfinite(float(partition.on_host(loss).sum()))

    def evaluate(self, evaluate, state, frozen, step: int, between: Callable[[], None] = lambda: None) -> float:
        """The evaluation loss, logged and shown with what answers to the rows are worth; NaN without rows."""
        batches, monitor = self.held_out(), self.monitor
        if not self.evaluates:
            return math.nan
        values: dict[str, Any] = {}
        answered: Answered | None = None
        with monitor.pause("eval", step) as line:
            for callback in monitor.run.callbacks:
                callback.evaluating(step, lambda: self.model(state.trainable))
            if batches is not None:
                shown = monitor.progress.evaluating
                values |= self.engine.evaluate(evaluate, state.trainable, frozen, batches, shown, between)
            if self.answers is not None:
                with phase("sample", "a smaller evaluation.max_new_tokens, or evaluation.generate=[]"):
                    answered = self.answers(self.model(state.trainable))
                values |= answered.metrics
            for callback in monitor.run.callbacks:
                callback.evaluated(step, values)
            line |= values | {m.ROWS: rows_identity(None if batches is None else batches.rows.documents, self.answers)}
            if answered is not None:
                line[SAMPLES] = answered.samples
        monitor.run.history.append({"step": step, **values})
        if batches is not None:
            unit = monitor.run.unit
            monitor.progress.print(
                f"step {step}: evaluation loss {values['eval_loss']:.4f} over {values[f'eval_{unit}']:,} {unit}"
            )
        if answered is not None:
            begin, *samples = answered.lines()
            monitor.progress.print("\n".join([f"step {step}: {begin}", *samples]))
        return values.get("eval_loss", math.nan)

    def _capture(self, programs: Programs):
        traced = {"accumulate": programs.accumulate, "update": programs.update}
        return capture(self.profile.folder, self.profile.meta(), traced)
