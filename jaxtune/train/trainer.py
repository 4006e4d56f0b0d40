"""The Trainer: one run, from a model and rows to a trained model.

Making one reads the rows and, by setup.py, makes the rule of updates, the step's programs, the mesh and the planner.
`train` takes the output folder, goes on from its last checkpoint if there is one, compiles the step
(program/programs.py), makes the steps (run.py), and hands over the trained model.
What is said of a run, and its checkpoints, follow below.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from jaxtune.models.decoder import Decoder
from jaxtune.models.lora import has_adapter
from jaxtune.models.placement import partition
from jaxtune.system import processes
from jaxtune.system.files import remove_unfinished
from jaxtune.system.invocation import spelled
from jaxtune.system.terminal import outliving, say
from jaxtune.train import own_parts, setup
from jaxtune.train.answer_metrics import answer_metrics
from jaxtune.train.callbacks import Callback
from jaxtune.train.config import TrainConfig
from jaxtune.train.config.file import config_to_dict
from jaxtune.train.data import Batches, TokenDataset
from jaxtune.train.data.pairs import PairDataset
from jaxtune.train.data.templates import trained_tokenizer
from jaxtune.train.display import metrics as m
from jaxtune.train.display import report
from jaxtune.train.display.monitor import Monitor, Watched
from jaxtune.train.end_tokens import with_end_tokens
from jaxtune.train.folder.checkpoint import Checkpointer, CheckpointError
from jaxtune.train.folder.record import (
    POSITION,
    in_first_words,
    is_longer,
    record_of,
    recorded_config,
    require_same_config,
    require_same_run,
    same_run,
    write_config,
)
from jaxtune.train.folder.results import Delivery
from jaxtune.train.folder.run_folder import CHECKPOINTS, CONFIG
from jaxtune.train.folder.run_rows import Reader, own_lanes, run_rows, source_of
from jaxtune.train.folder.run_state import recorded_state
from jaxtune.train.folder.saving import Saver, TrainingInterrupted
from jaxtune.train.objectives import references
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.objectives.objective import Objective
from jaxtune.train.objectives.policy import GRPO
from jaxtune.train.objectives.prompts import end_tokens
from jaxtune.train.planning.cost import COMPUTE_DTYPES
from jaxtune.train.planning.devices import device_peak_flops, host_memory_bytes
from jaxtune.train.planning.forward import ForwardPlanner
from jaxtune.train.planning.phases import Sampled, phase, phase_lines, phases_of
from jaxtune.train.planning.plan import residuals_text
from jaxtune.train.planning.planner import Planner
from jaxtune.train.program.flops import flop_counter
from jaxtune.train.program.programs import Engine, Programs
from jaxtune.train.program.step import StepProgram, Sums, TrainState, trainable_names
from jaxtune.train.program.trained_model import TrainedModel
from jaxtune.train.run import Profile, Run, is_owed, rows_identity
from jaxtune.train.signals import StopSignal


class Trainer:
    """Trains `model` on rows, as `config` says; the model given is never changed or donated.

    Args:
      model: a Decoder; its `nnx.Param`s are what trains (see get_peft_model, or everything for full fine-tuning).
      tokenizer: its Hugging Face tokenizer.
      config: a TrainConfig; its `model` and `adapter` are not applied but recorded, as the model is: recorded_config.
      train_rows, eval_rows: a path, a data set's name, a list of dicts, or a prepared TokenDataset; by default those
        that config.data names. train_rows may also be a BatchSource (data/batches.py), which makes each step's batch
        when the step comes, perhaps with the model that trains.
      keeps_model: whether the caller goes on holding `model`. If not, what trains of it is let go once the run has
        copied it, and the planner does not count it.
      weights: a future of the model with its arrays, where `model` has shapes only; awaited once the step is compiled.
      objective: what is trained for, if not what config says. optimizer: an optax transformation in place of
        config.optim's; its updates are added to float32 weights, after clipping by config.max_grad_norm. schedule:
        learning rate by number of updates made (from 0), in place of config.schedule's; beside an `optimizer`, which
        has its own, it is only what metrics show. callbacks: are told of steps; see Callback.
      profile: a folder for a profile of config.profile.steps steps (3 where config asks for none); by default, and
        only if config asks for steps, `profile` in the output folder.
      trains: False for a trainer that evaluates or shows rows: then a forward pass is planned, which needs no
        optimizer, and train() is refused.

    Attributes: `model` (TrainedModel), `engine` (Engine), `tokenizer` (with the chat template that rows are rendered
    by), `batches` (the BatchSource of its steps), `train_data` (TokenDataset; None where not all rows are known before
    the run), `eval_data` (TokenDataset or None), `answers` (AnswerMetrics of evaluation.generate, or None), `output`
    (Path), `total_steps`, and after train() `history`, the metrics of every step as dicts, and `steps_done`.
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
        weights: Future[Decoder] | None = None,
        objective: Objective | None = None,
        optimizer: optax.GradientTransformation | None = None,
        schedule: optax.Schedule | None = None,
        callbacks: Sequence[Callback] = (),
        trains: bool = True,
    ):
        self.config, self.trains = config, trains
        self.tokenizer = trained_tokenizer(tokenizer, config.data.template)
        self.output = Path(config.output)
        self.profile_folder = Path(profile) if profile is not None else self.output / "profile"
        self.profile_steps = config.profile.steps or (0 if profile is None else 3)
        self.history: list[dict[str, Any]] = []
        self.steps_done = 0
        self.sampled: Sampled | None = None  # how the model is asked questions, if somebody says that it will be

        self.model = TrainedModel(model, config, keeps_model, weights)
        if not jax.tree.leaves(self.model.trainable):
            raise ValueError("the model has no trainable tensor: add adapters (get_peft_model) or do not freeze it")
        own_parts.require_nothing_beside(config, optimizer, schedule, objective)
        self.config = config = recorded_config(config, self.model.prepared)
        self.objective = objective or objective_of(config)
        self.objective.check(self.model.prepared)
        self.callbacks = tuple(callbacks)

        ends = end_tokens(self.model.given, self.tokenizer) if isinstance(self.objective, GRPO) else ()
        reader = Reader(self.objective, self.tokenizer, config, self.model.given.config, tuple(ends))
        asked = config.data.eval if eval_rows is None else eval_rows
        self.answers = answer_metrics(config, asked, self.tokenizer, self.model.given)
        rows, held_out = run_rows(reader, train_rows, eval_rows, not trains)
        self.train_data = rows if isinstance(rows, TokenDataset) else None
        self.config = config = in_first_words(config)
        self.batches, self.eval_data, self.total_steps = source_of(rows, held_out, config)
        self._require_starts_within_the_run()

        # `own` is what is recorded of the parts that were given.
        self.own = own_parts.identities(self.model.trainable, self.total_steps, optimizer, schedule, objective)
        rule = setup.update_rule(config, self.total_steps, optimizer, schedule)
        programs = setup.step_programs(config, self.model, self.objective, rule, self.batches, self.eval_data)
        self.names = trainable_names(self.model.trainable)
        self.flops = flop_counter(self.model.prepared)
        config, mesh, planner = setup.planned(config, self.model, self.objective, self.batches, optimizer, trains)
        self.batches.divide(mesh.size, own_lanes(mesh))
        rows = self.eval_data and self.eval_data.rows
        self.engine = Engine(*programs, planner, mesh, self.batches, config, rows)

    def _require_starts_within_the_run(self) -> None:
        config, steps = self.config, self.total_steps
        if self.profile_steps and config.profile.start >= steps:
            raise ValueError(f"profile.start = {config.profile.start}: the run has only {steps} steps")
        if config.qat is not None and config.qat.start >= steps:
            raise ValueError(f"qat.start = {config.qat.start}: the run has only {steps} steps")

    @property
    def planner(self) -> Planner:
        assert isinstance(self.engine.planner, Planner), "this trainer was made with trains=False"
        return self.engine.planner

    @property
    def program(self) -> StepProgram:  # as the plan in force says
        return self.engine.program

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self.engine.mesh

    @property
    def eval_batches(self) -> Batches | None:
        """Of an evaluation, by the plan in force: each has the shape of a micro-batch."""
        return None if self.eval_data is None else self.eval_data.batches(self.engine.rows, shuffle=False)

    # ---- the run

    def train(
        self, stop: StopSignal | None = None, delivery: Delivery | None = None, from_step: int | None = None
    ) -> Decoder:
        """Runs (or resumes) the run and returns the trained model: a new module that shares every frozen array.

        Args:
          stop: an entered StopSignal, by default one of its own.
          delivery: takes the trained model while the folder is this run's alone.
          from_step: resumes from the checkpoint of this step, and later ones are replaced; by default from the last.
        Raises:
          TrainingInterrupted: SIGTERM, SIGINT or SIGHUP came; the state is saved.
          Interrupted: it came before the first step, or after the last: there was nothing to save.
          TrainingStopped: a guard refused to go on.
          ValueError: the output folder holds another run; the trainer was made with trains=False.
        """
        if not self.trains:
            raise ValueError("Trainer(trains=False) only evaluates: make one without `trains` to train")
        config = self.config
        self.output.mkdir(parents=True, exist_ok=True)
        with outliving(), contextlib.ExitStack() as stack:
            if stop is None:
                stop = stack.enter_context(StopSignal())
            stack.enter_context(stop.held())
            stack.callback(self.batches.close)
            # A run in a second process is refused before anything is written.
            checkpointer = Checkpointer(self.output / CHECKPOINTS, keep=config.checkpoint.keep)
            stack.enter_context(checkpointer)
            processes.require_shared(self.output)
            if processes.first():
                remove_unfinished(self.output)
            with stop.at_once():
                resumed, start = self._resume(checkpointer, from_step)
                if delivery is not None:
                    delivery.begin(self._same_run, start)
            stack.enter_context(recorded_state(self.output, self.total_steps, (TrainingInterrupted,)))
            # A run that died before its first checkpoint left its config, and metrics that begin anew.
            resumed_step = start if start or (self.output / CONFIG).exists() else None
            logger = m.MetricsLogger(
                self.output,
                tensorboard=config.metrics.tensorboard,
                wandb_project=config.metrics.wandb_project,
                trackio_project=config.metrics.trackio_project,
                config=config_to_dict(config),
                resumed_step=resumed_step,
            )
            shown = m.Progress(self.total_steps, start)
            with logger, shown as progress, Monitor(self._watched(), logger, progress) as monitor:
                monitor.applied = start
                saver = Saver(checkpointer, config.checkpoint, start, self._meta, monitor, stop)
                state, self.steps_done = self._run(resumed, start, saver, monitor, stop)
            del resumed
            trainable = state.trainable
            del state  # the optimizer's part of it is of no more use
            trained = with_end_tokens(self.model.finished(trainable), self.tokenizer)
            del trainable
            saved = checkpointer.latest() == self.steps_done
            if delivery is not None:
                remedy = f"export.merged=false leaves the merge to `{spelled('export')}` on a machine with more memory"
                with stop.at_once() if saved else contextlib.nullcontext(), phase("export", remedy):
                    delivery.finish(trained, self._same_run(), start < self.total_steps)
            if processes.first():
                m.decorate("loss.png", lambda: m.loss_plot(self.output / m.JSONL, self.output / "loss.png"))
        return trained

    def _watched(self) -> Watched:
        peak = device_peak_flops(self.mesh.devices.flat[0].device_kind, COMPUTE_DTYPES[self.config.precision])
        return Watched(
            config=self.config,
            total_steps=self.total_steps,
            batches=self.batches,
            unit=self.objective.unit,
            trained=self.names,
            flops=self.flops,
            peak_flops=None if peak is None else peak * self.mesh.size,
            planner=self.planner,
            history=self.history,
            callbacks=self.callbacks,
            check_first=references.first_check(self.objective, self.config, self.train_data, lambda: self.model.fresh),
        )

    def _run(self, resumed: TrainState | None, start: int, saver, monitor: Monitor, stop) -> tuple[TrainState, int]:
        config = self.config
        traced = self.profile_steps if processes.first() else 0
        profile = Profile(self.profile_folder, traced, config.profile.start, self._traced)
        rows = rows_identity(self.eval_data and self.eval_data.documents, self.answers)
        owed = is_owed(config.evaluation, start, self.total_steps, self.output, rows)
        run = Run(
            self.engine,
            monitor,
            saver,
            self.total_steps,
            config.evaluation,
            owed,
            lambda: self.eval_batches,
            profile,
            self.model.finished,
            self.answers,
        )
        if resumed is not None and start >= self.total_steps:
            monitor.progress.print(f"this run is complete: {start} steps (output {self.output})")
            write_config(self.output, config)
            if owed:
                frozen = self.model.placed_frozen(self.engine)
                self.look_up_references((self.eval_data,), resumed.trainable, frozen, monitor.progress.print)
                of_state = (self.program, resumed.trainable, frozen)
                evaluate = self.eval_data and self.engine.compile_evaluate(*of_state)
                run.evaluate(evaluate, resumed, frozen, start)
            return resumed, start
        if lacking := profile.lacking(self.total_steps - start):
            monitor.progress.print(lacking)
        with stop.at_once():
            programs, state, sums, frozen = self._start(resumed, start, monitor)
        del resumed
        return run.steps(programs, state, sums, frozen, start)

    def _start(
        self, resumed: TrainState | None, start: int, monitor: Monitor
    ) -> tuple[Programs, TrainState, Sums, Any]:
        """(programs, state, sums, frozen) for the first step that this process makes."""
        progress = monitor.progress
        progress.print("\n".join(self.planner.lines()))
        if self.planner.device.name != "cpu":  # whose speed is not known
            price, devices = self.config.plan.dollars_per_hour, self.planner.cost.devices
            progress.print(report.finish_line(self.planner.forecast, self.total_steps - start, price, devices))
        # One line, once the folder is this run's: an error before leaves it to another.
        with monitor.planned("load", start) as line:
            with progress.compiling():
                programs = self.engine.fit(lambda: self.model.first_shapes(self.engine), start, progress.print)
            line["compile_seconds"] = monitor.uncounted_seconds()
            if self.model.coming:
                progress.print("waiting for the weights")
            line |= self.engine.connect(progress.print)
            with phase("load" if resumed is None else "resume", "a smaller model, or model.load_in=nf4"):
                begun = self.model.begin(self.engine, resumed)
            sets = (self.train_data, self.eval_data)
            self.look_up_references(sets, begun[0].trainable, begun[2], progress.print)
            write_config(self.output, self.config)
        for note in [*self.notes(), *self.memory_notes()]:
            progress.print(note)
        return programs, *begun

    def look_up_references(self, sets, trainable, frozen, tell=say) -> None:
        """Fills in log-probabilities of the reference that rows wait for."""
        for rows in (data.in_rows(self.batches.length).rows for data in sets if isinstance(data, PairDataset)):
            base = self.model.given.base_digest
            references.fill_reference(rows, self.objective, self.engine, self.config, base, trainable, frozen, tell)

    # ---- what is said of the run

    def data_summary(self):
        """What became of the rows, in words."""
        steps = (self.total_steps, self.config.schedule.warmup_steps, self.model.given.config.context_length)
        return report.data_summary(self.train_data, self.eval_data, self.batches, *steps)

    def memory_notes(self) -> list[str]:
        """The memory of each phase, and what will not fit; nothing on a CPU, whose memory nothing counts."""
        planner, model = self.planner, self.model
        if planner.device.name == "cpu":
            return []
        of_plan = (planner.cost, planner.forecast, planner.device, self.config, self.mesh.shape[partition.FSDP])
        phases = phases_of(model.prepared, model.trainable, *of_plan, self.sampled)
        sampling = [] if self.sampled is None else [f"  {self.sampled}"]
        return [*phase_lines(phases, planner.budget_bytes, host_memory_bytes()), *sampling]

    def notes(self) -> list[str]:
        """How weights are kept and rounded, a line each."""
        losses = self.program.aux_losses
        return report.precision_notes(
            self.config, self.storage(), self.gradients, losses, self.model.given, self.model.qat
        )

    def storage(self) -> dict[str, str]:
        """How the weights and the optimizer's state of a checkpoint are kept."""
        own = "8 bits" if self.config.optim.name == "adamw_8bit" else "fp32"
        optimizer = "as it was given" if "optimizer" in self.own else own
        return {"weights": self.program.weights, "optimizer": optimizer}

    @property
    def gradients(self) -> str:
        """The dtype that gradients are summed in."""
        return "fp32" if self.engine.planner.plan.micro_batches > 1 else self.program.weights

    def _traced(self) -> dict[str, Any]:
        """What a profile says of the run."""
        config = self.config
        rows, length = self.batches.rows_per_step, self.batches.length
        return {
            "config": config_to_dict(config),
            "tokens_per_step": rows * length,
            "what": f"{config.model.path or config.model.from_config}, {config.precision}, {rows} x {length:,} tokens "
            f"a step, plan {residuals_text(self.planner.plan.residuals)}",
        }

    @property
    def adapted(self) -> bool:
        """Whether adapters are what trains."""
        return has_adapter(self.model.given)

    def evaluate(self, trained: bool = False) -> dict[str, Any]:
        """eval_loss (a mean), eval_targets and what else the objective measures, of the model as given, without
        training; under QAT rounded as step 0's is, or as the last step's if it is `trained`. Empty where held-out rows
        have questions only (`answers`)."""
        program = self.program if trained else self.engine.before_qat or self.program
        return self._eval_loss(program, *self.model.weights(self.engine))

    def evaluate_checkpoint(self, folder: Path) -> tuple[dict[str, Any], Decoder]:
        """(as `evaluate`, the model) of the last intact checkpoint in a folder of this run."""
        with Checkpointer(folder, self.config.checkpoint.keep) as checkpointer:
            trainable = self._restore(checkpointer, lambda changes: None, weights_only=True)[1]["trainable"]
        frozen = self.model.placed_frozen(self.engine)
        return self._eval_loss(self.program, trainable, frozen), self.model.finished(trainable)

    def _eval_loss(self, program: StepProgram, trainable, frozen) -> dict[str, Any]:
        batches = self.eval_batches
        if batches is None:
            if self.answers is not None:
                return {}
            raise ValueError("there are no evaluation rows: set data.eval or data.eval_rows")
        self.look_up_references((self.eval_data,), trainable, frozen)
        compiled = self.engine.compile_evaluate(program, trainable, frozen)
        planner = self.engine.planner
        while isinstance(planner, ForwardPlanner) and planner.smaller(compiled):
            self.engine.follow_plan()
            chunk = self.program.chunk_tokens
            compiled = self.engine.compile_evaluate(dataclasses.replace(program, chunk_tokens=chunk), trainable, frozen)
        shown = m.Progress(self.total_steps).evaluating
        return self.engine.evaluate(compiled, trainable, frozen, batches, shown)

    # ---- checkpoints

    def _meta(self, step: int) -> dict[str, Any]:
        """What a checkpoint of that step records beside its arrays; all processes call it."""
        position = self.batches.position(step)
        return self.record() | ({} if position is None else {POSITION: position})

    def record(self) -> dict[str, Any]:
        """What makes a run this one, and what its numbers depend on."""
        return record_of(
            self.config,
            trainable=dict(zip(self.names, jax.tree.leaves(self.model.trainable), strict=True)),
            storage=self.storage(),
            base=self.model.given,
            data=self.batches.identity(),
            total_steps=self.total_steps,
            own=self.own,
            numerics={
                **self.engine.planner.plan.to_record(),
                "gradients": self.gradients,
                "mesh_data": self.mesh.shape[partition.DATA],
                "mesh_fsdp": self.mesh.shape[partition.FSDP],
                "max_documents": self.program.max_documents,
                "deterministic": self.config.deterministic,
                "compiler_options": self.engine.options,
            },
        )

    def _same_run(self) -> dict[str, Any]:
        self.model.take_weights()  # the base's digest comes with them
        return same_run(self.record())

    def _resume(self, checkpointer: Checkpointer, from_step: int | None) -> tuple[TrainState | None, int]:
        """(state, steps done) of the checkpoint that the run goes on from; (None, 0) where there is none."""
        if processes.of_first(checkpointer.latest) is None:
            require_same_config(self.output, self.config)
            return None, 0
        if self.config.checkpoint.resume == "never":
            raise ValueError(
                f"output = {str(self.output)!r} holds checkpoints and checkpoint.resume is never: name another folder, "
                "or set checkpoint.resume: auto to go on from them"
            )
        changes = []
        step, state = self._restore(checkpointer, changes.extend, from_step=from_step)
        say(f"resuming from step {step} of {self.total_steps} ({checkpointer.folder})")
        for change in changes:
            say(f"  {change}")
        return state, step

    def _new_rates(self, step: int) -> list[str]:
        """What happens to the learning rate when a run that has made `step` steps is made longer, in a sentence."""
        schedule, wanted = self.program.schedule, self.config.schedule
        if schedule is None or (wanted.name == "constant" and wanted.warmup_ratio is None):
            return []
        return [
            f"the run is longer than it was: from here the learning rate follows the {wanted.name} schedule of "
            f"{self.total_steps:,} steps, and is {float(np.asarray(schedule(step))):.3g} in step {step + 1:,}"
        ]

    def _restore(
        self, checkpointer: Checkpointer, tell, weights_only: bool = False, from_step: int | None = None
    ) -> tuple[int, Any]:
        """(step, state) of the last intact checkpoint, or of `from_step`'s. It is read into the places where a step has
        it: no other state is made for its shapes, and what was given of the trained tensors is let go before.
        weights_only: the state is {"trainable": weights}, and the optimizer's part is not read."""
        self.model.take_weights()  # the record knows the base's fingerprint
        like: Any = self.model.state_shapes(self.engine)
        if weights_only:
            like = {"trainable": like.trainable}

        def check(saved):
            if self.trains:
                self.planner.adopt(saved["numerics"])
                self.engine.follow_plan()
            tell(require_same_run(saved, self.record(), self.output))
            self.model.let_go()

        like = {"state": like}
        step, restored, meta = checkpointer.restore(from_step, like=like, check=check, partial=weights_only)
        if is_longer(meta, self.record()):
            tell(self._new_rates(step))
        if step > (steps := self.total_steps):
            raise CheckpointError(f"steps = {steps}: the last checkpoint is of step {step}; give it as many or more")
        if self.trains:
            self.batches.resume(step, meta.get(POSITION))
        return step, restored["state"]
