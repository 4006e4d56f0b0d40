"""The compiled programs of a run (`Programs`), and what compiles and runs them (`Engine`): once for all data, and again
with other plans until one fits the memory. `abstract` makes the shapes for which they are lowered, and
`_may_plan_again` says after which errors another plan is tried. XLA's options for them are in xla_options.py."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxtune.models.decoder import Decoder
from jaxtune.models.placement import collectives, host_table, partition, transposed_codes
from jaxtune.pallas import dispatch, gpu_kernel
from jaxtune.system import processes
from jaxtune.system.heap import uncollected
from jaxtune.train import host_memory
from jaxtune.train.config import TrainConfig
from jaxtune.train.config.file import config_to_dict
from jaxtune.train.data.batches import Batch, Batches, BatchSource, Rows
from jaxtune.train.planning.forward import ForwardPlanner
from jaxtune.train.planning.known import KnownFailures
from jaxtune.train.planning.planner import Planner, out_of_memory
from jaxtune.train.program.flops import document_lengths
from jaxtune.train.program.step import StepProgram, Sums, TrainState
from jaxtune.train.program.xla_options import compiled, compiler_options

type LoadedStep = tuple[list[Batch], dict[str, Any]]  # of Engine.load_step
_BLOCK_FOR_ROWS = 32 << 20  # bytes of the rows of two steps of 8 x 65,536 tokens, without those of tables of embeddings


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled programs of a run's step and evaluation (jax.stages.Compiled), as Engine.compile makes them."""

    accumulate: Any  # adds a micro-batch's loss and gradients to the step's sums (StepProgram.accumulate)
    update: Any  # updates the weights from the sums (StepProgram.update)
    evaluate: Any  # sums the loss of a batch of held-out rows (StepProgram.evaluate); None without held-out rows
    seconds: float = 0.0  # time that tracing and compiling took
    before_qat: Programs | None = None  # those of the steps before qat.start; None if the run makes no such steps


def _may_plan_again(error: Exception) -> bool:
    """Whether the run may continue with a smaller plan after an error of its first step: only if memory ran out, and
    only in a run of one process. Of several processes one may run out of memory alone; if it changed its plan, the
    others would wait for it forever in the collectives of the first plan."""
    return out_of_memory(error) and processes.count() == 1


