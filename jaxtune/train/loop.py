"""The Trainer: one run, from a model and rows to a trained model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtune.models.decoder import Decoder
from jaxtune.models.lora import copy_structure, has_adapter, matrices
from jaxtune.models.quant import convert_qat, prepare_qat, qat_spec
from jaxtune.models.transfers import IN_FLIGHT
from jaxtune.profile import capture
from jaxtune.terminal import say
from jaxtune.train import metrics as m
from jaxtune.train.checkpoint import Checkpointer, SavePolicy, require_compatible
from jaxtune.train.config import OptimConfig, TrainConfig
from jaxtune.train.config_file import config_to_dict, config_to_yaml
from jaxtune.train.data import Batch, TokenDataset, prepare
from jaxtune.train.data.templates import trained_tokenizer
from jaxtune.train.flops import flop_counter, sum_squared_documents
from jaxtune.train.loss import router_losses
from jaxtune.train.optim import make_optimizer, update_bound, weight_storage
from jaxtune.train.planning.cost import COMPUTE_DTYPES
from jaxtune.train.planning.planner import Planner, out_of_memory
from jaxtune.train.recorded import recorded_config
from jaxtune.train.report import precision_notes
from jaxtune.train.schedule import learning_rate_schedule
from jaxtune.train.signals import StopSignal
from jaxtune.train.step import StepProgram, Sums, TrainState, trainable_names
from jaxtune.train.watch import Watch

# What config.data says of how rows become tokens and packed rows.
_ROW_OPTIONS = (
    "format", "template", "train_on", "instruction_part", "response_part", "last_response_only", "mask_spans", "length",
    "packing", "overflow", "on_bad_row",
)  # fmt: skip

# Keys of a checkpoint's record whose change makes it another run; everything else is only pointed out. Where model and
# rows lie may change: their content is compared. So may where optimizer states lie.
_INCOMPATIBLE = (
    "trainable",
    "storage",
    "data",
    "base_fingerprint",
    *(
        f"config.{key}"
        for key in (
            "model.from_config",
            "model.load_in",
            "adapter",
            "steps",
            "epochs",
            "rows_per_step",
            "precision",
            "seed",
            "max_grad_norm",
            "router_aux_loss_coef",
            "router_z_loss_coef",
            "schedule",
            "qat",
            *(f"optim.{field.name}" for field in dataclasses.fields(OptimConfig) if field.name != "offload"),
        )
    ),
    *(f"config.data.{key}" for key in (*_ROW_OPTIONS, "max_rows", "eval_rows")),
)
# A change here leaves the run valid, but not bit for bit the same.
_NUMERICS = ("numerics",)


class TrainingInterrupted(RuntimeError):
    """A signal ended the run after a finished step; the state is saved and `resume: auto` goes on from it."""


@dataclasses.dataclass(frozen=True)
class _Programs:
    """The compiled programs of a run, and what compiling took; `before_qat`: those of its steps before qat.start."""

    accumulate: Any
    update: Any
    evaluate: Any
    seconds: float
    before_qat: _Programs | None = None


def make_mesh(data: int) -> jax.sharding.Mesh:
    """A mesh of `data` devices over the axis "data"."""
    devices = jax.devices()
    if data > len(devices):
        raise ValueError(f"mesh.data = {data}: there are {len(devices)} {devices[0].platform} devices")
    return jax.make_mesh((data,), ("data",), axis_types=(AxisType.Auto,), devices=devices[:data])


def compiler_options(platform: str, deterministic: bool) -> dict[str, Any]:
    """XLA options of the step.

    Without Triton GEMMs every product goes to cuBLASLt, which adds the adapter's product in its epilogue: 2.3 % of an
    8B LoRA step on an H200 (benchmarks/results). 16-bit values are rounded wherever they are made, not only where a
    fusion ends, so that another plan of residuals gives the same bits; the programs have as many kernels either way.
    Under `deterministic` the vendor libraries' first algorithm is taken instead of the fastest timed one, so that
    another process makes the same choice.
    """
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    if platform != "gpu":
        return options
    options |= {"xla_gpu_enable_triton_gemm": False, **IN_FLIGHT}
    if deterministic:
        options |= {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}
    return options


def _abstract(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree)


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
        if self.profile_steps and config.profile.start >= self.total_steps:
            raise ValueError(f"profile.start = {config.profile.start}: the run has only {self.total_steps} steps")

        if config.qat is not None and config.qat.start >= self.total_steps:
            raise ValueError(f"qat.start = {config.qat.start}: the run has only {self.total_steps} steps")

        self.mesh = make_mesh(config.mesh.data)
        self._replicated = NamedSharding(self.mesh, PartitionSpec())
        self._by_rows = NamedSharding(self.mesh, PartitionSpec("data"))
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
        )
        self._program_before_qat = None
        if config.qat is not None and config.qat.start > 0:
            self._program_before_qat = dataclasses.replace(self.program, graph=plain_graph)
        self.names = trainable_names(self._trainable)
        self._flops = flop_counter(model)
        self.planner = Planner(model, config, self.batches.length, self.mesh.devices.flat[0], keeps_model)
        self.eval_batches: Any = None
        self._follow_plan()

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
        options = {key: getattr(data, key) for key in (*_ROW_OPTIONS, "cache_dir", "num_workers")}
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
        if self._weights is not None:
            self._hold(self._weights.result())
            self._weights = None
        state = self.program.init(self._trainable, self.config.seed, self._replicated)
        state = jax.device_put(state, self.program.shardings(state, self._replicated))
        return state, self._zero_sums(state), jax.device_put(self._frozen, self._replicated)

    def first_shapes(self) -> tuple[TrainState, Sums, Any]:
        """What first_state gives, as shapes."""
        state = jax.eval_shape(lambda trainable: self.program.init(trainable, self.config.seed), self._trainable)
        sums = jax.eval_shape(self.program.zero_sums, state.trainable)

        def placed(tree, shardings):
            return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings)

        here = functools.partial(jax.tree.map, lambda _: self._replicated)
        state = placed(state, self.program.shardings(state, self._replicated))
        return state, placed(sums, here(sums)), placed(self._frozen, here(self._frozen))

    def release_model(self) -> None:
        """Lets the given model's trained tensors go, but for their shapes; first_state cannot be called again."""
        graph, trainable, frozen = nnx.split(self._given, nnx.Param, ...)
        self._trainable = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), trainable)
        self._given = nnx.merge(graph, self._trainable, frozen)

    def _zero_sums(self, state: TrainState) -> Sums:
        return jax.device_put(self.program.zero_sums(state.trainable), self._replicated)

    def compile(self, state: TrainState, sums: Sums, frozen, first_step: int = 0) -> _Programs:
        """Compiles the programs of a run from first_step on, once, whatever the data: shapes never change."""
        config = self.config
        options = compiler_options(self.mesh.devices.flat[0].platform, config.deterministic)
        batch = self._abstract_batch()
        index = jax.ShapeDtypeStruct((), jnp.int32, sharding=self._replicated)
        started = time.perf_counter()
        state, sums, frozen = _abstract(state), _abstract(sums), _abstract(frozen)
        where = self._replicated

        def of(program: StepProgram, update: Future, before: _Programs | None) -> _Programs:
            with jax.set_mesh(self.mesh):
                accumulate = jax.jit(program.accumulate, donate_argnums=0, out_shardings=where)
                accumulate = accumulate.lower(sums, state, frozen, batch, index).compile(compiler_options=options)
            evaluate = None if self.eval_batches is None else self.compile_evaluate(program, state, frozen)
            return _Programs(accumulate, update.result(), evaluate, time.perf_counter() - started, before)

        with ThreadPoolExecutor(1, "compile") as pool:
            with jax.set_mesh(self.mesh):
                results = (self.program.shardings(state, where), where, where)
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
            lowered = evaluate.lower(_abstract(state), _abstract(frozen), self._abstract_batch())
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

    def _compile_to_fit(self, first_step: int, print_line) -> _Programs:
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

    def _first_step(self, programs, sums, state, frozen, parts, step, print_line, compiling=contextlib.nullcontext):
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

    def _accumulate(self, programs: _Programs, sums: Sums, state: TrainState, frozen, parts: list[Batch]) -> Sums:
        """The sums, with every micro-batch of a step added."""
        for index, batch in zip(self._micro_index, parts, strict=True):
            sums = programs.accumulate(sums, state, frozen, batch, index)
        return sums

    def _at(self, programs: _Programs, step: int) -> _Programs:
        """The programs that a step runs."""
        early = self.config.qat is not None and step < self.config.qat.start
        return programs.before_qat if early and programs.before_qat is not None else programs

    # ---- the run

    def train(self) -> Decoder:
        """Runs (or resumes) the run and returns the trained model: a new module that shares every frozen array.

        Raises:
          TrainingInterrupted: SIGTERM or SIGINT came; the state is saved.
          TrainingStopped: a guard refused to go on.
          ValueError: the output folder holds another run.
        """
        config = self.config
        self.output.mkdir(parents=True, exist_ok=True)
        # A run in a second process is refused before anything is written.
        with Checkpointer(self.output / "checkpoints", keep=config.checkpoint.keep) as checkpointer:
            resumed, start = self._resume(checkpointer)
            # A run that died before its first checkpoint left its config, and metrics that begin anew.
            resumed_step = start if start or (self.output / "config.yaml").exists() else None
            logger = m.MetricsLogger(
                self.output,
                tensorboard=config.metrics.tensorboard,
                wandb_project=config.metrics.wandb_project,
                config=config_to_dict(config),
                resumed_step=resumed_step,
            )
            with (
                logger,
                m.Progress(self.total_steps, start) as progress,
                Watch(self, logger, progress) as watch,
                StopSignal() as stop,
            ):
                state = self._run(resumed, start, checkpointer, progress, watch, stop)
        with contextlib.suppress(ValueError):  # a run without a finite loss has nothing to plot
            m.loss_plot(self.output / m.JSONL, self.output / "loss.png")
        return self._finished_model(state)

    def _run(self, resumed: TrainState | None, start, checkpointer, progress, watch, stop) -> TrainState:
        config = self.config
        if resumed is not None and start >= self.total_steps:
            progress.print(f"this run is complete: {start} steps (output {self.output})")
            return resumed
        progress.print("\n".join(self.planner.lines()))
        # One line, once the folder is this run's: an error before leaves it to another.
        with watch.pause("load", start) as line:
            with progress.compiling():
                programs = self._compile_to_fit(start, progress.print)
            line["compile_seconds"] = watch.uncounted_seconds()
            if self._weights is not None and not self._weights.done():
                progress.print("waiting for the weights")
            state, sums, frozen = self._begin(resumed)
            (self.output / "config.yaml").write_text(config_to_yaml(config), encoding="utf-8")
        for note in precision_notes(self):
            progress.print(note)

        def at(step: int) -> _Programs:
            return self._at(programs, step)

        policy = SavePolicy(config.checkpoint.every_steps, config.checkpoint.every_minutes)
        policy.should_save(start, time.monotonic())
        if config.evaluation.at_start and start == 0:
            self._evaluate(at(0), state, frozen, watch, 0)
        tracing = False
        with ThreadPoolExecutor(1, "batches") as pool, contextlib.ExitStack() as trace:
            coming = pool.submit(self._load_step, start)
            for step in range(start, self.total_steps):
                with watch.data_wait():
                    parts, counts = coming.result()
                if step + 1 < self.total_steps:
                    coming = pool.submit(self._load_step, step + 1)
                if self.profile_steps and step - start == config.profile.start:
                    with watch.pause("profile", step):
                        trace.enter_context(self._capture(at(step)))
                    tracing = True
                if step == start:
                    planned = self.planner.plan
                    again = functools.partial(watch.pause, "compile", start)
                    programs, sums = self._first_step(programs, sums, state, frozen, parts, step, progress.print, again)
                    if self.planner.plan != planned and step + 1 < self.total_steps:
                        coming = pool.submit(self._load_step, step + 1)  # in micro-batches of the new plan
                else:
                    sums = self._accumulate(at(step), sums, state, frozen, parts)
                state, sums, latest = programs.update(state, sums)
                watch.step_dispatched(step, latest, counts)
                done = step + 1
                if tracing and step - start == config.profile.start + self.profile_steps - 1:
                    with watch.pause("profile", done):
                        trace.close()
                    tracing = False
                save = policy.should_save(done, time.monotonic())
                if stop.requested or (save and done < self.total_steps):
                    with watch.pause("save", done):
                        self._save(checkpointer, done, state)
                if stop.requested and done < self.total_steps:
                    checkpointer.wait()
                    raise TrainingInterrupted(f"{stop.signal_name} after step {done}; saved in {checkpointer.folder}")
                every = config.evaluation.every_steps
                if every and done % every == 0 and done < self.total_steps:
                    self._evaluate(at(done), state, frozen, watch, done)
        watch.flush()
        if config.evaluation.at_end:
            self._evaluate(programs, state, frozen, watch, self.total_steps)
        if config.checkpoint.every_steps or config.checkpoint.every_minutes:
            with watch.pause("save", self.total_steps):
                self._save(checkpointer, self.total_steps, state)
                checkpointer.wait()
        return state

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

    def _capture(self, programs: _Programs):
        meta = {
            "config": config_to_dict(self.config),
            "tokens_per_step": self.config.rows_per_step * self.batches.length,
        }
        return capture(self.profile_folder, meta, {"accumulate": programs.accumulate, "update": programs.update})

    def evaluate(self) -> dict[str, Any]:
        """eval_loss (mean over targets) and eval_targets of the model as given, without training; rounded as step 0's
        is under QAT."""
        if self.eval_batches is None:
            raise ValueError("there are no evaluation rows: set data.eval or data.eval_rows")
        state, sums, frozen = self.first_state()
        del sums
        program = self._program_before_qat or self.program
        return self._eval_loss(self.compile_evaluate(program, state, frozen), state, frozen)

    def _eval_loss(self, evaluate, state, frozen) -> dict[str, Any]:
        assert self.eval_batches is not None
        totals = []
        for index in range(self.eval_batches.steps_per_epoch):
            batch = self._device_batch(self.eval_batches.batch_at(index), 0, 1)
            totals.append(evaluate(state, frozen, batch))
        loss, count = (sum(float(x) for x in column) for column in zip(*totals, strict=True))
        return {"eval_loss": loss / max(count, 1.0), "eval_targets": int(count)}

    def _evaluate(self, programs, state, frozen, watch: Watch, step) -> None:
        if self.eval_batches is None:
            return
        with watch.pause("eval", step) as line:
            values = self._eval_loss(programs.evaluate, state, frozen)
            line |= values
        self.history.append({"step": step, **values})
        watch.progress.print(
            f"step {step}: evaluation loss {values['eval_loss']:.4f} over {values['eval_targets']:,} targets"
        )

    # ---- checkpoints

    @functools.cached_property
    def _tokens_crc32(self) -> int:
        return zlib.crc32(np.ascontiguousarray(self.train_data.documents.tokens))  # once: it reads every token

    def _meta(self) -> dict[str, Any]:
        """What a checkpoint records beside its arrays; see _INCOMPATIBLE and _NUMERICS."""
        device = jax.devices()[0]
        trainable = {
            name: [list(leaf.shape), str(leaf.dtype)]
            for name, leaf in zip(self.names, jax.tree.leaves(self._trainable), strict=True)
        }
        return {
            "config": config_to_dict(self.config),
            "trainable": trainable,
            "storage": self.storage(),
            "base_fingerprint": getattr(self._given, "base_fingerprint", None),
            "data": {
                "rows": len(self.train_data.rows),
                "tokens_crc32": self._tokens_crc32,
                "trained_tokens": self.train_data.report.trained_tokens,
            },
            "total_steps": self.total_steps,
            "numerics": {
                **self.planner.plan.to_record(),
                "gradients": self.gradients,
                "mesh_data": self.config.mesh.data,
                "max_documents": self.program.max_documents,
                "deterministic": self.config.deterministic,
                "device": device.device_kind,
                "jax": jax.__version__,
                "compiler_options": compiler_options(device.platform, self.config.deterministic),
            },
        }

    def _save(self, checkpointer: Checkpointer, step: int, state: TrainState) -> None:
        checkpointer.save(step, {"state": state}, self._meta())

    def _resume(self, checkpointer: Checkpointer) -> tuple[TrainState | None, int]:
        """(state, steps done) of the checkpoint that the run goes on from; (None, 0) where there is none."""
        existing = self.output / "config.yaml"
        if checkpointer.latest() is None:
            if existing.exists() and existing.read_text(encoding="utf-8") != config_to_yaml(self.config):
                raise ValueError(
                    f"output = {str(self.output)!r} holds another run (its config.yaml differs): name another folder"
                )
            return None, 0
        if self.config.checkpoint.resume == "never":
            raise ValueError(
                f"output = {str(self.output)!r} holds checkpoints and checkpoint.resume is never: name another folder, "
                "or set checkpoint.resume: auto to go on from them"
            )
        state, _, _ = self.first_state()
        harmless = []

        def check(saved):
            self.planner.adopt(saved["numerics"])
            self._follow_plan()
            harmless.extend(require_compatible(saved, self._meta(), _INCOMPATIBLE))

        step, restored, _ = checkpointer.restore(like={"state": state}, check=check)
        say(f"resuming from step {step} of {self.total_steps} ({checkpointer.folder})")
        for difference in harmless:
            other = difference.key.startswith(_NUMERICS)
            say(f"  {'not bit for bit the same run' if other else 'changed'}: {difference}")
        if not self._keeps_model:
            self.release_model()
        return restored["state"], step

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
