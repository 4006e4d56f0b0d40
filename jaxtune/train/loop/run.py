"""The training loop: steps, and evaluations, saves and callbacks between them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.placement import partition
from jaxtune.profile import capture
from jaxtune.system import early_import, processes, waiting
from jaxtune.system.heap import frozen_heap
from jaxtune.train.callbacks import Between
from jaxtune.train.config import EvaluationConfig
from jaxtune.train.data.batches import Batch, Batches
from jaxtune.train.data.packing.packing import Documents
from jaxtune.train.engine.programs import Engine, LoadedStep, Programs
from jaxtune.train.evaluation.answer_metrics import SAMPLES, Answered, AnswerMetrics
from jaxtune.train.log import metrics as m
from jaxtune.train.loop.monitor import Monitor
from jaxtune.train.loop.saving import Saver
from jaxtune.train.planning.phases import phase
from jaxtune.train.program.leaves import Leaves
from jaxtune.train.program.step import Sums, TrainState


@dataclasses.dataclass(frozen=True)
class Profile:
    """Which steps of this process the profiler traces."""

    folder: Path
    steps: int
    """0, as in all processes but the first: none."""
    start: int
    """Steps of this process before the first traced one."""
    meta: Callable[[], dict[str, Any]]
    """Facts about the run, stored with the profile."""

    def lacking(self, steps_left: int) -> str | None:
        """A warning if `steps_left` steps are too few to trace all, else None."""
        traced = min(self.steps, max(steps_left - self.start, 0))
        if traced == self.steps:
            return None
        words = f"only {traced} of profile.steps = {self.steps}" if traced else "no step"
        remedy = "" if traced or steps_left == 1 else f"; set it below {steps_left}"
        return (
            f"warning: the profile will hold {words}: {steps_left} {'step is' if steps_left == 1 else 'steps are'} "
            f"left, of which the first profile.start = {self.start} are not traced{remedy}"
        )


def is_evaluation_due(
    evaluation: EvaluationConfig, start: int, total_steps: int, output: Path, rows: str | None
) -> bool:
    """Whether a process evaluates before its first step: a new run if at_start, a resumed one if the evaluation after
    step `start` is due and metrics.jsonl lacks it for these rows. rows: None: there are none. Collective. start: steps
    done before. output: the run's folder.
    """
    if rows is None:
        return False
    if start == 0:
        return evaluation.at_start
    due = evaluation.after_last(start) if start >= total_steps else evaluation.between(start)
    return due and not processes.of_first(lambda: start in _evaluated_steps(output / m.JSONL, rows))


def _evaluated_steps(path: Path, rows: str) -> set[int]:
    lines = m.read_metrics(path) if path.exists() else []
    evaluations = [line for line in lines if "eval_loss" in line or m.ROWS in line]
    return {line["step"] for line in evaluations if m.of_rows(line, rows)}


def rows_identity(documents: Documents | None, answers: AnswerMetrics | None) -> str | None:
    """Identity of an evaluation's rows: the held-out documents', else the questions'; None without either."""
    if documents is not None:
        return documents.identity
    return None if answers is None else answers.identity


def named(values: Mapping[str, object], name: str) -> dict[str, object]:
    """Metrics as "eval_...", or as "eval_NAME_..." of a set with a name."""
    prefix = f"eval_{name}_" if name else "eval_"
    return {f"{prefix}{key}": value for key, value in values.items()}


def by_set(values: Mapping[str, object], names: Collection[str]) -> list[dict[str, object]]:
    """An evaluation's metrics by the sets of `names`, after those of the first set, which have none of these names;
    each with the numbers that are of no set, such as the epoch.
    """
    prefixes = sorted((f"eval_{name}_" for name in names), key=len, reverse=True)  # "eval_a_b_" before "eval_a_"
    of_key = {key: next((prefix for prefix in prefixes if key.startswith(prefix)), "") for key in values}
    common = {key: value for key, value in values.items() if not key.startswith("eval_")}
    sets = [{key: value for key, value in values.items() if of_key[key] == f"eval_{name}_"} for name in names]
    first = {key: value for key, value in values.items() if not of_key[key]}
    return [first, *(common | of_set for of_set in sets)]


