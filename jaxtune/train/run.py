"""The training loop: the steps of a run, and the evaluations, saves and calls of callbacks between them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax

from jaxtune.models.decoder import Decoder
from jaxtune.models.placement import partition
from jaxtune.profile import capture
from jaxtune.system import processes, waiting
from jaxtune.system.heap import frozen_heap
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
    """Which steps of this process the profiler traces, and what is stored with the profile. The Trainer makes it, and
    `Run.steps` traces by it."""

    folder: Path
    """The folder that the profile is written to."""
    steps: int
    """The number of steps to trace; 0, as in all processes of a run but the first, traces none."""
    start: int
    """The number of steps that this process makes before the first traced one (config.profile.start)."""
    meta: Callable[[], dict[str, Any]]
    """Returns the facts about the run that are stored with the profile."""

    def lacking(self, left: int) -> str | None:
        """A warning, a sentence for the screen, if a process that makes `left` steps ends before all of `steps` are
        traced, else None; it also says what to set if no step would be traced. The Trainer prints it before the first
        step."""
        traced = min(self.steps, max(left - self.start, 0))
        if traced == self.steps:
            return None
        found = f"only {traced} of profile.steps = {self.steps}" if traced else "no step"
        remedy = "" if traced or left == 1 else f"; set it below {left}"
        return (
            f"warning: the profile will hold {found}: {left} {'step is' if left == 1 else 'steps are'} left, of which "
            f"the first profile.start = {self.start} are not traced{remedy}"
        )


def is_evaluation_due(wanted: EvaluationConfig, start: int, total_steps: int, output: Path, rows: str | None) -> bool:
    """Whether a process must evaluate before its first step. For a new run (`start` 0): whether the config asks for it
    (at_start). For a resumed one: whether an evaluation was due after step `start`, and metrics.jsonl does not have it
    with these rows, because it was not made, or made with other rows. The Trainer asks it for Run.evaluation_due, and
    evaluations after later steps do not depend on it. A complete run is evaluated then without any step. In a run of
    several processes all of them must call it.

    Args:
      wanted: config.evaluation: after which steps the run evaluates.
      start: the steps done so far.
      total_steps: the steps of the run.
      output: the output folder, whose metrics.jsonl has the evaluations done.
      rows: what identifies the held-out rows (rows_identity); None if there are none, and then nothing is due.
    """
    if rows is None:
        return False
    if start == 0:
        return wanted.at_start
    due = wanted.after_last(start) if start >= total_steps else wanted.between(start)
    return due and not processes.of_first(lambda: start in _evaluated_steps(output / m.JSONL, rows))


def _evaluated_steps(path: Path, rows: str) -> set[int]:
    """The steps after which a metrics.jsonl (`path`) has an evaluation of these rows, with or without a loss; empty if
    there is no file. rows: from `rows_identity`. An evaluation that does not name its rows counts too. A resumed run
    sees by it whether an evaluation is missing."""
    lines = m.read_metrics(path) if path.exists() else []
    found = [line for line in lines if "eval_loss" in line or m.ROWS in line]
    return {line["step"] for line in found if line.get(m.ROWS, rows) == rows}


def rows_identity(documents: Documents | None, answers: AnswerMetrics | None) -> str | None:
    """A string that identifies the rows of an evaluation: that of the held-out documents, or, without these (None), of
    the questions that `answers` asks. None if there are neither. metrics.jsonl has it with each evaluation, so that a
    resumed process sees which ones were made, and the best one is chosen among those of the same rows."""
    if documents is not None:
        return documents.identity
    return None if answers is None else answers.identity


class _StepRows:
    """Gives the rows of each step on the device. They are loaded in a thread while the step before is computed, unless
    their source samples from the model as it is after that step."""

    def __init__(
        self,
        engine: Engine,
        worker: waiting.Worker,
        saver: Saver,
        total_steps: int,
        model: Callable[[TrainState], Decoder],
    ):
        self._engine, self._worker, self._saver = engine, worker, saver
        self._total_steps, self._model = total_steps, model
        self._loading: tuple[int, Future[LoadedStep]] | None = None

    def of(self, step: int, state: TrainState) -> LoadedStep:
        """The micro-batches of a step (from 0) on the devices, and facts about them. `state`, that before the step, is
        whole: signals and the clock are heard meanwhile, and an error saves it (Saver.listening). Then the next step is
        loaded."""
        with self._saver.listening(step, state):
            if self._engine.batches.sees_model:
                return self._engine.load_step(step, lambda: self._model(state))
            if self._loading is None or self._loading[0] != step:
                self.load(step)
            assert self._loading is not None
            loaded = self._saver.result(self._loading[1], f"the rows of step {step + 1}", step, state)
        self._loading = None
        if not self._engine.tables:
            self.load(step + 1)
        return loaded

    def dispatched(self, step: int) -> None:
        """Begins to load the step after `step` if rows of tables of embeddings are copied with it: called when the
        device has finished the step before and computes `step`, it then has the rows of two steps. Other rows are few,
        and are loaded a step earlier."""
        if self._engine.tables and self._loading is None:
            self.load(step + 1)

    def load(self, step: int) -> None:
        """Begins to load a step (from 0) in the thread, even if it was loaded before, in micro-batches of another plan.
        It does nothing if the run has no such step, or if its source samples from the model."""
        if step < self._total_steps and not self._engine.batches.sees_model:
            self._loading = step, self._worker.submit(self._engine.load_step, step)


@dataclasses.dataclass(frozen=True)
class Run:
    """The training loop of one process, and the objects that it works with: `steps` makes the steps, `evaluate` one
    evaluation. Trainer makes one when its `train` starts."""

    engine: Engine
    """Loads rows and runs the compiled programs."""
    monitor: Monitor
    """Logs and shows metrics, has the callbacks, and calls `stepped` of them."""
    saver: Saver
    """Saves checkpoints when they are due, and raises TrainingInterrupted after a signal."""
    total_steps: int
    """The steps of the run, those of earlier processes included."""
    evaluation: EvaluationConfig
    """When to evaluate."""
    evaluation_due: bool
    """Whether `steps` evaluates before the first step that this process makes (`is_evaluation_due`)."""
    held_out: Callable[[], Batches | None]
    """Returns the batches of an evaluation, of the shape of the current plan's micro-batches; None if there are no
    held-out rows with a loss."""
    profile: Profile
    """Which steps are traced."""
    model: Callable[[Any], Decoder]
    """Returns the model with the trained tensors that it is given (`TrainState.trainable`), for callbacks, generated
    answers, and sources that sample from the model."""
    answers: AnswerMetrics | None
    """Has the model answer held-out rows in an evaluation, and scores the answers; None if the config asks for none."""

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate: held-out rows with a loss, or questions to answer. If False,
        `evaluate` does nothing, and the last step is not evaluated either."""
        return self.held_out() is not None or self.answers is not None

    def steps(self, programs: Programs, state: TrainState, sums: Sums, frozen, start: int) -> tuple[TrainState, int]:
        """Makes the steps after `start` ones, at least one, until the last or until a callback ends the run: (last
        state, steps done). programs: compiled anew if memory runs out in the first step. state, sums (zeros): donated.
        Raises TrainingInterrupted after a signal, ValueError (TrainingStopped if a guard stops, or of memory)."""
        engine, monitor, saver, progress = self.engine, self.monitor, self.saver, self.monitor.progress

        def at(step: int) -> Programs:
            return engine.at(programs, step)

        losses: dict[int, float] = {}  # by step, so that an evaluation that a callback asks for is not made twice

        def evaluate(step: int) -> float:
            """The held-out loss after `step` steps, NaN without one; a second call for a step evaluates nothing."""
            if step not in losses:
                between = functools.partial(saver.poll, step, state) if step else lambda: None
                with saver.listening(step, state):
                    losses[step] = self.evaluate(at(step).evaluate, state, frozen, step, between)
            return losses[step]

        if self.evaluation_due:
            evaluate(start)
        tracing, done = False, start
        remedy = "the same command continues from the last save; a smaller memory.budget_gb leaves more for fragments"
        with (
            saver.guarded(),
            frozen_heap(),
            phase("step", remedy),
            waiting.Worker("batches") as worker,
            contextlib.ExitStack() as trace,
        ):
            rows = _StepRows(engine, worker, saver, self.total_steps, lambda state: self.model(state.trainable))
            for step in range(start, self.total_steps):
                with monitor.data_wait():
                    parts, counts = rows.of(step, state)
                if self.profile.steps and step - start == self.profile.start:
                    with monitor.pause("profile", step):
                        m.decorate("the profile", lambda: trace.enter_context(self._capture(at(step))))  # noqa: B023
                    tracing = True
                with jax.profiler.StepTraceAnnotation("train", step_num=step):  # marks the step in a profile
                    if step == start:
                        planned = engine.planner.plan
                        again = functools.partial(monitor.planned, "compile", start)
                        programs, sums, frozen = engine.first_step(
                            programs, sums, state, frozen, parts, step, progress.print, again
                        )
                        if engine.planner.plan != planned:
                            rows.load(step + 1)  # again, in micro-batches of the new plan
                    else:
                        sums = engine.accumulate(at(step), sums, state, frozen, parts[: counts["filled"]])
                    state, sums, latest = programs.update(state, sums)
                done = step + 1

                stopped = self._dispatched(step, latest, counts, rows, evaluate, state)
                if tracing and (done - start == self.profile.start + self.profile.steps or done == self.total_steps):
                    with monitor.pause("profile", done):
                        m.decorate("the profile", trace.close)
                    tracing = False
                saver.after_step(done, state, last=done == self.total_steps)
                if done == self.total_steps or stopped:
                    saver.flush(done, state)
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

    def _dispatched(
        self,
        step: int,
        latest: dict,
        counts: dict,
        rows: _StepRows,
        evaluate: Callable[[int], float],
        state: TrainState,
    ) -> bool:
        """What follows the dispatch of a step (from 0): its metrics, the next rows, callbacks; whether one of these
        ends the run."""
        monitor, saver, done = self.monitor, self.saver, step + 1
        monitor.callbacks.hears = functools.partial(saver.listening, done, state)

        def between() -> bool:
            monitor.step_dispatched(step, latest, counts)
            rows.dispatched(step)
            monitor.news(step)
            return self._between(done, evaluate, saver, state)

        if not monitor.callbacks:
            return between()
        stopped = saver.in_all(done, state, between)
        return processes.of_first(lambda: stopped)

    def _between(self, done: int, evaluate: Callable[[int], float], saver: Saver, state: TrainState) -> bool:
        """Whether a callback ends the run after `done` steps. evaluate: returns the held-out loss after a step; state:
        that after these steps."""
        own = waiting.own_work()  # a decorator, too
        moment = Between(
            done,
            done == self.total_steps,
            wait=own(self.monitor.flush),
            evaluate=own(lambda: evaluate(done)),
            save=own(lambda: saver.save_for_callback(done, state)),
            model=own(lambda: self.model(state.trainable)),
        )
        self.monitor.callbacks.tell("between", moment)
        return moment.stopped

    def _is_finite(self, programs: Programs, sums: Sums, state: TrainState, frozen, parts: list[Batch]) -> bool:
        """Whether the last state has a finite loss, tested on the first of `parts`, the micro-batches of the last step,
        for a run that ends without an evaluation of the loss. It prints nothing: `steps` removes older checkpoints only
        if this is True, and prints a warning if not. programs: those of the last step. sums: zeros, which are donated.
        frozen: nnx.State, the weights that are not trained."""
        first = self.engine.micro_index[0]
        loss = programs.accumulate(sums, state, frozen, parts[0], first).loss
        return math.isfinite(float(partition.on_host(loss).sum()))

    def evaluate(self, evaluate, state, frozen, step: int, between: Callable[[], None] = lambda: None) -> float:
        """Evaluates the held-out loss and the metrics of generated answers, adds them to metrics.jsonl and
        Trainer.history, prints them, calls the callbacks, and saves the state if it is the best so far
        (checkpoint.best). `steps` calls it when an evaluation is due or a callback asks for one. Returns the loss, NaN
        if there is none. It does nothing if there is nothing to evaluate. The Trainer calls it without `steps` for a
        complete run whose last evaluation is missing.

        Args:
          evaluate: the compiled program of an evaluation; None if no held-out rows have a loss.
          state: the TrainState to evaluate.
          frozen: nnx.State, the placed weights that are not trained.
          step: the steps done so far, for metrics and messages.
          between: called after each batch of held-out rows, in all processes of a run.
        """
        batches, monitor = self.held_out(), self.monitor
        if not self.evaluates:
            return math.nan
        values: dict[str, Any] = {}
        answered: Answered | None = None

        def tell(event: str, *arguments: object) -> None:
            if monitor.callbacks:
                self.saver.in_all(step, state, lambda: monitor.callbacks.tell(event, step, *arguments))

        def load[T](work: Callable[[], T]) -> T:
            return self.saver.in_all(step, state, work)

        self.saver.flush(step, state)
        with monitor.pause("eval", step) as line:
            tell("evaluating", lambda: self.model(state.trainable))
            if batches is not None:
                shown = monitor.progress.evaluating
                values |= self.engine.evaluate(evaluate, state.trainable, frozen, batches, shown, between, load)
            if self.answers is not None:
                with phase("sample", "a smaller evaluation.max_new_tokens, or evaluation.generate=[]"):
                    answered = self.answers(self.model(state.trainable))
                values |= answered.metrics
            tell("evaluated", values)
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
        self.saver.evaluated(step, state, values)
        return values.get("eval_loss", math.nan)

    def _capture(self, programs: Programs):
        """A context in which the profiler traces steps of `programs`; on leaving it, the profile is written to
        `profile.folder`, with the facts of `profile.meta` and the programs' HLO. `steps` enters it."""
        traced = {"accumulate": programs.accumulate, "update": programs.update}
        return capture(self.profile.folder, self.profile.meta(), traced)
