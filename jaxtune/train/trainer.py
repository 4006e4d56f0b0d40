"""The Trainer: one run, from a model and rows to a trained model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from jaxtune.files import remove_unfinished
from jaxtune.models import partition
from jaxtune.models.decoder import Decoder
from jaxtune.models.lora import copy_structure, has_adapter, matrices
from jaxtune.models.quant import convert_qat, prepare_qat, qat_spec
from jaxtune.profile import capture
from jaxtune.terminal import say
from jaxtune.train import metrics as m
from jaxtune.train.checkpoint import Checkpointer
from jaxtune.train.config import TrainConfig
from jaxtune.train.config_file import config_to_dict
from jaxtune.train.data import Batch, TokenDataset, prepare
from jaxtune.train.data.templates import trained_tokenizer
from jaxtune.train.flops import flop_counter, sum_squared_documents
from jaxtune.train.loss import router_losses
from jaxtune.train.monitor import Monitor, TrainingStopped
from jaxtune.train.optim import make_optimizer, update_bound, weight_storage
from jaxtune.train.planning.cost import COMPUTE_DTYPES
from jaxtune.train.planning.plan import residuals_text
from jaxtune.train.planning.planner import Planner, out_of_memory
from jaxtune.train.programs import Programs, abstract, compiler_options
from jaxtune.train.record import (
    CONFIG,
    ROW_OPTIONS,
    record_of,
    recorded_config,
    require_same_config,
    require_same_run,
    same_run,
    write_config,
)
from jaxtune.train.report import precision_notes
from jaxtune.train.results import Delivery
from jaxtune.train.saving import Saver
from jaxtune.train.schedule import learning_rate_schedule
from jaxtune.train.signals import StopSignal
from jaxtune.train.step import StepProgram, Sums, TrainState, trainable_names

CHECKPOINTS = "checkpoints"


class Trainer:
    """Trains `model` on rows, as `config` says; the model given is never changed or donated.

    Args:
      model: a Decoder; its `nnx.Param`s are what trains (see get_peft_model, or everything for full fine-tuning).
      tokenizer: its Hugging Face tokenizer.
      config: a TrainConfig; its `model` and `adapter` are not applied but recorded, as the model is: recorded_config.
      train_rows, eval_rows: a path, a data set's name, a list of dicts, or a prepared TokenDataset; by default those
        that config.data names.
      keeps_model: whether the caller goes on holding `model`. If not, what trains of it is let go once the run has
        copied it, and the planner does not count it.
      weights: the model with its arrays, on its way; those of `model` are then shapes only. They are waited for once
        the step is compiled.
      profile: a folder for a profile of config.profile.steps steps (3 where config asks for none); by default, and
        only if config asks for steps, `profile` in the output folder.

    Attributes: `tokenizer` (with the chat template that rows are rendered by), `train_data`, `eval_data`
    (TokenDataset), `output` (Path), `total_steps`, and after train() `history`, the metrics of every logged step as
    dicts.
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
    ):
        self.config = config
        self._keeps_model = keeps_model
        self.tokenizer = trained_tokenizer(tokenizer, config.data.template)
        self.output = Path(config.output)
        self.profile_folder = Path(profile) if profile is not None else self.output / "profile"
        self.profile_steps = config.profile.steps or (0 if profile is None else 3)
        self.history: list[dict[str, Any]] = []

        self._weights = weights
        model, plain_graph = self._hold(model)
        self.qat = qat_spec(model)
        if not jax.tree.leaves(self._trainable):
            raise ValueError("the model has no trainable tensor: add adapters (get_peft_model) or do not freeze it")
        self.config = config = recorded_config(config, model)
        self.train_data, self.eval_data = self._prepare(train_rows, eval_rows)
        self.batches = self.train_data.batches(config.rows_per_step, seed=config.seed)
        if config.steps is not None:
            self.total_steps = config.steps
        else:
            assert config.epochs is not None
            self.total_steps = max(1, round(config.epochs * self.batches.steps_per_epoch))
            if self.total_steps >= 2**31:
                raise ValueError(f"epochs = {config.epochs:g}: {self.total_steps:,} steps are more than can be counted")
        if self.profile_steps and config.profile.start >= self.total_steps:
            raise ValueError(f"profile.start = {config.profile.start}: the run has only {self.total_steps} steps")

        if config.qat is not None and config.qat.start >= self.total_steps:
            raise ValueError(f"qat.start = {config.qat.start}: the run has only {self.total_steps} steps")

        self._place_on(partition.make_mesh(config.mesh.data))
        config.require_rows_for(self.mesh.size)
        schedule = learning_rate_schedule(config.schedule, config.optim.learning_rate, self.total_steps)
        rates = [matrix.lora.rate for _, matrix in matrices(model) if matrix.lora is not None]
        bound = update_bound(config.optim, config.max_grad_norm)
        self.program = StepProgram(
            graph=self.graph,
            optimizer=make_optimizer(config.optim, schedule),
            schedule=schedule,
            max_documents=self._max_documents(),
            max_grad_norm=config.max_grad_norm,
            dropout=any(rate > 0 for rate in rates),
            scale_loss=config.precision == "fp16",
            weights=weight_storage(config.optim.weights, config.precision, _size(self._trainable)),
            router_losses=router_losses(config, model),
            bound=bound,
            # Not adapters, whose many small tensors are better updated at once.
            by_tensor=bound is not None and not has_adapter(model),
            offload=config.optim.offload,
            full=self.batches.full,
            mesh=self.mesh,
        )
        self._program_before_qat = None
        if config.qat is not None and config.qat.start > 0:
            self._program_before_qat = dataclasses.replace(self.program, graph=plain_graph)
        self.names = trainable_names(self._trainable)
        self._flops = flop_counter(model)
        self.planner = Planner(model, config, self.batches.length, self.mesh.devices.flat[0], keeps_model)
        self.eval_batches: Any = None
        self._follow_plan()

    def _place_on(self, mesh: jax.sharding.Mesh) -> None:
        """Where arrays lie."""
        self.mesh, self._replicated = mesh, NamedSharding(mesh, partition.WHOLE)
        self._by_rows = NamedSharding(mesh, partition.ROWS)
        self._unsummed = NamedSharding(mesh, partition.UNSUMMED) if mesh.size > 1 else self._replicated

    def _hold(self, model: Decoder) -> tuple[Decoder, nnx.GraphDef]:
        """Takes the model to train, or its shapes; returns what runs (under QAT a prepared one) and the plain graph."""
        self._given, config = model, self.config
        model = copy_structure(model)
        model.dtype = COMPUTE_DTYPES[config.precision]
        plain_graph, self._trainable, self._frozen = nnx.split(model, nnx.Param, ...)
        if config.qat is not None:
            model = prepare_qat(model, config.qat.format, config.qat.group_size)
        self.graph = nnx.graphdef(model)
        return model, plain_graph

    # ---- data

    def _max_documents(self) -> int | None:
        if self.config.deterministic:
            # No promise about the rows: it would let in cuDNN's attention, whose sums have any order, and which XLA
            # fails to run in another way.
            return None
        sets = [data for data in (self.train_data, self.eval_data) if data is not None]
        return max(data.batches(1, shuffle=False).max_documents for data in sets)

    def _prepare(self, train_rows, eval_rows) -> tuple[TokenDataset, TokenDataset | None]:
        data = self.config.data
        options = {key: getattr(data, key) for key in (*ROW_OPTIONS, "cache_dir", "num_workers")}
        vocab_size = self._given.config.vocab_size

        def load(rows, max_rows):
            prepared = opened(rows, max_rows)
            limit = self._given.config.context_length
            longest = min(data.length, int(prepared.documents.lengths.max()))
            if longest > limit:  # a longer row is fine: positions restart with each document
                raise ValueError(
                    f"data.length = {data.length}: the longest document has {longest} tokens, and the model was made "
                    f"for at most {limit} positions; lower data.length"
                )
            return prepared

        def opened(rows, max_rows):
            if isinstance(rows, TokenDataset):
                if rows.summary.max_token >= vocab_size:
                    raise ValueError(
                        f"token id {rows.summary.max_token} is beyond the model's vocabulary of {vocab_size}: these "
                        "rows were prepared with the tokenizer of another model"
                    )
                return rows
            return prepare(rows, self.tokenizer, vocab_size=vocab_size, max_rows=max_rows, **options)

        train = load(data.train if train_rows is None else train_rows, data.max_rows)
        held_out = data.eval if eval_rows is None else eval_rows
        if held_out is not None:
            return train, load(held_out, None)
        if data.eval_rows:
            return train.split(data.eval_rows)
        return train, None

    def _device_batch(self, batch: Batch, part: int, parts: int) -> Batch:
        """Micro-batch `part` of `parts`, its rows divided over the mesh."""
        size = batch.tokens.shape[0] // parts
        piece = jax.tree.map(lambda a: a[part * size : (part + 1) * size], batch)
        return jax.device_put(piece, self._by_rows)

    def _load_step(self, step: int) -> tuple[list[Batch], dict[str, int]]:
        """Device micro-batches of a step, and its token counts."""
        batch = self.batches.batch_at(step)
        parts = self.planner.plan.micro_batches
        counts = {
            "tokens": int((batch.segment_ids > 0).sum()),
            "trained_tokens": int(batch.weights.sum()),
            "sum_squared": sum_squared_documents(batch),
        }
        return [self._device_batch(batch, part, parts) for part in range(parts)], counts

    # ---- programs

    def first_state(self) -> tuple[TrainState, Sums, Any]:
        """(state, sums, frozen) at the start of a run, placed on the mesh; copies of what the caller holds where the
        step donates them. Waits for weights that are on their way."""
        self._take_weights()
        state = self.program.init(self._trainable, self.config.seed, self._replicated)
        state = jax.device_put(state, self.program.shardings(state, self._replicated))
        return state, self._zero_sums(state), jax.device_put(self._frozen, self._replicated)

    def _take_weights(self) -> None:
        """Waits for weights that are on their way."""
        if self._weights is not None:
            self._hold(self._weights.result())
            self._weights = None

    def first_shapes(self) -> tuple[TrainState, Sums, Any]:
        """What first_state gives, as shapes."""
        state = jax.eval_shape(lambda trainable: self.program.init(trainable, self.config.seed), self._trainable)
        sums = jax.eval_shape(self.program.zero_sums, state.trainable)

        def placed(tree, shardings):
            return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings)

        state = placed(state, self.program.shardings(state, self._replicated))
        sums = placed(sums, jax.tree.map(lambda _: self._unsummed, sums))
        return state, sums, placed(self._frozen, jax.tree.map(lambda _: self._replicated, self._frozen))

    def release_model(self) -> None:
        """Lets the given model's trained tensors go, but for their shapes; first_state cannot be called again."""
        graph, trainable, frozen = nnx.split(self._given, nnx.Param, ...)
        self._trainable = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), trainable)
        self._given = nnx.merge(graph, self._trainable, frozen)

    def _zero_sums(self, state: TrainState) -> Sums:
        return self.program.zero_sums(state.trainable, self._unsummed)

    def compile(self, state: TrainState, sums: Sums, frozen, first_step: int = 0) -> Programs:
        """Compiles the programs of a run from first_step on, once, whatever the data: shapes never change."""
        config = self.config
        options = compiler_options(self.mesh.devices.flat[0].platform, config.deterministic)
        batch = self._abstract_batch()
        index = jax.ShapeDtypeStruct((), jnp.int32, sharding=self._replicated)
        started = time.perf_counter()
        state, sums, frozen = abstract(state), abstract(sums), abstract(frozen)
        where, unsummed = self._replicated, self._unsummed

        def of(program: StepProgram, update: Future, before: Programs | None) -> Programs:
            with jax.set_mesh(self.mesh):
                accumulate = jax.jit(program.accumulate, donate_argnums=0, out_shardings=unsummed)
                accumulate = accumulate.lower(sums, state, frozen, batch, index).compile(compiler_options=options)
            evaluate = None if self.eval_batches is None else self.compile_evaluate(program, state, frozen)
            return Programs(accumulate, update.result(), evaluate, time.perf_counter() - started, before)

        with ThreadPoolExecutor(1, "compile") as pool:
            with jax.set_mesh(self.mesh):
                results = (self.program.shardings(state, where), unsummed, where)
                update = jax.jit(self.program.update, donate_argnums=(0, 1), out_shardings=results)
                update = pool.submit(update.lower(state, sums).compile, compiler_options=options)
            before = None
            if self._program_before_qat is not None and config.qat is not None and first_step < config.qat.start:
                before = of(self._program_before_qat, update, None)
            return of(self.program, update, before)

    def compile_evaluate(self, program: StepProgram, state: TrainState, frozen):
        """Compiles the evaluation of one batch."""
        options = compiler_options(self.mesh.devices.flat[0].platform, self.config.deterministic)
        evaluate = jax.jit(program.evaluate, out_shardings=self._replicated)
        with jax.set_mesh(self.mesh):
            lowered = evaluate.lower(abstract(state), abstract(frozen), self._abstract_batch())
            return lowered.compile(compiler_options=options)

    def _abstract_batch(self) -> Batch:
        """Shapes of a micro-batch, which are also those of an evaluation batch."""
        empty = Batch.empty(self.config.rows_per_step // self.planner.plan.micro_batches, self.batches.length)
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._by_rows), empty)

    # ---- the plan

    def _follow_plan(self) -> None:
        """Takes up the planner's plan: programs compiled before are of another."""
        plan = self.planner.plan
        follow = dict(plan=plan.residuals, chunk_tokens=plan.chunk_tokens, micro_batches=plan.micro_batches)
        self.program = dataclasses.replace(self.program, **follow)
        if self._program_before_qat is not None:
            self._program_before_qat = dataclasses.replace(self._program_before_qat, **follow)
        self._micro_index = [jax.device_put(np.int32(i), self._replicated) for i in range(plan.micro_batches)]
        if self.eval_data is not None:
            self.eval_batches = self.eval_data.batches(self.config.rows_per_step // plan.micro_batches, shuffle=False)

    def _compile_to_fit(self, first_step: int, print_line) -> Programs:
        """Compiles the plan; where the compiler's figure is over the budget, once more for a smaller one."""
        budget = self.planner.budget_bytes
        problem = ""
        for attempt in range(2):
            need = None
            try:
                programs = self.compile(*self.first_shapes(), first_step)
                if budget is None:
                    return programs
                need = self.planner.compiled_bytes(programs.accumulate, programs.update)
                if need <= budget:
                    return programs
                problem = f"the compiled step needs {need / 1e9:.2f} GB"
            except jax.errors.JaxRuntimeError as error:
                if not out_of_memory(error):
                    raise
                problem = "compiling it ran out of memory"
            if attempt == 0:
                self.planner.replan(problem, need, print_line)
                self._follow_plan()
        raise self.planner.hopeless(problem)

    def _first_step(
        self, programs, sums, state, frozen, parts, step, print_line, compiling: Any = contextlib.nullcontext
    ):
        """(programs, sums) of the first step's micro-batches, waited for; where memory runs out, once more under a
        smaller plan, which is compiled in the context that `compiling` makes.

        Nothing of the failed attempt is left: only the update donates the state.
        """
        try:
            done = self._accumulate(self._at(programs, step), sums, state, frozen, parts)
            return programs, jax.block_until_ready(done)
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
        problem = "the first step ran out of memory"
        self.planner.replan(problem, None, print_line)
        self._follow_plan()
        sums = self._zero_sums(state)
        rows = jax.tree.map(lambda *pieces: np.concatenate([np.asarray(piece) for piece in pieces]), *parts)
        count = self.planner.plan.micro_batches
        parts = [self._device_batch(rows, part, count) for part in range(count)]
        try:
            with compiling():
                programs = self.compile(state, sums, frozen, step)
            done = self._accumulate(self._at(programs, step), sums, state, frozen, parts)
            return programs, jax.block_until_ready(done)
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
        raise self.planner.hopeless(problem)

    def _accumulate(self, programs: Programs, sums: Sums, state: TrainState, frozen, parts: list[Batch]) -> Sums:
        """The sums, with every micro-batch of a step added."""
        for index, batch in zip(self._micro_index, parts, strict=True):
            sums = programs.accumulate(sums, state, frozen, batch, index)
        return sums

    def _at(self, programs: Programs, step: int) -> Programs:
        """The programs that a step runs."""
        early = self.config.qat is not None and step < self.config.qat.start
        return programs.before_qat if early and programs.before_qat is not None else programs

    # ---- the run

    def train(self, stop: StopSignal | None = None, delivery: Delivery | None = None) -> Decoder:
        """Runs (or resumes) the run and returns the trained model: a new module that shares every frozen array.

        Args:
          stop: an entered StopSignal, by default one of its own.
          delivery: takes the trained model while the folder is this run's alone.
        Raises:
          TrainingInterrupted: SIGTERM or SIGINT came; the state is saved.
          Interrupted: it came before the first step, or after the last: there was nothing to save.
          TrainingStopped: a guard refused to go on.
          ValueError: the output folder holds another run.
        """
        config = self.config
        self.output.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            if stop is None:
                stop = stack.enter_context(StopSignal())
            stack.enter_context(stop.held())
            # A run in a second process is refused before anything is written.
            checkpointer = Checkpointer(self.output / CHECKPOINTS, keep=config.checkpoint.keep)
            stack.enter_context(checkpointer)
            remove_unfinished(self.output)
            with stop.at_once():
                resumed, start = self._resume(checkpointer)
                if delivery is not None:
                    delivery.begin(self._same_run, start)
            # A run that died before its first checkpoint left its config, and metrics that begin anew.
            resumed_step = start if start or (self.output / CONFIG).exists() else None
            logger = m.MetricsLogger(
                self.output,
                tensorboard=config.metrics.tensorboard,
                wandb_project=config.metrics.wandb_project,
                config=config_to_dict(config),
                resumed_step=resumed_step,
            )
            with logger, m.Progress(self.total_steps, start) as progress, Monitor(self, logger, progress) as monitor:
                monitor.applied = start
                saver = Saver(checkpointer, config.checkpoint, start, self.record, monitor, stop)
                state = self._run(resumed, start, saver, monitor, stop)
            del resumed
            trained = self._finished_model(state)
            del state
            saved = checkpointer.latest() == self.total_steps
            if delivery is not None:
                with stop.at_once() if saved else contextlib.nullcontext():
                    delivery.finish(trained, self._same_run(), start < self.total_steps)
            m.decorate("loss.png", lambda: m.loss_plot(self.output / m.JSONL, self.output / "loss.png"))
        return trained

    def _run(
        self, resumed: TrainState | None, start: int, saver: Saver, monitor: Monitor, stop: StopSignal
    ) -> TrainState:
        config, progress = self.config, monitor.progress
        if resumed is not None and start >= self.total_steps:
            progress.print(f"this run is complete: {start} steps (output {self.output})")
            write_config(self.output, config)
            if config.evaluation.at_end and self.eval_batches is not None and not self._evaluated(start):
                frozen = jax.device_put(self._frozen, self._replicated)
                evaluate = self.compile_evaluate(self.program, resumed, frozen)
                self._evaluate(evaluate, resumed, frozen, monitor, start)
            return resumed
        with stop.at_once():
            programs, state, sums, frozen = self._start(resumed, start, monitor)
        del resumed

        def at(step: int) -> Programs:
            return self._at(programs, step)

        def evaluate(step: int) -> float:
            between = functools.partial(saver.poll, step, state) if step else None
            return self._evaluate(at(step).evaluate, state, frozen, monitor, step, between)

        if config.evaluation.at_start and start == 0:
            evaluate(0)
        tracing = False
        with ThreadPoolExecutor(1, "batches") as pool, contextlib.ExitStack() as trace:
            coming = pool.submit(self._load_step, start)
            for step in range(start, self.total_steps):
                with monitor.data_wait():
                    parts, counts = coming.result()
                if step + 1 < self.total_steps:
                    coming = pool.submit(self._load_step, step + 1)
                if self.profile_steps and step - start == config.profile.start:
                    with monitor.pause("profile", step):
                        m.decorate("the profile", lambda: trace.enter_context(self._capture(at(step))))  # noqa: B023
                    tracing = True
                if step == start:
                    planned = self.planner.plan
                    again = functools.partial(monitor.pause, "compile", start)
                    programs, sums = self._first_step(programs, sums, state, frozen, parts, step, progress.print, again)
                    if self.planner.plan != planned and step + 1 < self.total_steps:
                        coming = pool.submit(self._load_step, step + 1)  # in micro-batches of the new plan
                else:
                    sums = self._accumulate(at(step), sums, state, frozen, parts)
                state, sums, latest = programs.update(state, sums)
                done = step + 1
                try:
                    monitor.step_dispatched(step, latest, counts)
                    if tracing and step - start == config.profile.start + self.profile_steps - 1:
                        with monitor.pause("profile", done):
                            m.decorate("the profile", trace.close)
                        tracing = False
                    saver.after_step(done, state, last=done == self.total_steps)
                    if done == self.total_steps:
                        monitor.flush()
                except TrainingStopped:
                    saver.stopped_by_guard()
                    raise
                every = config.evaluation.every_steps
                if every and done % every == 0 and done < self.total_steps:
                    evaluate(done)
            if saver.enabled:
                saver.save(self.total_steps, state)
            if monitor.skipped_in_row:
                progress.print(
                    f"warning: the last {monitor.skipped_in_row} updates were skipped, as their numbers were not finite"
                )
            if config.evaluation.at_end and self.eval_batches is not None:
                good = math.isfinite(evaluate(self.total_steps))
            else:
                good = self._is_finite(at(self.total_steps), sums, state, frozen)
            saver.poll(self.total_steps, state)
            saver.finish(good)
            if not good:
                progress.print("warning: the loss of the trained weights is not finite")
        return state

    def _start(
        self, resumed: TrainState | None, start: int, monitor: Monitor
    ) -> tuple[Programs, TrainState, Sums, Any]:
        """(programs, state, sums, frozen) for the first step that this process makes."""
        progress = monitor.progress
        progress.print("\n".join(self.planner.lines()))
        # One line, once the folder is this run's: an error before leaves it to another.
        with monitor.pause("load", start) as line:
            with progress.compiling():
                programs = self._compile_to_fit(start, progress.print)
            line["compile_seconds"] = monitor.uncounted_seconds()
            if self._weights is not None and not self._weights.done():
                progress.print("waiting for the weights")
            begun = self._begin(resumed)
            write_config(self.output, self.config)
        for note in precision_notes(self):
            progress.print(note)
        return programs, *begun

    def _is_finite(self, programs: Programs, sums: Sums, state: TrainState, frozen) -> bool:
        """Whether the state gives a finite loss, on the first rows; `sums` is used up."""
        parts, _ = self._load_step(0)
        sums = programs.accumulate(sums, state, frozen, parts[0], self._micro_index[0])
        return math.isfinite(float(sums.loss.sum()))

    def _evaluated(self, step: int) -> bool:
        lines = m.read_metrics(self.output / m.JSONL) if (self.output / m.JSONL).exists() else []
        return any(line.get("step") == step and "eval_loss" in line for line in lines)

    def _begin(self, resumed: TrainState | None) -> tuple[TrainState, Sums, Any]:
        """first_state, or that of a resumed run."""
        if resumed is not None:
            return resumed, self._zero_sums(resumed), jax.device_put(self._frozen, self._replicated)
        begun = self.first_state()
        if not self._keeps_model:
            self.release_model()
        return begun

    def storage(self) -> dict[str, str]:
        """How the weights and the optimizer's state of a checkpoint are kept."""
        optimizer = "8 bits" if self.config.optim.name == "adamw_8bit" else "fp32"
        return {"weights": self.program.weights, "optimizer": optimizer}

    @property
    def gradients(self) -> str:
        """The dtype that gradients are summed in."""
        return "fp32" if self.planner.plan.micro_batches > 1 else self.program.weights

    def _capture(self, programs: Programs):
        config = self.config
        meta = {
            "config": config_to_dict(self.config),
            "tokens_per_step": self.config.rows_per_step * self.batches.length,
            "what": f"{config.model.path or config.model.from_config}, {config.precision}, {config.rows_per_step} x "
            f"{self.batches.length:,} tokens a step, plan {residuals_text(self.planner.plan.residuals)}",
        }
        return capture(self.profile_folder, meta, {"accumulate": programs.accumulate, "update": programs.update})

    @property
    def adapted(self) -> bool:
        """Whether adapters are what trains."""
        return has_adapter(self._given)

    def evaluate(self, trained: bool = False) -> dict[str, Any]:
        """eval_loss (a mean), eval_targets and what else the objective measures, of the model as given, without
        training; under QAT rounded as step 0's is, or as the last step's if it is `trained`."""
        if self.eval_batches is None:
            raise ValueError("there are no evaluation rows: set data.eval or data.eval_rows")
        state, sums, frozen = self.first_state()
        del sums
        program = self.program if trained else self._program_before_qat or self.program
        evaluate = self.compile_evaluate(program, state, frozen)
        return self._eval_loss(evaluate, state, frozen, m.Progress(self.total_steps))

    def evaluate_checkpoint(self, folder: Path) -> tuple[dict[str, Any], Decoder]:
        """(as `evaluate`, the model) of the last intact checkpoint in a folder of this run."""
        if self.eval_batches is None:
            raise ValueError("there are no evaluation rows: set data.eval or data.eval_rows")
        with Checkpointer(folder, self.config.checkpoint.keep) as checkpointer:
            _, state = self._restore(checkpointer, lambda changes: None)
        frozen = jax.device_put(self._frozen, self._replicated)
        evaluate = self.compile_evaluate(self.program, state, frozen)
        values = self._eval_loss(evaluate, state, frozen, m.Progress(self.total_steps))
        return values, self._finished_model(state)

    def _eval_loss(self, evaluate, state, frozen, progress: m.Progress, between=None) -> dict[str, Any]:
        """between: called after each batch."""
        assert self.eval_batches is not None
        totals, count = [], self.eval_batches.steps_per_epoch
        for index in range(count):
            batch = self._device_batch(self.eval_batches.batch_at(index), 0, 1)
            totals.append(evaluate(state, frozen, batch))
            jax.block_until_ready(totals[max(0, index - 1)])  # a long queue would answer no signal
            progress.evaluating(index + 1, count)
            if between is not None:
                between()
        loss, total = (sum(float(x) for x in column) for column in zip(*(t[:2] for t in totals), strict=True))
        objective = self.program.objective
        own = {name: sum(float(sums[name]) for _, _, sums in totals) for name in objective.sums}
        values = {"loss": loss / max(total, 1.0), objective.unit: int(total)}
        values |= objective.metrics({"loss": loss, "count": total, **own})
        return {f"eval_{name}": value for name, value in values.items()}

    def _evaluate(self, evaluate, state, frozen, monitor: Monitor, step, between=None) -> float:
        """The evaluation loss, logged and shown; NaN without rows."""
        if self.eval_batches is None:
            return math.nan
        with monitor.pause("eval", step) as line:
            values = self._eval_loss(evaluate, state, frozen, monitor.progress, between)
            line |= values
        self.history.append({"step": step, **values})
        unit = self.program.objective.unit
        monitor.progress.print(
            f"step {step}: evaluation loss {values['eval_loss']:.4f} over {values[f'eval_{unit}']:,} {unit}"
        )
        return values["eval_loss"]

    # ---- checkpoints

    @functools.cached_property
    def _tokens_crc32(self) -> int:
        return zlib.crc32(np.ascontiguousarray(self.train_data.documents.tokens))  # once: it reads every token

    def record(self) -> dict[str, Any]:
        """What a checkpoint records beside its arrays."""
        options = compiler_options(jax.devices()[0].platform, self.config.deterministic)
        return record_of(self, options)

    def _same_run(self) -> dict[str, Any]:
        self._take_weights()  # the base's fingerprint comes with them
        return same_run(self.record())

    def _resume(self, checkpointer: Checkpointer) -> tuple[TrainState | None, int]:
        """(state, steps done) of the checkpoint that the run goes on from; (None, 0) where there is none."""
        if checkpointer.latest() is None:
            require_same_config(self.output, self.config)
            return None, 0
        if self.config.checkpoint.resume == "never":
            raise ValueError(
                f"output = {str(self.output)!r} holds checkpoints and checkpoint.resume is never: name another folder, "
                "or set checkpoint.resume: auto to go on from them"
            )
        changes = []
        step, state = self._restore(checkpointer, changes.extend)
        say(f"resuming from step {step} of {self.total_steps} ({checkpointer.folder})")
        for change in changes:
            say(f"  {change}")
        if not self._keeps_model:
            self.release_model()
        return state, step

    def _restore(self, checkpointer: Checkpointer, tell) -> tuple[int, TrainState]:
        state, _, _ = self.first_state()

        def check(saved):
            self.planner.adopt(saved["numerics"])
            self._follow_plan()
            tell(require_same_run(saved, self.record(), self.output))

        step, restored, _ = checkpointer.restore(like={"state": state}, check=check)
        return step, restored["state"]

    # ---- the result

    def _finished_model(self, state: TrainState) -> Decoder:
        """The given model with the trained tensors, each in the dtype it came in, on the devices of the mesh.

        After QAT: with adapters a prepared model, which merge_adapter converts; without, weights that lie on the grid.
        """
        _, _, frozen = nnx.split(self._given, nnx.Param, ...)
        model = nnx.merge(self.graph, state.trainable, frozen)
        if not has_adapter(model):
            model.base_fingerprint = None  # other weights: adapters of the old base do not belong to it
            model.qat = None
            if self.qat is not None:
                model = convert_qat(model)  # of the masters: the dtype that they came in has fewer digits
        graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
        trainable = jax.tree.map(lambda new, old: new.astype(old.dtype), trainable, self._trainable)
        model = nnx.merge(graph, trainable, frozen)
        model.dtype = self._given.dtype
        return model


def _size(tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