class _StepRows:
    """The rows of each step on the device, loaded in a thread while the last step computes."""

    def __init__(
        self,
        engine: Engine,
        worker: waiting.Worker,
        saver: Saver,
        total_steps: int,
        model: Callable[[Leaves[TrainState]], Decoder],
    ):
        self._engine, self._worker, self._saver = engine, worker, saver
        self._total_steps, self._model = total_steps, model
        self._loading: tuple[int, Future[LoadedStep]] | None = None

    def of(self, step: int, state: Leaves[TrainState]) -> LoadedStep:
        """(micro-batches, facts) of a step (from 0); the next one is loaded then."""
        with self._saver.listening(step, state):
            if self._engine.batches.needs_model:
                load = functools.partial(self._engine.load_step, step, lambda: self._model(state))
                return load() if processes.count() == 1 else self._saver.in_all(step, state, load)
            if self._loading is None or self._loading[0] != step:
                self.load(step)
            assert self._loading is not None
            loaded = self._saver.result(self._loading[1], f"the rows of step {step + 1}", step, state)
        self._loading = None
        if not self._engine.tables:
            self.load(step + 1)
        return loaded

    def dispatched(self, step: int) -> None:
        """Loads the next step if rows of tables on the host come with it, so that the device never has
        those of three.
        """
        if self._engine.tables and self._loading is None:
            self.load(step + 1)

    def load(self, step: int) -> None:
        """Begins to load a step, also again for another plan; nothing if there is none or the source samples."""
        if step < self._total_steps and not self._engine.batches.needs_model:
            self._loading = step, self._worker.submit(self._engine.load_step, step)


