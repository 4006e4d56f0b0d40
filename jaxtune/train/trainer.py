"""The `Trainer`: one run, from a model and rows to a trained model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import optax
from flax import nnx

from jaxtune.conversations.ends import ends_in_words
from jaxtune.models.decoder import Decoder
from jaxtune.models.ends import ends_of, with_end_tokens
from jaxtune.models.lora import has_adapter
from jaxtune.models.placement import partition
from jaxtune.system import heap, host_memory, processes, shared_folders, timing
from jaxtune.system.files import remove_temporary
from jaxtune.system.invocation import spelled
from jaxtune.system.terminal import outliving, say
from jaxtune.system.waiting import Handover
from jaxtune.train.callbacks import Callback
from jaxtune.train.config import TrainConfig
from jaxtune.train.config.file import config_to_dict
from jaxtune.train.data import Batches, TokenDataset
from jaxtune.train.data.packing.pairs import PackedPairs, PairDataset
from jaxtune.train.data.rendering.templates import trained_tokenizer, writes_today
from jaxtune.train.display import rows_report
from jaxtune.train.display.precision_notes import precision_notes, reference_notes, rounding_notes
from jaxtune.train.engine import pinned_pool
from jaxtune.train.engine.programs import Programs
from jaxtune.train.engine.trained_model import TrainedModel, trainable_names, with_embedding_on_device
from jaxtune.train.evaluation.early_stop import EarlyStop
from jaxtune.train.folder.checkpoint import Checkpointer, CheckpointError, NoRoom, checkpoint_bytes, saved_steps
from jaxtune.train.folder.record import (
    is_longer,
    record_of,
    require_same_code,
    require_same_config,
    require_same_run,
    same_run,
    write_config,
)
from jaxtune.train.folder.results import Delivery
from jaxtune.train.folder.run_folder import CHECKPOINTS, CONFIG, next_name
from jaxtune.train.folder.run_state import recorded_state
from jaxtune.train.folder.translations import POSITION, section, translated
from jaxtune.train.log import metrics as m
from jaxtune.train.loop.monitor import Monitor, MonitoredRun
from jaxtune.train.loop.run import Profile, Run, is_evaluation_due, named, rows_identity
from jaxtune.train.loop.saving import Saver, TrainingInterrupted
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.objectives.objective import Objective
from jaxtune.train.optimizer.schedule import new_rates
from jaxtune.train.planning import plan_text
from jaxtune.train.planning.devices import device_peak_flops
from jaxtune.train.planning.disk import Written, disk_lines, written_by
from jaxtune.train.planning.forward import ForwardPlanner
from jaxtune.train.planning.phases import Sampled, phase, phase_lines, phases_of
from jaxtune.train.planning.planner import Planner
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.planning.teacher_pass import TeacherPass
from jaxtune.train.program import gradient_sync
from jaxtune.train.program.flops import flop_counter
from jaxtune.train.program.leaves import Leaves
from jaxtune.train.program.step import StepProgram, Sums, TrainState
from jaxtune.train.references import references
from jaxtune.train.references.stored_teachers import StoredTeacher
from jaxtune.train.sampled.rollouts import SampledAnswers
from jaxtune.train.signals import StopSignal
from jaxtune.train.spec import setup
from jaxtune.train.spec.run_spec import UserParts, resolve
from jaxtune.train.user_code.calling import running

_LESS_LOADED = "a smaller model, or model.load_in=nf4"  # where memory runs out for it


class Trainer:
    """Trains `model` on rows as `config` says. The given model is never changed, and its arrays are never donated.

    Args:
      model: its `nnx.Param`s train: those of an adapter (get_peft_model), or all.
      config: its `model` and `adapter` are not applied; the model is recorded as it is.
      train_rows, eval_rows: a path, a data set's name, a list of dicts, or a TokenDataset; None: config.data's.
      train_rows may be a list of (rows, weight), or a BatchSource.
      profile: folder for a profile of config.profile.steps steps, or 3; None: `profile` in the output folder, if config
      asks for one.
      further_eval_rows: {name: rows} of sets that are evaluated beside eval_rows, with metrics eval_NAME_....
      keeps_model: False: tensors of `model` are freed if nobody else has them.
      weights: a future of waiting.Handover(model), if `model` has shapes; awaited after compiling.
      objective: replaces config.objective.
      optimizer: an optax transformation in place of config.optim, after clipping.
      schedule: learning rate by updates made (from 0), in place of config.schedule; only shown with an `optimizer`.
      trains: False: only evaluates or shows rows; a forward pass is planned.
      checks_folder: refuse another run's output folder before rows are read.

    Attributes: `tokenizer` (with the rows' chat template), `batches`, `train_data` (None if rows are not known before
    the run), `eval_data` (held-out rows with a loss), `answers` (of evaluation.generate), `total_steps`; after train()
    `history` (metrics), `steps_done`, `best` ({"best_checkpoint": whose weights were returned} or {}), `unsaved` (why
    the last state is in no checkpoint). ValueError for what cannot be trained, PlanError if no plan fits.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Any,
        config: TrainConfig,
        train_rows: Any = None,
        eval_rows: Any = None,
        profile: str | Path | None = None,
        keeps_model: bool = True,
        weights: Future[Handover[Decoder]] | None = None,
        objective: Objective | None = None,
        optimizer: optax.GradientTransformation | None = None,
        schedule: optax.Schedule | None = None,
        callbacks: Sequence[Callback] = (),
        trains: bool = True,
        checks_folder: bool = False,
        further_eval_rows: Mapping[str, object] = MappingProxyType({}),
    ):
        self.trains = trains
        self.output = Path(config.output).absolute()  # the user's functions may change the current folder
        if config.data.cache_dir is not None:
            cache_dir = str(Path(config.data.cache_dir).expanduser().absolute())
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, cache_dir=cache_dir))
        self.tokenizer = trained_tokenizer(tokenizer, config.data.template, config.data.template_arguments)
        self.profile_folder = Path(profile).absolute() if profile is not None else self.output / "profile"
        self.profile_steps = config.profile.steps or (0 if profile is None else 3)
        self.history: list[dict[str, Any]] = []
        self.steps_done = 0
        self.unsaved: str | None = None
        self.sampled: Sampled | None = None  # how many questions are answered at a time, if any will be
        parts, decided = UserParts(objective, optimizer, schedule), objective_of(config.objective, objective)
        planned = functools.partial(TeacherPass, StepSpec.of(config, decided))
        of_teacher = (config.model, config.objective.teacher_load_in, config.numbers, config.data)
        self.stored = StoredTeacher(decided, model, self.tokenizer, *of_teacher, planned)
        student = self.stored.student(model)
        self.model = TrainedModel(student, config.numbers, config.qat, config.seed, keeps_model, weights)
        self.spec, rows = resolve(
            config,
            self.model,
            self.tokenizer,
            self.stored,
            parts,
            train_rows,
            eval_rows,
            further_eval_rows=further_eval_rows,
            trains=trains,
            profile_steps=self.profile_steps,
            checks_folder=checks_folder,
        )
        self.batches, self.train_data, self.eval_data = rows.batches, rows.train, rows.held_out
        self.further_eval_data = rows.further
        self.callbacks = tuple(callbacks)
        self.names = trainable_names(self.model.trainable)
        self.flops = flop_counter(self.model.prepared)
        with timing.phase("plan"):
            self.engine = setup.engine_of(self.spec, rows, self.model, trains)
            planner, mesh = self.engine.planner, self.engine.mesh
            self.slots, self.answers = setup.with_slots(
                planner, lambda: self.model.sampled(planner.plan, mesh), self.batches, rows.answers
            )
        if (guards := self.config.guards).patience is not None:
            self.callbacks += (EarlyStop(guards, self.spec.evaluation, self.output, self._evaluated_rows),)

    @property
    def _evaluated_rows(self) -> str | None:
        return rows_identity(self.eval_data and self.eval_data.documents, self.answers)

    @property
    def config(self) -> TrainConfig:
        """As the run's folder records it."""
        return self.spec.config

    @property
    def total_steps(self) -> int:
        return self.spec.total_steps

    @property
    def planner(self) -> Planner:
        """The planner of the steps' memory; AssertionError with trains=False."""
        assert isinstance(self.engine.planner, Planner), "this trainer was made with trains=False"
        return self.engine.planner

    @property
    def program(self) -> StepProgram:
        """The program of a step, not compiled, under the plan in force; with qat.start above 0 the rounding one."""
        return self.engine.program

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self.engine.mesh

    @property
    def eval_batches(self) -> Batches | None:
        """Batches of an evaluation, shaped as the plan's micro-batches; None without held-out rows with a loss."""
        return None if self.eval_data is None else self.eval_data.batches(self.engine.rows, shuffle=False)

    @property
    def further_eval_batches(self) -> dict[str, Batches]:
        """As eval_batches, of the further sets."""
        return {name: data.batches(self.engine.rows, shuffle=False) for name, data in self.further_eval_data.items()}

    @property
    def _sets(self) -> tuple[TokenDataset | None, ...]:
        """Rows that are trained on and held out, if they are known before the run."""
        return (self.train_data, *self._held_out_sets)

    @property
    def _held_out_sets(self) -> tuple[TokenDataset | None, ...]:
        return (self.eval_data, *self.further_eval_data.values())

    # ---- the run

    @running()
    def train(
        self, stop: StopSignal | None = None, delivery: Delivery | None = None, from_step: int | None = None
    ) -> Decoder:
        """Runs or resumes, and returns the trained model (with checkpoint.best the best), which shares the frozen
        arrays. All files go to the output folder.

        Args:
          stop: an entered StopSignal; None makes one.
          delivery: gets the trained model while the folder is still locked.
          from_step: resumes from this checkpoint and replaces later ones; None: the last.
        Raises:
          TrainingInterrupted: a signal arrived in a step; the state was saved if it is good.
          Interrupted: it arrived before the first step or after the last, with nothing to save.
          ValueError: another run's folder, trains=False, memory ran out, or a guard stopped the run (TrainingStopped).
        """
        if not self.trains:
            raise ValueError("Trainer(trains=False) only evaluates: make one without `trains` to train")
        config = self.config
        self.output.mkdir(parents=True, exist_ok=True)
        with outliving(), contextlib.ExitStack() as stack:
            stop = stop or stack.enter_context(StopSignal())
            stack.enter_context(stop.deferred())
            stack.callback(self.batches.close)
            self.engine.write_later()
            stack.callback(self.engine.write_programs)
            # The lock refuses a second process with the same folder before anything is written.
            checkpointer = Checkpointer(self.output / CHECKPOINTS, keep=config.checkpoint.keep)
            stack.enter_context(checkpointer)
            shared_folders.require_shared(self.output)
            if processes.first():
                remove_temporary(self.output)
            self._require_room(checkpointer)
            with stop.at_once():
                self.stored.fill((self.train_data, self.eval_data), self.engine)
                resumed, start = self._resume(checkpointer, from_step)
                if delivery is not None:
                    delivery.begin(self._same_run, start)
            stack.enter_context(recorded_state(self.output, self.total_steps, (TrainingInterrupted,)))
            # A run that died before its first checkpoint has left a config; its metrics are continued from step 0.
            resumed_step = start if start or (self.output / CONFIG).exists() else None
            logger = m.MetricsLogger(
                self.output,
                tensorboard=config.metrics.tensorboard,
                wandb_project=config.metrics.wandb_project,
                trackio_project=config.metrics.trackio_project,
                run_name=config.metrics.run_name,
                config=config_to_dict(config),
                resumed_step=resumed_step,
                rollouts_mb=config.metrics.rollouts_mb,
                rollout_tables=config.metrics.rollout_tables,
            )
            progress_bar = m.Progress(self.total_steps, start)
            with logger, progress_bar as progress, Monitor(self._watched(), logger, progress) as monitor:
                monitor.applied = start
                saver = Saver(checkpointer, self.spec.checkpoint, start, self._meta, monitor, stop)
                handed = Handover(resumed)  # who keeps what a step is given keeps it twice
                del resumed
                state, self.steps_done = self._run(handed, start, saver, monitor, stop)
            self.unsaved = None if saver.failed is None else str(saver.failed)
            trainable = state.trainable
            del state  # frees the optimizer's states, which are not needed any more
            trainable, self.best = saver.best.weights(trainable, say)
            trained = with_end_tokens(self.model.finished(trainable), self.tokenizer)
            del trainable
            saved = checkpointer.latest() == self.steps_done
            if delivery is not None:
                remedy = f"export.merged=false leaves the merge to `{spelled('export')}` on a machine with more memory"
                with stop.at_once() if saved else contextlib.nullcontext(), phase("export", remedy):
                    delivery.finish(trained, self._same_run(), start < self.total_steps)
            if processes.first():
                with timing.phase("plot"):
                    m.try_optional("loss.png", lambda: m.loss_plot(self.output, self.spec.objective.unit))
        return with_embedding_on_device(trained)

    def _require_room(self, checkpointer: Checkpointer) -> None:
        """NoRoom if not even the first checkpoint fits on the disk, before anything is computed."""
        settings = self.config.checkpoint
        saves = settings.saves
        shapes = {"state": self.model.state_shapes(self.engine)}

        def lacking() -> str | None:
            complete = checkpointer.latest() == self.total_steps
            return None if complete or not saves else checkpointer.lacks_room(shapes)

        if words := processes.of_first(lacking):
            raise NoRoom(
                f"no room for a checkpoint: {words}; checkpoint.every_steps and checkpoint.every_minutes = null train "
                "without any"
            )

    def disk_notes(self) -> list[str]:
        """Lines on what the run writes, if that is much of the disk, and on what a kill loses without saves."""
        config, checkpoint = self.config, self.spec.checkpoint
        trained = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.model.trainable))
        size = checkpoint_bytes({"state": self.model.state_shapes(self.engine)})
        saved_count = len(saved_steps(self.output / CHECKPOINTS))
        caches = {
            "log-probabilities of the teacher": self.stored.unwritten((self.train_data, self.eval_data)),
            "log-probabilities of the reference": references.unwritten(self._pairs, config.data.cache_dir),
        }
        delivered = (self.output, checkpoint, config.export)
        written = written_by(*delivered, self.model.prepared, trained, size, saved_count, self.total_steps)
        written += [Written(label, *location) for label, location in caches.items() if location is not None]
        lines = disk_lines(written)
        if not checkpoint.saves:
            lines.append(
                "checkpoint.every_steps and checkpoint.every_minutes are null: only a signal or an error saves the "
                "state; a kill or a power failure loses the whole run"
            )
        return lines

    def _watched(self) -> MonitoredRun:
        peak = device_peak_flops(self.mesh.devices.flat[0].device_kind, self.config.dtype)
        return MonitoredRun(
            config=self.config,
            total_steps=self.total_steps,
            batches=self.batches,
            unit=self.spec.objective.unit,
            trained=self.names,
            flops=self.flops,
            peak_flops=None if peak is None else peak * self.mesh.size,
            planner=self.planner,
            history=self.history,
            callbacks=self.callbacks,
            check_first=references.first_check(
                self.spec.objective,
                self.config.qat,
                self.config.neftune_noise_alpha,
                self.train_data,
                lambda: self.model.fresh,
            ),
            zero_gradient=self.spec.objective.zero_gradient,
        )

    def _run(
        self, handed: Handover[TrainState | None], start: int, saver, monitor: Monitor, stop
    ) -> tuple[TrainState, int]:
        """Compiles and makes the steps: (last state, steps done); a complete run makes a missing evaluation alone.
        handed: a checkpoint's state. Interrupted before the steps, TrainingInterrupted in them, TrainingStopped by a
        guard.
        """
        config = self.config
        traced = self.profile_steps if processes.first() else 0
        facts = functools.partial(
            setup.profile_facts, config_to_dict(config), config.model, config.computes_in, self.batches, self.planner
        )
        profile = Profile(self.profile_folder, traced, config.profile.start, facts)
        rows = self._evaluated_rows
        due = is_evaluation_due(self.spec.evaluation, start, self.total_steps, self.output, rows)
        saver.best.resume(self.output, start, rows)
        of_run = (self.engine, monitor, saver, self.total_steps, self.spec.evaluation, due)
        held_out = (lambda: self.eval_batches, lambda: self.further_eval_batches)
        run = Run(*of_run, *held_out, profile, self.model.finished, self.model.sampling, self.answers)
        resumed = handed.take()
        if resumed is not None and start >= self.total_steps:
            monitor.progress.print(f"this run is complete: {start} steps (output {self.config.output})")
            write_config(self.output, config_to_dict(config))
            if due:
                frozen = self.model.placed_frozen(self.engine)
                self.fill_references(self._held_out_sets, resumed.trainable, frozen, monitor.progress.print, True)
                evaluate = self.eval_data and self.engine.compile_evaluate(self.program, resumed.trainable, frozen)
                run.evaluate(evaluate, Leaves.of(resumed), Leaves.of(frozen), start)
            return resumed, start
        if lacking := profile.lacking(self.total_steps - start):
            monitor.progress.print(lacking)
        handed = Handover(resumed)
        del resumed
        state, steps = run.steps(*self._begun(handed, start, monitor, stop), start)
        return state.tree, steps

    def _begun(
        self, handed: Handover[TrainState | None], start: int, monitor: Monitor, stop
    ) -> tuple[Programs, Leaves[TrainState], Leaves[Sums], Leaves[nnx.State]]:
        """What the steps take, which nobody else then has."""
        with stop.at_once():
            programs, state, sums, frozen = self._start(handed.take(), start, monitor)
        return programs, *self.engine.flat(state, sums), Leaves.of(frozen)

    def _start(
        self, resumed: TrainState | None, start: int, monitor: Monitor
    ) -> tuple[Programs, TrainState, Leaves[Sums], Any]:
        """Compiles until a plan fits, waits for weights, writes the config: (programs, state, sums, frozen)."""
        heap.unsettle()
        progress = monitor.progress
        progress.print("\n".join(self.planner.lines()))
        if self.planner.device.name != "cpu":  # the speed of a CPU is not known
            progress.print(self.finish_line(start))
        # The config is written last, so that an error before leaves the folder free for another run.
        with monitor.planned("load", start) as line:
            pinned = self.planner.residual_host_bytes * len(self.engine.mesh.local_devices)
            meanwhile = functools.partial(self._meanwhile, resumed is None)
            with progress.compiling(), pinned_pool.growing(pinned):
                programs = self.engine.fit(self._first_shapes, start, progress.print, meanwhile)
            line["compile_seconds"] = monitor.uncounted_seconds()
            if self.model.is_loading:
                progress.print("waiting for the weights")
            line |= self.engine.connect(progress.print)
            with phase("load" if resumed is None else "resume", _LESS_LOADED):
                state, sums, frozen = self.model.begin(self.engine, resumed)
            for pass_note in self.pass_notes():  # before the first of them
                progress.print(pass_note)
            self.fill_references(self._sets, state.trainable, frozen, progress.print, bool(start))
            write_config(self.output, config_to_dict(self.config))
        for note in [*self.notes(), *self.memory_notes(), *self.disk_notes()]:
            progress.print(note)
        return programs, state, sums, frozen

    def _first_shapes(self) -> tuple[TrainState, Sums, Any]:
        self.model.drop_state()
        return self.model.first_shapes(self.engine)

    def _meanwhile(self, is_new: bool) -> None:
        """While threads compile or load. is_new: no checkpoint has the first state."""
        if is_new:
            with phase("load", _LESS_LOADED):
                self.model.make_state(self.engine)
        if not self.model.is_loading:  # loading takes Python's lock, too
            heap.settle()

    def fill_references(self, sets, trainable, frozen, say=say, stepped: bool = False) -> None:
        """Fills in, in place, the reference's log-probabilities that PairDatasets lack; other sets and None are
        skipped. stepped: what trains has made steps.
        """
        trained = stepped and not has_adapter(self.model.given)
        base, cache = self.config.model, self.config.data.cache_dir
        base = references.Base(self.model.given.base_digest, base.load_in, base.compute, self.config.precision)
        for rows in (data.in_rows(self.batches.length).rows for data in sets if isinstance(data, PairDataset)):
            references.fill_reference(
                rows, self.spec.objective, self.engine, cache, base, trainable, frozen, say, trained
            )

    # ---- descriptions of the run

    def data_summary(self):
        """Lines on teacher, rows, tokens, steps, warnings and end tokens."""
        steps = (self.total_steps, self.config.schedule.warmup_steps, self.model.given.config.context_length)
        about = rows_report.data_summary(self.train_data, self.eval_data, self.batches, *steps)
        lines = [*self.stored.described(self.model.prepared, self.spec.objective), about]
        if self.tokenizer is not None and self.model.given.config.head.is_text:
            lines.append(ends_in_words(self.tokenizer, ends_of(self.model.given, self.tokenizer)))
        dated = self.tokenizer is not None and writes_today(self.tokenizer, None)
        lines += rows_report.today_note(self.config.data.today if dated else None)
        return "\n".join(lines)

    def columns_read(self) -> list[str]:
        """A line for each set of rows, with the columns that are read, and as what, and those that are not."""
        prompts = None if self.answers is None else self.answers.prompts
        return rows_report.columns_read(self.train_data, self.eval_data, self.batches, prompts)

    def finish_line(self, start: int) -> str:
        """The predicted time of the steps from `start` (from 0) on, and its price."""
        price, devices = self.config.plan.dollars_per_hour, self.planner.cost.shape.devices
        steps, samples = self.total_steps - start, self.batches.needs_model
        return plan_text.finish_line(self.planner.forecast, steps, price, devices, samples)

    def memory_notes(self) -> list[str]:
        """Lines on each phase's memory and what will not fit; [] on a CPU."""
        planner, model = self.planner, self.model
        if planner.device.name == "cpu":
            return []
        config = self.config
        of_plan = (
            planner.cost,
            planner.forecast,
            planner.device,
            config.model.load_in,
            config.data,
            config.checkpoint,
            config.export,
            partition.MeshShape.of(self.mesh).shard_count,
        )
        rows, before = self.batches.sampled_rows, self.spec.step.needs.rows_before
        is_exact = rows is not None and rows.exact
        phases = phases_of(model.prepared, model.trainable, *of_plan, self.sampled, self.slots, before, exact=is_exact)
        phases = [*self.stored.phases(self.engine), *phases]
        return phase_lines(phases, planner.budget_bytes, host_memory.size_bytes(), self.sampled, self.slots)

    def pass_notes(self) -> list[str]:
        """The time of passes over rows that lack references, and held-out ones, whose weights stream; else []."""
        planner, held_out = self.planner, [*self.further_eval_batches.values()]
        held_out += [] if self.eval_batches is None else [self.eval_batches]
        rows = {
            "the reference's": sum(len(pairs) for pairs in self._pairs if references.unwritten([pairs], None)),
            "an evaluation's": self.engine.rows * sum(batches.steps_per_epoch for batches in held_out),
        }
        return plan_text.pass_lines(planner.plan, planner.cost, planner.device, rows)

    @property
    def _pairs(self) -> list[PackedPairs]:
        """Rows of pairs, trained on and held out."""
        return [data.in_rows(self.batches.length).rows for data in self._sets if isinstance(data, PairDataset)]

    def stream_lines(self) -> list[str]:
        """Of a trainer that only evaluates: the weights that stream, and the time that its rows take."""
        planner, batches = self.engine.planner, self.eval_batches
        if not isinstance(planner, ForwardPlanner) or batches is None:
            return []
        return planner.lines(batches.steps_per_epoch * self.engine.rows)

    def notes(self) -> list[str]:
        config, model = self.config, self.model
        how = self.storage(), config.optim.offload, self.gradients, self.program.aux_losses
        own = isinstance(self.batches, SampledAnswers) and self.batches.own_reference
        compares = model.prepared.teacher is None and not own
        return [
            *precision_notes(config.numbers, *how, model.given),
            *rounding_notes(model.given, model.qat, config.qat.start if config.qat else 0),
            *(reference_notes(self.spec.objective, config.adapter and config.adapter.path) if compares else ()),
        ]

    def storage(self) -> dict[str, str]:
        """{"weights": "fp32" or "bf16", "optimizer": "fp32", "8 bits" or "as it was given"}."""
        state_format = "8 bits" if self.config.optim.name.endswith("_8bit") else "fp32"
        optimizer = "as it was given" if "optimizer" in self.spec.identities else state_format
        return {"weights": self.program.weights, "optimizer": optimizer}

    @property
    def gradients(self) -> str:
        """Dtype of gradient sums, and their quantised sync, such as "fp32, sent in int8 with error feedback"."""
        summed = "fp32" if self.engine.planner.plan.micro_batches > 1 else self.program.weights
        return summed if self.program.sync is None else f"{summed}, {self.program.sync}"

    @property
    def adapted(self) -> bool:
        """Whether the model has an adapter; False: full fine-tuning."""
        return has_adapter(self.model.given)

    @running()
    def evaluate(self, trained: bool = False, stepped: bool = True) -> dict[str, Any]:
        """Metrics of the given model: {"eval_loss", "eval_UNIT": over how many, ...}; {} if held-out rows have only
        questions, ValueError without any.

        trained: with qat.start above 0, weights are rounded as after the last step.
        stepped: False: the weights have made no step, and are a preference objective's reference if all of them train.
        """
        program = self.program if trained else self.engine.before_qat or self.program
        return self._eval_loss(program, *self.model.weights(self.engine), stepped)

    @running()
    def evaluate_checkpoint(self, folder: Path, step: int | None = None) -> tuple[dict[str, Any], Decoder]:
        """(held-out metrics, model) of a checkpoint (None: the last intact one). Gives up the given trained tensors
        unless `keeps_model`. `folder` is locked meanwhile. ValueError if it is in use, has none intact, or is another
        run's.
        """
        with Checkpointer(folder, self.config.checkpoint.keep) as checkpointer:
            trainable = self._restore(checkpointer, lambda changes: None, True, step)[1]["trainable"]
        frozen = self.model.placed_frozen(self.engine)
        return self._eval_loss(self.program, trainable, frozen), self.model.finished(trainable)

    def _eval_loss(self, program: StepProgram, trainable, frozen, stepped: bool = True) -> dict[str, Any]:
        """Held-out metrics; {} if there are only questions, ValueError without rows. Without `trains` a smaller plan
        follows if a pass does not fit.
        """
        if (batches := self.eval_batches) is None:
            if self.answers is not None:
                return {}
            raise ValueError("there are no evaluation rows: set data.eval or data.eval_rows")
        self.stored.fill((self.eval_data,), self.engine)
        self.fill_references(self._held_out_sets, trainable, frozen, stepped=stepped)
        compiled = self.engine.compile_evaluate(program, trainable, frozen)
        planner = self.engine.planner
        while isinstance(planner, ForwardPlanner) and planner.smaller(compiled):
            self.engine.follow_plan()
            chunk = self.program.chunk_tokens
            compiled = self.engine.compile_evaluate(dataclasses.replace(program, chunk_tokens=chunk), trainable, frozen)
        with timing.phase("eval"):
            shown = m.Progress(self.total_steps).evaluating
            sets = {"": batches, **self.further_eval_batches}
            return {
                key: value
                for name, rows in sets.items()
                for key, value in named(self.engine.evaluate(compiled, trainable, frozen, rows, shown), name).items()
            }

    # ---- checkpoints

    def _meta(self, step: int) -> dict[str, Any]:
        """A checkpoint's metadata. Collective."""
        position = self.batches.position(step)
        return self.record() | ({} if position is None else {POSITION: position}) | self.model.recorded()

    def record(self) -> dict[str, Any]:
        """What identifies this run, and what its numbers depend on (record_of). Needs loaded weights."""
        return record_of(
            config_to_dict(self.config),
            trainable=dict(zip(self.names, jax.tree.leaves(self.model.trainable), strict=True)),
            storage=self.storage(),
            base=self.model.given,
            teacher=self.stored.digest or self.model.teacher_digest,
            data=self.batches.identity(),
            total_steps=self.total_steps,
            user_parts=self.spec.identities,
            code=self.spec.code,
            numerics={
                **self.engine.planner.plan.to_record(),
                "gradients": self.gradients,
                **partition.MeshShape.of(self.mesh).to_record(),
                "max_documents": self.program.max_documents,
                "deterministic": self.config.deterministic,
                "compiler_options": self.engine.options,
            },
        )

    def _same_run(self) -> dict[str, Any]:
        """Waits for the weights, from which the base's digest is computed."""
        self.model.take_weights()  # the digest of the base is computed from them
        return same_run(self.record())

    def _resume(self, checkpointer: Checkpointer, from_step: int | None) -> tuple[TrainState | None, int]:
        """(state, steps done) of the checkpoint to continue from; (None, 0) without one. ValueError for another run's
        folder, a missing `from_step`, or checkpoint.resume = never.
        """
        if from_step is None and processes.of_first(checkpointer.latest) is None:
            require_same_config(self.output, config_to_dict(self.config))
            return None, 0
        if self.config.checkpoint.resume == "never":
            given = Path(self.config.output)
            raise ValueError(
                f"output = {str(given)!r} holds checkpoints and checkpoint.resume is never: name another folder, "
                f"such as output={next_name(given)}, or set checkpoint.resume: auto to continue from them"
            )
        changes = []
        step, state = self._restore(checkpointer, changes.extend, from_step=from_step)
        say(f"resuming from step {step} of {self.total_steps} ({checkpointer.folder})")
        for change in changes:
            say(f"  {change}")
        return state, step

    def _restore(
        self, checkpointer: Checkpointer, note, weights_only: bool = False, from_step: int | None = None
    ) -> tuple[int, Any]:
        """(steps done, state) of a checkpoint, read into a step's shardings. note: gets lists of differences.
        weights_only: state is {"trainable": ...}. CheckpointError if none is intact.
        """
        self.model.take_weights()  # the record has the base's fingerprint
        target: Any = self.model.state_shapes(self.engine)
        target, like = {"trainable": target.trainable} if weights_only else target, {}

        def check(meta):
            saved = translated(meta)
            like["state"] = gradient_sync.as_saved(target, saved)
            if self.trains:
                self.planner.adopt(section(saved, "numerics"))
                self.engine.follow_plan()
            note(require_same_run(saved, self.record(), Path(self.config.output)))
            self.model.resume(saved)

        with timing.phase("files", "checkpoint"):
            step, restored, meta = checkpointer.restore(from_step, like=like, check=check, partial=weights_only)
        saved = translated(meta)
        if step > (steps := self.total_steps):
            raise CheckpointError(f"steps = {steps}: the last checkpoint is of step {step}; give it as many or more")
        if self.trains and step == steps:
            require_same_code(saved, self.record(), f"this run is complete ({steps} steps)")
        if not weights_only and is_longer(saved, self.record()):
            note(new_rates(self.config.schedule, self.program.schedule, step, restored["state"].skipped, steps))
        if self.trains:
            self.batches.resume(step, saved.get(POSITION))
        return step, gradient_sync.fitted(restored["state"], target, note)