def abstract(tree):
    """The tree with each array, or shape with a sharding, replaced by a jax.ShapeDtypeStruct of its shape, dtype and
    sharding, for lowering: a program is lowered and compiled without the arrays, often before they exist."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree)


class Engine:
    """Compiles and runs the programs of a training run, an evaluation or a teacher's pass on a mesh, under the plan of
    its planner: what becomes of the values that the backward reads, and the number of micro-batches.

    Args:
      program: the run's step. Its fields that the plan, the mesh and config.neftune_noise_alpha decide are filled in
        here.
      before_qat: the step without rounded weights, for the steps before qat.start; None if there are none.
      planner: chooses the plan; a ForwardPlanner if no step is made (evaluations, a teacher's pass). A Planner is at
        once made to skip plans that failed in earlier runs (skip_known_failures).
      mesh: the devices.
      batches: makes the batch of each step.
      config: the run's.
      held_out: the rows of an evaluation, whose program is compiled with the step's; None: there is no evaluation.

    Attributes:
      program, before_qat: the arguments with these fields filled in; `follow_plan` and `use_mesh` update them.
      planner, mesh, batches: the arguments.
      replicated: the sharding of arrays that every device has.
      micro_index: the int32 numbers of a step's micro-batches, on the mesh.
      tables: {name: table [vocabulary, size]} of the tables of embeddings on the host (Decoder.tables), numpy arrays,
        or their shapes until the weights are loaded; {} if they are on the devices. TrainedModel sets it.
    """

    def __init__(
        self,
        program: StepProgram,
        before_qat: StepProgram | None,
        planner: Planner | ForwardPlanner,
        mesh: jax.sharding.Mesh,
        batches: BatchSource,
        config: TrainConfig,
        held_out: Rows | None,
    ):
        alpha = config.neftune_noise_alpha
        self.program = dataclasses.replace(program, noise_alpha=alpha)
        self.before_qat = None if before_qat is None else dataclasses.replace(before_qat, noise_alpha=alpha)
        self.planner = planner
        self.tables: Mapping[str, host_table.Array] = {}
        self.batches = batches
        self._early_steps = 0 if config.qat is None else config.qat.start
        self._deterministic, self._offloads, self._held_out = config.deterministic, config.optim.offload, held_out
        self.use_mesh(mesh)
        if isinstance(planner, Planner):
            planner.skip_known_failures(KnownFailures(self._facts(planner, config)))
        self.follow_plan()

    @property
    def _search(self) -> Planner:
        """`planner` as a Planner, which can replan when memory runs out; AssertionError if it is a ForwardPlanner, as
        that of an Engine that makes only forward passes is (evaluations, a teacher's pass)."""
        assert isinstance(self.planner, Planner)
        return self.planner

    def _facts(self, planner: Planner, config: TrainConfig) -> list[Any]:
        """Returns the JSON values that identify this run's programs in KnownFailures, the record of plans that needed
        too much memory. From `config` and the costs of `planner` they cover all settings that the programs depend on,
        except the plan, which each record names, and the device and versions, which KnownFailures adds."""
        asked = config_to_dict(config)
        program, cost = self.program, planner.cost
        sizes = {f.name: getattr(cost, f.name) for f in dataclasses.fields(cost) if f.name not in ("segments", "kinds")}
        return [
            {name: asked[name] for name in ("model", "adapter", "objective", "optim", "qat", "precision")},
            [config.deterministic, config.max_grad_norm, config.neftune_noise_alpha, config.memory.plan],
            [program.max_documents, program.full, program.weights, program.dropout, type(program.objective).__name__],
            [dict(self.mesh.shape), str(planner.shape), sizes],
        ]

    def use_mesh(self, mesh: jax.sharding.Mesh) -> None:
        """Sets the mesh, and the shardings on it, for the programs that are compiled from now on. Only the constructor
        calls it; it would not move programs that are compiled already, nor arrays that are placed."""
        self.mesh, self.replicated = mesh, NamedSharding(mesh, partition.WHOLE)
        self._by_rows = NamedSharding(mesh, partition.ROWS)
        self.program = dataclasses.replace(self.program, mesh=mesh)
        if self.before_qat is not None:
            self.before_qat = dataclasses.replace(self.before_qat, mesh=mesh)

    def follow_plan(self) -> None:
        """Copies the planner's plan into the steps that will be compiled (`program`, `before_qat`), and makes a new
        `micro_index`, a list with the number of each micro-batch (from 0), an int32[] on every device. It is called
        when the Engine is made and whenever the plan has changed. Programs that are compiled keep their plan."""
        plan = self.planner.plan
        follow = dict(plan=plan.residuals, chunk_tokens=plan.chunk_tokens, micro_batches=plan.micro_batches)
        self.program = dataclasses.replace(self.program, **follow, offload=self._offloads or plan.states_on_host)
        if self.before_qat is not None:
            self.before_qat = dataclasses.replace(self.before_qat, **follow)
        self.micro_index = [partition.put(np.int32(i), self.replicated) for i in range(plan.micro_batches)]

    @property
    def options(self) -> dict[str, Any]:
        """The XLA options {name: value} of all programs of the run (compiler_options). The run's record has them."""
        platform, divides = self.mesh.devices.flat[0].platform, partition.MeshShape.of(self.mesh).parts > 1
        merges = self._deterministic or not self.program.by_tensor  # so deterministic runs keep older versions' bits
        return compiler_options(platform, self._deterministic, divides, merges)

    # ---- batches

    @property
    def rows(self) -> int:
        """The number of rows of a micro-batch under the plan in force, over all devices. Evaluations and passes of a
        reference use batches of as many rows, so that they fit the memory that the step fits."""
        return self.batches.rows_per_step // self.planner.plan.micro_batches

    def place(self, batch: Batch, part: int = 0, parts: int = 1) -> Batch:
        """Micro-batch `part` (from 0) of `parts` of a step's batch: consecutive rows, placed on the devices.
        If tables of embeddings are on the host, the rows of the micro-batch's tokens are looked up and placed with it,
        so that no program copies a part of larger rows."""
        size = batch.tokens.shape[0] // parts
        batch = dataclasses.replace(batch, table_rows={})
        batch = jax.tree.map(lambda array: array[part * size : (part + 1) * size], batch)
        looked_up = {name: table[batch.tokens] for name, table in self.tables.items() if isinstance(table, np.ndarray)}
        batch = dataclasses.replace(batch, table_rows=looked_up)
        return partition.put(batch, self._by_rows)

    def load_step(self, step: int, model: Callable[[], Decoder] | None = None) -> LoadedStep:
        """Makes the batch of `step` (from 0) and places it: (its micro-batches on the devices, {"tokens": their number
        without padding, "trained_tokens": the sum of the targets' weights, "lengths": tokens of each document,
        "metrics": those of the batch source, "filled": how many micro-batches have tokens}). model: returns the model
        before the step, from which a source may sample; None if the source needs none. run._StepRows calls it."""
        batch = self.batches.batch_at(step, model)
        parts = self.planner.plan.micro_batches
        counts = {
            "tokens": int((batch.segment_ids > 0).sum()),
            "trained_tokens": int(batch.weights.sum()),
            "lengths": document_lengths(batch),
            "metrics": self.batches.metrics_at(step),
            "filled": self._filled(batch, parts),
        }
        return [self.place(batch, part, parts) for part in range(parts)], counts

    def _filled(self, batch: Batch, parts: int) -> int:
        """The number of the `parts` micro-batches of a step's `batch`, at least one, that have any tokens: a source
        that samples its answers during the run may leave the last rows of a step empty, and Run.steps omits empty
        micro-batches after its first step. It is `parts` for other sources, and in a run of several processes."""
        if not self.batches.sees_model or processes.count() > 1:
            return parts
        used = np.flatnonzero((batch.segment_ids > 0).any(1))
        last = int(used[-1]) + 1 if used.size else 1
        return -(-last * parts // len(batch.tokens))

    def zero_sums(self, state: TrainState) -> Sums:
        """Zeros on the devices to which a process's first step adds its micro-batches: for the loss, the gradients of
        the trainable tensors of `state`, and the metrics. Later steps get what the update returns in their place."""
        return self.program.zero_sums(state.trainable, self.replicated)

    def first_sums(self, state: TrainState) -> Sums:
        """Makes the sums with which a run starts for the trainable tensors of `state`, as zero_sums does. On a GPU it
        also leaves a block of device memory free below them.

        The rows of the next step are copied to the device while a step runs. Without a free block below the step's
        temporary buffer, the allocator puts them above it, and the next step then finds no room for its buffer, which
        must be one block, although enough bytes are free, as was seen on a 12 GiB card."""
        blocks, size = [], _BLOCK_FOR_ROWS + int(self.planner.cost.table_rows_bytes)
        for device in self.mesh.local_devices:
            if device.platform == "gpu":
                blocks.append(jax.device_put(np.zeros(size, np.uint8), device))
        sums = jax.block_until_ready((blocks, self.zero_sums(state)))[1]
        for block in blocks:
            block.delete()
        return sums

    # ---- compiling

    def compile(self, state: TrainState, sums: Sums, frozen, first_step: int = 0) -> Programs:
        """Compiles the programs of a run from first_step on, for arrays like `state`, `sums` and `frozen` (the weights
        that do not train), which may be shapes. They are compiled once for all data, because shapes never change. `fit`
        calls it for each plan that it tries.

        Python lowers the programs one by one, starting with the one that takes longest to compile. XLA, which needs no
        Python, compiles the lowered ones in parallel meanwhile."""
        started = time.perf_counter()
        shapes = abstract(state), abstract(sums), abstract(frozen)
        programs = dispatch.built(functools.partial(self._compile_all, *shapes, first_step))
        return dataclasses.replace(programs, seconds=time.perf_counter() - started)

    def _compile_all(self, state: TrainState, sums: Sums, frozen, first_step: int) -> Programs:
        """Lowers the programs of a run for these shapes (state, sums and frozen) one by one, and compiles them in
        parallel. first_step: the step at which the run starts; before qat.start, the programs without QAT are compiled
        too. `compile` calls it, twice if a kernel fails its check."""
        batch = self._abstract_batch(self.batches)
        index = jax.ShapeDtypeStruct((), jnp.int32, sharding=self.replicated)
        where, held_out = self.replicated, self._held_out
        unsummed = self.program.sums_shardings(state.trainable, where)
        before = self.before_qat if first_step < self._early_steps else None
        steps = [self.program] if before is None else [self.program, before]
        with ThreadPoolExecutor(2 * len(steps) + 1, "compile") as pool:
            accumulates, evaluates = [], []
            with uncollected():
                for program in steps:
                    arguments = (sums, state, frozen, batch, index)
                    lowered = self._lowered(program.accumulate, unsummed, arguments, donate_argnums=0)
                    accumulates.append(pool.submit(self._compiled, lowered))
                with jax.set_mesh(self.mesh):
                    results = (self.program.shardings(state, where), unsummed, where)
                    update = jax.jit(self.program.update, donate_argnums=(0, 1), out_shardings=results)
                    update = pool.submit(self._compile, update.lower(state, sums))
                if held_out is not None:
                    for program in steps:
                        lowered = self._lowered_of_rows(program.evaluate, where, state.trainable, frozen, held_out)
                        evaluates.append(pool.submit(self._compiled, lowered))
            evaluates = [future.result() for future in evaluates] or [None] * len(steps)
            pairs = list(zip([future.result() for future in accumulates], evaluates, strict=True))
            programs, *early = (Programs(accumulate, update.result(), evaluate) for accumulate, evaluate in pairs)
        return dataclasses.replace(programs, before_qat=early[0]) if early else programs

    def compile_evaluate(self, program: StepProgram, trainable, frozen):
        """Compiles `program.evaluate`, the evaluation of one batch of the held-out rows, to a jax.stages.Compiled, for
        runs that evaluate without making a step; those that train compile it with the steps. AssertionError without
        held-out rows. trainable, frozen: the weights that train and the others, or their shapes."""
        assert self._held_out is not None
        return self._compiled_of_rows(program.evaluate, self.replicated, trainable, frozen, self._held_out)

    def compile_of_rows(self, function, trainable, frozen, rows: Rows):
        """Compiles a program that computes a value for each row of a batch, such as the log-probabilities of a
        reference or a stored teacher (StepProgram.of_rows), to a jax.stages.Compiled of (trainable, frozen, batch).
        function: gets (model, batch, Forward) and returns an array [rows, ...], or a tree of such arrays. trainable,
        frozen: the weights that train and the others, or their shapes. rows: have the shape of the batches."""
        program = functools.partial(self.program.of_rows, function)
        return self._compiled_of_rows(program, self._by_rows, trainable, frozen, rows)

    def _compiled_of_rows(self, *what):
        """Lowers and compiles a program over rows to a jax.stages.Compiled, within dispatch.built: kernels are checked
        meanwhile, and if one fails, all is done once more without it. what: the arguments of _lowered_of_rows."""
        return dispatch.built(lambda: self._compiled(self._lowered_of_rows(*what)))

    def _lowered_of_rows(self, function, out, trainable, frozen, rows: Rows):
        """Lowers function(trainable, frozen, batch) to a jax.stages.Lowered, for weights like these and batches with
        the shape of these rows: an evaluation of a run (`_compile_all`), or what `_compiled_of_rows` compiles. out: the
        sharding of its result."""
        return self._lowered(function, out, (abstract(trainable), abstract(frozen), self._abstract_batch(rows)))

    def _lowered(self, function, out, arguments: tuple, **options):
        """Lowers a function for the mesh to a jax.stages.Lowered, without Shardy (partition.compiling): any program
        except the update, which `_compile_all` lowers and compiles with Shardy. out: the shardings of its results.
        arguments: its arguments, or their shapes. options: further arguments of jax.jit."""
        with partition.compiling(self.mesh):
            return jax.jit(function, out_shardings=out, **options).lower(*arguments)

    def _compiled(self, lowered):
        """Compiles `lowered`, a program that `_lowered` returned, to a jax.stages.Compiled, by `_compile`, without
        Shardy as `_lowered`; any thread may call it."""
        with partition.compiling(self.mesh):
            return self._compile(lowered)

    def _compile(self, lowered):
        """Compiles a lowered program (the update, and by `_compiled` all others), its Pallas kernels in parallel, and
        starts the checks of kernels that lowering asked for: returns the jax.stages.Compiled."""
        dispatch.begin_checks()  # the checks that lowering asked for
        device = self.mesh.local_devices[0]
        with ThreadPoolExecutor(8, "kernels") as pool:
            if device.platform == "gpu":
                gpu_kernel.compile_beside(lowered, device, pool)
            return compiled(lowered, self.options)

    def _abstract_batch(self, rows: Rows | BatchSource) -> Batch:
        """A Batch of shapes, for lowering: those of a micro-batch of these rows. A batch of an evaluation has as many
        rows as a micro-batch."""
        empty = rows.empty(self.rows)
        sizes = {name: (*empty.tokens.shape, table.shape[1]) for name, table in self.tables.items()}
        shapes = {name: jax.ShapeDtypeStruct(size, self.tables[name].dtype) for name, size in sizes.items()}
        batch = dataclasses.replace(empty, table_rows=shapes)
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._by_rows), batch)

    def fit(
        self,
        shapes: Callable[[], tuple[TrainState, Sums, Any]],
        first_step: int,
        print_line: Callable[[str], None],
        placed: bool = False,
    ) -> Programs:
        """Compiles the plan in force and, if compiling runs out of memory or Planner.fits denies the compiler's figure
        for accumulate and update, further plans until one fits, which is then in force in planner and Engine. A run
        calls it before its weights are there, and `first_step` if memory runs out; `train --plan` shows what it finds.

        Args:
          shapes: returns the shapes and dtypes, under the plan in force, of (state, sums, frozen): the train state, the
            sums of gradients and losses over micro-batches, and the weights that do not train.
          first_step: the step with which the run starts. The programs of the steps before QAT begins are compiled only
            if it is one of these.
          print_line: prints a line.
          placed: True: the weights are already on the devices, so further plans are limited as in Planner.replan.
        Returns:
          the programs of the plan that fits.
        Raises:
          PlanError: no further plan is left.
        """
        while True:
            programs, need = self._compiled_and_need(shapes(), first_step)
            host_memory.give_back()
            if programs is not None and (need is None or self._search.fits(need)):
                return programs
            problem = "compiling it ran out of memory"
            if need is not None:
                problem = f"the compiled step needs {need / 1e9:.2f} GB"
            self._search.replan(problem, need, print_line, placed)
            self.follow_plan()

    def _compiled_and_need(
        self, shapes: tuple[TrainState, Sums, Any], first_step: int
    ) -> tuple[Programs | None, float | None]:
        """(the programs, or None if memory ran out in any process; the largest number of bytes that any process's
        programs need, or None if nothing limits them or it is unknown). shapes: (state, sums, frozen weights).
        first_step: the step at which the run starts. `fit` calls it."""
        programs, need, limited = None, 0.0, self.planner.budget_bytes is not None
        try:
            programs = self.compile(*shapes, first_step)
            if limited:
                need = self._search.compiled_bytes(programs.accumulate, programs.update)
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            programs = None
        needs = processes.all_of(None if programs is None else float(need))
        if None in needs:
            return None, None
        return programs, max(needs) if limited else None

    # ---- running

    def connect(self, print_line: Callable[[str], None]) -> dict[str, float]:
        """Runs a first collective, which connects the devices, before the first step, and prints how long that took.
        Returns the metric `collectives_seconds`; {} if the run has one device."""
        if self.mesh.size == 1:
            return {}
        program, number = collectives.first_exchange(self.mesh), partition.put(np.float32(0), self.replicated)
        processes.all_of(None)  # a barrier, so that the time does not include waiting for others to compile
        started = time.perf_counter()
        jax.block_until_ready(program(number))
        seconds = time.perf_counter() - started
        print_line(f"collectives of {self.mesh.size} devices set up in {seconds:.1f} s")
        return {"collectives_seconds": seconds}

    def at(self, programs: Programs, step: int) -> Programs:
        """The programs for step `step` (from 0): before qat.start those without rounded weights, if `programs` has them
        in `before_qat`; otherwise `programs` itself."""
        early = step < self._early_steps and programs.before_qat is not None
        return programs.before_qat if early and programs.before_qat is not None else programs

    def accumulate(self, programs: Programs, sums: Sums, state: TrainState, frozen, parts: list[Batch]) -> Sums:
        """Dispatches the micro-batches of a training step with the compiled `programs`, and returns `sums` (donated)
        with the losses and gradients of all of them added. parts: the micro-batches; the last ones may be missing,
        because they are empty. state: the TrainState. frozen: the weights that do not train."""
        for index, batch in zip(self.micro_index, parts, strict=False):
            sums = programs.accumulate(sums, state, frozen, batch, index)
        return sums

    def first_step(
        self, programs, sums, state, frozen, parts, step, print_line, compiling: Any = contextlib.nullcontext
    ):
        """(programs, sums, frozen) after the first step's micro-batches, which are waited for. If memory runs out, they
        run again under plans smaller by what the step lacked, which are compiled in the context that `compiling` makes.
        The returned `frozen` has no transposed codes, whose memory is then freed, if the last plan keeps none.

        A failed attempt leaves nothing behind, because only the update donates the state.

        Args:
          programs: the compiled programs of the plan in force.
          sums, state, frozen: what TrainedModel.begin returned.
          parts: all micro-batches of the step, on the mesh, also empty ones; a smaller plan divides their rows anew.
          step: the number of the step.
          print_line: prints a line on the new plan.
          compiling: makes the context in which smaller plans are compiled.
        Raises:
          PlanError: memory ran out, and no smaller plan is left.
          jax.errors.JaxRuntimeError: any other error of XLA; in a run of several processes also that memory ran out.
        """

        def arrays():
            """What the plan in force is compiled for; if it keeps no transposed codes, they are given up."""
            nonlocal frozen
            if not self.planner.plan.transposed_codes:
                frozen = transposed_codes.without_copies(frozen)
            return state, self.zero_sums(state), frozen

        while True:
            try:
                done = self.accumulate(self.at(programs, step), sums, state, frozen, parts)
                return programs, jax.block_until_ready(done), frozen
            except jax.errors.JaxRuntimeError as error:
                if not _may_plan_again(error):
                    raise
                short = self._search.short_bytes(error, self.mesh.local_devices)
            rows = jax.tree.map(lambda *pieces: np.concatenate([np.asarray(piece) for piece in pieces]), *parts)
            programs = sums = parts = None
            self._search.replan("the first step ran out of memory", None, print_line, True, short)
            self.follow_plan()
            with compiling():
                programs = self.fit(arrays, step, print_line, placed=True)
            sums, count = self.zero_sums(state), self.planner.plan.micro_batches
            parts = [self.place(rows, part, count) for part in range(count)]

    def evaluate(
        self,
        evaluate,
        trainable,
        frozen,
        batches: Batches,
        shown: Callable[[int, int], None] = lambda done, count: None,
        between: Callable[[], None] = lambda: None,
        load: Callable[[Callable[[], Batch]], Batch] = lambda work: work(),
    ) -> dict[str, Any]:
        """Metrics of `batches`, on the host, with the prefix "eval_": "loss", a mean; objective.unit, such as
        "targets", the count that it is the mean over; and what the objective computes from its sums.

        Args:
          evaluate: the compiled program of one batch: Programs.evaluate, or from compile_evaluate.
          trainable, frozen: the weights that train and the others.
          batches: of held-out rows.
          shown: called after each batch with (batches done, batches in all), to show progress.
          between: called after each batch, so that the caller can react to signals.
          load: called with what loads a batch in one process, and may fail there alone.
        """
        objective = self.program.objective
        totals, count = [], batches.steps_per_epoch
        for index in range(count):
            batch = load(functools.partial(batches.batch_at, index))
            totals.append(evaluate(trainable, frozen, self.place(batch)))
            jax.block_until_ready(totals[max(0, index - 1)])  # with a long queue the process would not react to signals
            shown(index + 1, count)
            between()
        loss, number = (sum(float(x) for x in column) for column in zip(*(t[:2] for t in totals), strict=True))
        largest = getattr(objective, "largest", ())
        own = {
            name: (max if name in largest else sum)(float(sums[name]) for _, _, sums in totals)
            for name in objective.sums
        }
        values = {"loss": loss / max(number, 1.0), objective.unit: int(number)}
        values |= objective.metrics({"loss": loss, "count": number, **own})
        return {f"eval_{name}": value for name, value in values.items()}