@dataclasses.dataclass(frozen=True)
class Run:
    """The training loop of one process."""

    engine: Engine
    monitor: Monitor
    saver: Saver
    total_steps: int
    """Earlier processes' steps included."""
    evaluation: EvaluationConfig
    evaluation_due: bool
    """Before this process's first step."""
    held_out: Callable[[], Batches | None]
    """The batches of an evaluation under the current plan; None without held-out rows with a loss."""
    further: Callable[[], Mapping[str, Batches]]
    """The same of further sets, by name."""
    profile: Profile
    model: Callable[[Any], Decoder]
    """The model with the given trained tensors (`TrainState.trainable`)."""
    sampling: Callable[[nnx.State], Decoder]
    """The same for what samples in all processes."""
    answers: AnswerMetrics | None
    """None: the config asks for none."""

    @property
    def evaluates(self) -> bool:
        return self.held_out() is not None or self.answers is not None

    def steps(
        self, programs: Programs, state: Leaves[TrainState], sums: Leaves[Sums], frozen: Leaves[nnx.State], start: int
    ) -> tuple[Leaves[TrainState], int]:
        """Makes the steps after `start` ones, until the last or until a callback ends the run: (state, steps done).
        state and sums (zeros) are donated. TrainingInterrupted after a signal; ValueError from guards (TrainingStopped)
        and memory.

          frozen: the tensors that do not train, on the devices.
        """
        engine, monitor, saver, progress = self.engine, self.monitor, self.saver, self.monitor.progress

        def at(step: int) -> Programs:
            return engine.at(programs, step)

        losses: dict[int, float] = {}  # by step, so that an evaluation that a callback asks for is not made twice

        def evaluate(step: int) -> float:
            """The held-out loss, NaN without one; evaluates once for a step."""
            if step not in losses:
                between = functools.partial(saver.poll, step, state) if step else lambda: None
                with saver.listening(step, state):
                    losses[step] = self.evaluate(at(step).evaluate, state, frozen, step, between)
            return losses[step]

        if self.evaluation_due:
            evaluate(start)
        monitor.begin_steps()
        # Of the save and the plot at the end; the first step waits for the device meanwhile.
        early_import.begin_modules(*["orbax.checkpoint"] * saver.enabled, "matplotlib.backends.backend_agg")
        tracing, steps_done = False, start
        remedy = "the same command continues from the last save; a smaller memory.budget_gb leaves more for fragments"
        with (
            saver.guarded(),
            frozen_heap(),
            phase("step", remedy, self.total_steps) as work,
            waiting.Worker("batches") as worker,
            contextlib.ExitStack() as trace,
        ):
            rows = _StepRows(
                engine, worker, saver, self.total_steps, lambda state: self.sampling(state.field("trainable"))
            )
            for step in range(start, self.total_steps):
                with monitor.data_wait():
                    micro_batches, counts = rows.of(step, state)
                if self.profile.steps and step - start == self.profile.start:
                    with monitor.pause("profile", step):
                        m.try_optional("the profile", lambda: trace.enter_context(self._capture(at(step))))  # noqa: B023
                    tracing = True
                with jax.profiler.StepTraceAnnotation("train", step_num=step):  # marks the step in a profile
                    if step == start:
                        planned = engine.planner.plan
                        again = functools.partial(monitor.planned, "compile", start)
                        programs, sums, frozen, micro_batches = engine.first_step(
                            programs, sums, state, frozen, micro_batches, step, progress.print, again
                        )
                        if engine.planner.plan != planned:
                            rows.load(step + 1)  # again, in micro-batches of the new plan
                    else:
                        sums = engine.accumulate(at(step), sums, state, frozen, micro_batches[: counts["filled"]])
                    state, sums, latest = programs.update(state, sums)
                    jax.copy_to_host_async(latest)  # which is read a step later, the first step's at once
                work.done = steps_done = step + 1

                stopped = self._dispatched(step, latest, counts, rows, evaluate, state)
                # The first step's numbers are out, and the device has another. Sampling is the host's work, and
                # would wait for Python's lock: such a run writes them in a pause, or at its end.
                if step == start + 1 and not engine.batches.needs_model:
                    engine.write_beside()
                if tracing and (
                    steps_done - start == self.profile.start + self.profile.steps or steps_done == self.total_steps
                ):
                    with monitor.pause("profile", steps_done):
                        m.try_optional("the profile", trace.close)
                    tracing = False
                saver.after_step(steps_done, state, last=steps_done == self.total_steps)
                if engine.has_unwritten and saver.saved == steps_done:
                    with monitor.pause("compile", steps_done):
                        engine.write_programs()
                if steps_done == self.total_steps or stopped:
                    saver.flush(steps_done, state)
                if self.evaluation.between(steps_done) and steps_done < self.total_steps:
                    evaluate(steps_done)
                if stopped:
                    progress.print(f"step {steps_done}: a callback ends the run")
                    break
            if saver.enabled:
                saver.save(steps_done, state)
            finite = functools.partial(self._is_finite, at(steps_done), sums, state, frozen, micro_batches)
            self._end(steps_done, state, evaluate, finite)
        monitor.callbacks.hears = contextlib.nullcontext  # or it would keep the optimizer's states
        return state, steps_done

    def _end(
        self,
        steps_done: int,
        state: Leaves[TrainState],
        evaluate: Callable[[int], float],
        finite: Callable[[], bool],
    ) -> None:
        """After the last step: the evaluation that is due, and whether the trained weights are good."""
        saver, progress = self.saver, self.monitor.progress
        if skipped := self.monitor.skipped_in_row:
            progress.print(f"warning: the last {skipped} updates were skipped, as their numbers were not finite")
        loss = evaluate(steps_done) if self.evaluation.after_last(steps_done) and self.evaluates else math.nan
        has_loss = self.evaluation.after_last(steps_done) and self.held_out() is not None
        good = math.isfinite(loss) if has_loss else finite()
        saver.poll(steps_done, state)
        saver.finish(good)
        if not good:
            progress.print("warning: the loss of the trained weights is not finite")

    def _dispatched(
        self,
        step: int,
        latest: dict,
        counts: dict,
        rows: _StepRows,
        evaluate: Callable[[int], float],
        state: Leaves[TrainState],
    ) -> bool:
        """After the dispatch of a step (from 0): metrics, next rows, callbacks; returns whether one ends the run."""
        monitor, saver, steps_done = self.monitor, self.saver, step + 1
        monitor.callbacks.hears = functools.partial(saver.listening, steps_done, state)

        def between() -> bool:
            monitor.step_dispatched(step, latest, counts)
            rows.dispatched(step)
            monitor.news(step)
            stopped = self._between(steps_done, evaluate, saver, state)
            if not monitor.seconds:  # somebody waits for the first step's line; dispatching the next takes a while
                monitor.flush()
            return stopped

        if not monitor.callbacks:
            return between()
        stopped = saver.in_all(steps_done, state, between)
        return processes.of_first(lambda: stopped)

    def _between(
        self, steps_done: int, evaluate: Callable[[int], float], saver: Saver, state: Leaves[TrainState]
    ) -> bool:
        as_own_work = waiting.own_work()  # a decorator, too
        moment = Between(
            steps_done,
            steps_done == self.total_steps,
            wait=as_own_work(self.monitor.flush),
            evaluate=as_own_work(lambda: evaluate(steps_done)),
            save=as_own_work(lambda: saver.save_for_callback(steps_done, state)),
            model=as_own_work(lambda: self.model(state.field("trainable"))),
        )
        self.monitor.callbacks.tell("between", moment)
        return moment.stopped

    def _is_finite(
        self,
        programs: Programs,
        sums: Leaves[Sums],
        state: Leaves[TrainState],
        frozen: Leaves[nnx.State],
        micro_batches: list[Batch],
    ) -> bool:
        """Whether the last state's loss is finite on the first micro-batch. sums (zeros) are donated."""
        first = self.engine.micro_index[0]
        loss = programs.accumulate(sums, state, frozen, micro_batches[0], first).field("loss")
        return math.isfinite(float(partition.on_host(loss).sum()))

    def evaluate(
        self,
        evaluate,
        state: Leaves[TrainState],
        frozen: Leaves[nnx.State],
        step: int,
        between: Callable[[], None] = lambda: None,
    ) -> float:
        """Evaluates held-out rows and answers, logs and prints the metrics, calls the callbacks, and saves the state if
        it is the best. Returns the loss, NaN if there is none. Collective.

          evaluate: the compiled evaluation; None if no rows have a loss.
          step: steps done.
          between: called after each batch.
          frozen: the tensors that do not train, on the devices.
        """
        batches, monitor = self.held_out(), self.monitor
        if not self.evaluates:
            return math.nan
        values: dict[str, Any] = {}
        measured: dict[str, dict[str, object]] = {}  # of each set, "" of the first
        answers: Answered | None = None

        def tell(event: str, *arguments: object) -> None:
            if monitor.callbacks:
                self.saver.in_all(step, state, lambda: monitor.callbacks.tell(event, step, *arguments))

        def load[T](work: Callable[[], T]) -> T:
            return self.saver.in_all(step, state, work)

        self.saver.flush(step, state)
        with monitor.pause("eval", step) as line:
            tell("evaluating", lambda: self.model(state.field("trainable")))
            if batches is not None:
                show_progress = monitor.progress.evaluating
                tensors = state.field("trainable"), frozen.tree
                for name, rows in {"": batches, **self.further()}.items():
                    found = self.engine.evaluate(evaluate, *tensors, rows, show_progress, between, load)
                    measured[name] = found
                    values |= named(found, name)
            if self.answers is not None:
                with phase("sample", "a smaller evaluation.max_new_tokens, or evaluation.generate=[]"):
                    answers = self.answers(self.sampling(state.field("trainable")))
                values |= answers.metrics
            loss, unit = values.get("eval_loss", math.nan), monitor.run.unit
            texts = [
                f"evaluation loss {found['loss']:.4f} over {found[unit]:,} {unit}{f' of {name}' if name else ''}"
                for name, found in measured.items()
            ]
            tell("evaluated", values)
            line |= values | {m.ROWS: rows_identity(None if batches is None else batches.rows.documents, self.answers)}
            if answers is not None:
                line[SAMPLES] = answers.samples
        monitor.run.history.extend({"step": step, **of_set} for of_set in by_set(values, self.further()))
        if batches is not None:
            monitor.progress.print("\n".join(f"step {step}: {text}" for text in texts))
        if answers is not None:
            begin, *samples = answers.lines()
            monitor.progress.print("\n".join([f"step {step}: {begin}", *samples]))
        self.saver.evaluated(step, state, values)
        return loss

    def _capture(self, programs: Programs):
        """A context that traces and then writes the profile, with the programs' HLO."""
        traced = {"accumulate": programs.accumulate, "update": programs.update}
        return capture(self.profile.folder, self.profile.meta(), traced)
