"""The compiled programs of a run, and the engine that compiles and runs them: again under other plans until one fits
the memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import types
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from jaxtune.models.decoder import Decoder
from jaxtune.models.placement import collectives, host_table, partition
from jaxtune.models.programs.compiling import out_of_memory
from jaxtune.models.programs.kept import Later, Request, programs_of
from jaxtune.system import host_memory, processes, timing
from jaxtune.system.program_cache import in_use
from jaxtune.train.data.batches import Batch, Batches, BatchSource, Rows
from jaxtune.train.engine.xla_options import SHORT_STEP_SECONDS, compiler_options, launch_options, update_options
from jaxtune.train.planning.forward import ForwardPlanner
from jaxtune.train.planning.known import KnownFailures
from jaxtune.train.planning.movables import MOVABLES
from jaxtune.train.planning.plan import StepPlan
from jaxtune.train.planning.planner import Planner
from jaxtune.train.program.flops import document_lengths
from jaxtune.train.program.leaves import Leaves, over_leaves
from jaxtune.train.program.step import StepProgram, Sums, TrainState, without_layers, without_update

type LoadedStep = tuple[list[Batch], dict[str, Any]]  # of Engine.load_step
_BLOCK_FOR_ROWS = 32 << 20  # bytes of the rows of two steps of 8 x 65,536 tokens, without those of tables of embeddings

_LONG = 5.0  # seconds of compiling after which somebody asks how to save them


@dataclasses.dataclass(frozen=True)
class Programs:
    """The first two take and return states, sums and frozen weights as Leaves."""

    accumulate: Any  # adds a micro-batch's loss and gradients to the step's sums (StepProgram.accumulate)
    update: Any  # updates the weights from the sums (StepProgram.update)
    evaluate: Any  # sums the loss of a batch of held-out rows (StepProgram.evaluate); None without held-out rows
    seconds: float = 0.0  # time that tracing and compiling took
    before_qat: Programs | None = None  # those of the steps before qat.start; None if the run makes no such steps


def _may_plan_again(error: Exception) -> bool:
    """Only if memory ran out, in a run of one process: others would wait in collectives of the first plan."""
    return out_of_memory(error) and processes.count() == 1


def abstract(tree):
    """Arrays as jax.ShapeDtypeStructs with shardings, for lowering."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree)


def placed(tree, shardings):
    """Shapes with shardings."""
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings)


def finished(frozen: nnx.State, plan: StepPlan) -> nnx.State:
    """Placed frozen weights, arrays or shapes, as a plan's programs take them."""
    for word, movable in MOVABLES.items():
        frozen = movable.finished(frozen, plan.level(word))
    return frozen


@functools.partial(jax.jit, donate_argnums=0)
def _overwritten(old: Batch, new: Batch) -> Batch:
    """`new` in the donated memory of `old`."""
    return jax.tree.map(lambda a, b: jax.lax.dynamic_update_slice(a, b, (0,) * b.ndim), old, new)


class Engine:
    """Compiles and runs the programs of a run, an evaluation or a teacher's pass on a mesh, under its planner's plan.

      program: fields of plan and mesh are filled in here.
      before_qat: the step without rounded weights, before qat.start.
      planner: a ForwardPlanner if no step is made. A Planner at once skips plans that failed earlier.
      held_out: rows of an evaluation, compiled with the step.
      deterministic: the same bits on every run.
      early_steps: those of `before_qat`.
      settings: of the whole config, by which earlier failures are found; JSON values.

    `micro_index`: int32 numbers of micro-batches on the mesh. `tables`: {name: [vocabulary, size]} of tables of
    embeddings on the host, shapes until weights are loaded; TrainedModel sets it.
    """

    def __init__(
        self,
        program: StepProgram,
        before_qat: StepProgram | None,
        planner: Planner | ForwardPlanner,
        mesh: jax.sharding.Mesh,
        batches: BatchSource,
        held_out: Rows | None = None,
        deterministic: bool = False,
        early_steps: int = 0,
        settings: Mapping[str, Any] = types.MappingProxyType({}),
    ):
        self.program, self.before_qat, self.planner = program, before_qat, planner
        self.tables: Mapping[str, host_table.Array] = {}
        self.placeholder: int | None = None  # the token whose rows of tables pictures' tokens have; None: their own
        self.batches = batches
        self._early_steps, self.deterministic = early_steps, deterministic
        self._asked_graphs: bool | None = settings.get("whole_graphs")
        self._offloads, self._held_out = program.offload, held_out
        self._unwritten: Later | None = None
        self._writing: Future[None] | None = None
        self.use_mesh(mesh)
        if isinstance(planner, Planner):
            planner.skip_known_failures(KnownFailures(self._facts(planner, settings)))
        self.follow_plan()

    @property
    def _search(self) -> Planner:
        """The planner of steps; AssertionError without steps."""
        assert isinstance(self.planner, Planner)
        return self.planner

    def _facts(self, planner: Planner, settings: Mapping[str, Any]) -> list[Any]:
        """JSON values that identify the programs in KnownFailures: what they depend on, except plan, device and
        versions.
        """
        program, cost = self.program, planner.unplaced_cost
        sizes = {**vars(cost), **vars(cost.layers)}
        sizes = {name: value for name, value in sizes.items() if name not in ("layers", "segments", "kinds", "teacher")}
        return [
            {name: settings[name] for name in ("model", "adapter", "objective", "optim", "qat", "precision")},
            [self.deterministic, program.max_grad_norm, program.noise_alpha, settings["memory"]["plan"]],
            [program.max_documents, program.full, program.weights, program.dropout, type(program.objective).__name__],
            [dict(self.mesh.shape), str(planner.shape), sizes],
        ]

    def use_mesh(self, mesh: jax.sharding.Mesh) -> None:
        """Sets mesh and shardings of programs compiled from now on; placed arrays stay."""
        self.mesh, self.replicated = mesh, NamedSharding(mesh, partition.WHOLE)
        self._by_rows = NamedSharding(mesh, partition.ROWS)
        self.program = dataclasses.replace(self.program, mesh=mesh)
        if self.before_qat is not None:
            self.before_qat = dataclasses.replace(self.before_qat, mesh=mesh)

    def follow_plan(self) -> None:
        """Copies the planner's plan into steps compiled from now on; call it whenever the plan has changed."""
        plan = self.planner.plan
        follow = dict(plan=plan.residuals, chunk_tokens=plan.chunk_tokens, micro_batches=plan.micro_batches)

        def following(program: StepProgram) -> StepProgram:
            program = dataclasses.replace(program, **follow, offload=self._offloads)
            for word, movable in MOVABLES.items():
                program = movable.program(program, plan.level(word))
            return program

        self.program = following(self.program)
        self.before_qat = None if self.before_qat is None else following(self.before_qat)
        self._rows_before: dict[int, Batch] = {}
        self.micro_index = [partition.put(np.int32(i), self.replicated) for i in range(plan.micro_batches)]

    @property
    def options(self) -> dict[str, Any]:
        divides = partition.MeshShape.of(self.mesh).shard_count > 1
        merges = self.deterministic or not self.program.by_tensor  # so deterministic runs keep older versions' bits
        return compiler_options(self._platform, self.deterministic, divides, merges)

    @property
    def _platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    @property
    def whole_graphs(self) -> bool:
        """Whether the steps' programs are launched as whole CUDA graphs."""
        if not isinstance(self.planner, Planner) or self._platform != "gpu":
            return False
        short = self.mesh.size == 1 and self.planner.forecast.device_seconds < SHORT_STEP_SECONDS
        return short if self._asked_graphs is None else self._asked_graphs

    # ---- batches

    @property
    def rows(self) -> int:
        """Rows of a micro-batch over all devices; evaluations and passes use as many, so that they fit."""
        return self.batches.rows_per_step // self.planner.plan.micro_batches

    def place(self, batch: Batch, index: int = 0, count: int = 1) -> Batch:
        """A micro-batch of a step's batch, consecutive rows, on the devices, with their rows of tables on the host.
        index, count: the micro-batch's index, of `count` equal ones.
        """
        size = batch.tokens.shape[0] // count
        batch = dataclasses.replace(batch, table_rows={})
        batch = jax.tree.map(lambda array: array[index * size : (index + 1) * size], batch)
        tokens, features = batch.tokens, batch.pictures.get("picture_features")
        if features is not None and self.placeholder is not None:
            tokens = np.where(np.asarray(features) >= 0, self.placeholder, tokens)
        looked_up = {name: table[tokens] for name, table in self.tables.items() if isinstance(table, np.ndarray)}
        batch = dataclasses.replace(batch, table_rows=looked_up)
        return partition.put(batch, self._by_rows)

    def load_step(self, step: int, model: Callable[[], Decoder] | None = None) -> LoadedStep:
        """Makes and places a batch: (micro-batches, {"tokens" without padding, "trained_tokens" (sum of weights),
        "lengths" of documents, "metrics", "filled" micro-batches}). model: the model before the step, for sources that
        sample.
        """
        batch = self.batches.batch_at(step, model)
        count = self.planner.plan.micro_batches
        counts = {
            "tokens": int((batch.segment_ids > 0).sum()),
            "trained_tokens": int(batch.weights.sum()),
            "lengths": document_lengths(batch),
            "metrics": self.batches.metrics_at(step),
            "filled": self._filled(batch, count),
        }
        return [self.place(batch, index, count) for index in range(count)], counts

    def _filled(self, batch: Batch, micro_batches: int) -> int:
        """Micro-batches with tokens, where a source that samples may leave a step's last rows empty."""
        if not self.batches.needs_model or processes.count() > 1:
            return micro_batches
        used_rows = np.flatnonzero((batch.segment_ids > 0).any(1))
        last = int(used_rows[-1]) + 1 if used_rows.size else 1
        return -(-last * micro_batches // len(batch.tokens))

    def sums_shapes(self, state: TrainState) -> Sums:
        """Shapes of the sums, with shardings."""
        trainable = state.trainable
        return placed(self.program.sums_shapes(trainable), self.program.sums_shardings(trainable, self.replicated))

    def zero_sums(self, state: TrainState) -> Leaves[Sums]:
        """Zeros to which a process's first step adds; later steps get the update's."""
        shapes = Leaves.of(self.sums_shapes(state), self.program.stacked)
        return jax.tree.map(partition.zeros, shapes)

    def first_sums(self, state: TrainState) -> Leaves[Sums]:
        """`zero_sums` below which a block of GPU memory stays free for the next step's rows. Without it they lie above
        the step's temporary buffer, which then finds no single block, as seen on a 12 GiB card.
        """
        blocks, size = [], _BLOCK_FOR_ROWS + int(self.planner.cost.moved.batch_bytes)
        for device in self.mesh.local_devices:
            if device.platform == "gpu":
                blocks.append(jax.device_put(np.zeros(size, np.uint8), device))
        sums = jax.block_until_ready((blocks, self.zero_sums(state)))[1]
        for block in blocks:
            block.delete()
        return sums

    def flat(self, state: TrainState, sums: Sums | Leaves[Sums]) -> tuple[Leaves[TrainState], Leaves[Sums]]:
        """As the programs take and return them."""
        stacked = self.program.stacked
        return Leaves.of(state, stacked), sums if isinstance(sums, Leaves) else Leaves.of(sums, stacked)

    # ---- compiling

    def write_later(self) -> None:
        """Programs that are compiled from now on are cached by `write_beside` or `write_programs`: for a deep one that
        takes seconds, some with Python's lock, which its first step need not wait for.
        """
        self._unwritten = []

    @property
    def has_unwritten(self) -> bool:
        """Whether compiled programs are not cached yet, and no thread writes them."""
        return bool(self._unwritten) and self._writing is None

    def write_beside(self) -> None:
        """Begins to write them in a thread, so that the next steps need not wait either."""
        if self.has_unwritten:
            pool = ThreadPoolExecutor(1, "programs")
            self._writing = pool.submit(self._write)
            pool.shutdown(wait=False)

    def write_programs(self) -> None:
        """All are written when it returns."""
        writing, self._writing = self._writing, None
        if writing is not None:
            with timing.phase("wait", "programs"):
                writing.result()
        self._write()

    def _write(self) -> None:
        with timing.phase("save", "programs"):
            while self._unwritten:
                self._unwritten.pop(0)()

    def compile(
        self, state: TrainState, sums: Sums, frozen, first_step: int = 0, meanwhile: Callable[[], object] = lambda: None
    ) -> Programs:
        """Compiles the programs from first_step on for such arrays or shapes, or loads them.

        first_step: steps done before; it decides whether the programs before qat.start are needed.
        meanwhile: of `programs_of`.
        """
        start_seconds = time.perf_counter()
        batch, where, held_out = self._abstract_batch(self.batches), self.replicated, self._held_out
        index = jax.ShapeDtypeStruct((), jnp.int32, sharding=where)
        before = self.before_qat if first_step < self._early_steps else None
        steps = [self.program] if before is None else [self.program, before]
        stacked = self.program.stacked
        state, sums, frozen = abstract(state), abstract(sums), abstract(frozen)
        flat_sums, flat_state = Leaves.of(sums, stacked), Leaves.of(state, stacked)
        unsummed = flat_sums.of_each(self.program.sums_shardings(state.trainable, where))
        arguments = (flat_sums, flat_state, Leaves.of(frozen), batch, index)
        forwards = [without_update(program) for program in steps]
        requests = [
            self._request(over_leaves(program.accumulate, Sums, stacked=stacked), unsummed, arguments, donated=(0,))
            for program in forwards
        ]
        update = over_leaves(without_layers(self.program).update, TrainState, Sums, stacked=stacked)
        results = (flat_state.of_each(self.program.shardings(state, where)), unsummed, where)
        request = self._request(update, results, (flat_state, flat_sums), donated=(0, 1), shardy=True)
        of_update = update_options(self._platform, self.program.by_tensor)
        requests.append(dataclasses.replace(request, options={**request.options, **of_update}))
        if held_out is not None:
            requests += [
                self._of_rows(program.evaluate, where, state.trainable, frozen, held_out) for program in forwards
            ]
        done = programs_of(requests, meanwhile, self._unwritten)
        accumulates, update, evaluates = done[: len(steps)], done[len(steps)], done[len(steps) + 1 :]
        pairs = zip(accumulates, evaluates or [None] * len(steps), strict=True)
        programs, *early = (Programs(accumulate, update, evaluate) for accumulate, evaluate in pairs)
        seconds = time.perf_counter() - start_seconds
        return dataclasses.replace(programs, seconds=seconds, before_qat=early[0] if early else None)

    def compile_evaluate(self, program: StepProgram, trainable, frozen):
        """The compiled evaluation of held-out rows, (trainable, frozen, batch) -> sums, for runs without a step.
        Weights may be shapes. program: with or without rounded weights (QAT).
        """
        assert self._held_out is not None
        evaluate = without_update(program).evaluate
        return programs_of([self._of_rows(evaluate, self.replicated, trainable, frozen, self._held_out)])[0]

    def compile_of_rows(self, function, trainable, frozen, rows: Rows):
        """Compiles values for rows: (trainable, frozen, batch) -> what `function` of (model, batch, Forward) returns,
        arrays [rows, ...]. Weights may be shapes.
        """
        program = functools.partial(without_update(self.program).of_rows, function)
        return programs_of([self._of_rows(program, self._by_rows, trainable, frozen, rows)])[0]

    def _of_rows(self, function, out, trainable, frozen, rows: Rows) -> Request:
        return self._request(function, out, (abstract(trainable), abstract(frozen), self._abstract_batch(rows)))

    def _request(self, function, out, arguments: tuple, **options) -> Request:
        xla_options = {**self.options, **launch_options(self.whole_graphs)}
        return Request(function, arguments, out, self.mesh, xla_options, **options)

    def _abstract_batch(self, rows: Rows | BatchSource) -> Batch:
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
        meanwhile: Callable[[], object] = lambda: None,
        placed: bool = False,
    ) -> Programs:
        """Compiles plans until one fits, by the compiler's figures of accumulate and update; it is then in force.

          shapes: returns shapes of (state, sums, frozen) under the plan in force.
          first_step: programs before qat.start are compiled if it is earlier.
          meanwhile: of `programs_of`.
          placed: weights are on the devices, which limits plans (Planner.replan).
          print_line: prints a line about each plan that failed.

        PlanError if no plan is left.
        """
        while True:
            programs, need = self._compiled_and_need(shapes(), first_step, meanwhile)
            host_memory.give_back()
            if programs is not None and (need is None or self._search.fits(need)):
                if programs.seconds > _LONG and in_use() is None:
                    print_line("each start compiles again; jaxtune.use_program_cache(), called first, keeps programs")
                return programs
            problem = "compiling it ran out of memory"
            if need is not None:
                problem = f"the compiled step needs {need / 1e9:.2f} GB"
            self.write_programs()  # else they stay in memory
            self._search.replan(problem, need, print_line, placed)
            self.follow_plan()

    def _compiled_and_need(
        self, shapes: tuple[TrainState, Sums, Any], first_step: int, meanwhile: Callable[[], object]
    ) -> tuple[Programs | None, float | None]:
        """(programs, None if memory ran out in any process; most bytes of any process, None if no limit or unknown)."""
        programs, need, limited = None, 0.0, self.planner.budget_bytes is not None
        try:
            programs = self.compile(*shapes, first_step, meanwhile)
            if limited:
                need = self._search.compiled_bytes(programs.accumulate, programs.update)
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            programs = None
        process_needs = processes.all_of(None if programs is None else float(need))
        if None in process_needs:
            return None, None
        return programs, max(process_needs) if limited else None

    # ---- running

    def connect(self, print_line: Callable[[str], None]) -> dict[str, float]:
        """Runs a first collective, which connects the devices; its time as a metric, {} on one device."""
        if self.mesh.size == 1:
            return {}
        program, number = collectives.first_exchange(self.mesh), partition.put(np.float32(0), self.replicated)
        processes.all_of(None)  # a barrier, so that the time does not include waiting for others to compile
        start_seconds = time.perf_counter()
        jax.block_until_ready(program(number))
        seconds = time.perf_counter() - start_seconds
        print_line(f"collectives of {self.mesh.size} devices set up in {seconds:.1f} s")
        return {"collectives_seconds": seconds}

    def at(self, programs: Programs, step: int) -> Programs:
        """Those of `programs` for step number `step` (counted from 0): without rounded weights before qat.start."""
        early = step < self._early_steps and programs.before_qat is not None
        return programs.before_qat if early and programs.before_qat is not None else programs

    def accumulate(
        self,
        programs: Programs,
        sums: Leaves[Sums],
        state: Leaves[TrainState],
        frozen: Leaves[nnx.State],
        micro_batches: list[Batch],
    ) -> Leaves[Sums]:
        """`sums` (donated) with a step's micro-batches added; dispatched, not awaited. micro_batches: trailing empty
        micro-batches may be missing. state, frozen: on the devices; they are not donated.
        """
        for place, (index, batch) in enumerate(zip(self.micro_index, micro_batches, strict=False)):
            fixed = self.whole_graphs and self.mesh.size == 1
            rows = self._at_fixed_addresses(place, batch) if fixed else batch
            sums = programs.accumulate(sums, state, frozen, rows, index)
        return sums

    def _at_fixed_addresses(self, place: int, batch: Batch) -> Batch:
        """The batch in the memory of the last step's: where an argument has a new address, its graph is made anew."""
        before = self._rows_before.get(place)
        if before is None:
            before = jax.tree.map(lambda array: jnp.zeros_like(array, device=array.sharding), batch)
        self._rows_before[place] = _overwritten(before, batch)
        return self._rows_before[place]

    def first_step(
        self,
        programs,
        sums: Leaves[Sums],
        state: Leaves[TrainState],
        frozen: Leaves[nnx.State],
        micro_batches,
        step,
        print_line,
        compiling: Any = contextlib.nullcontext,
    ) -> tuple[Programs, Leaves[Sums], Leaves[nnx.State], list[Batch]]:
        """(programs, sums, frozen, micro_batches) after the first step's micro-batches, awaited. If memory runs out,
        they run again under smaller plans; only the update donates the state, so nothing is lost. `frozen` and
        micro-batches are as the last plan has them.

          programs, sums: of fit, and zeros of zero_sums.
          micro_batches: all micro-batches, also empty ones; a smaller plan divides their rows anew.
          step: steps done before it.
          print_line: prints a line about a smaller plan.
          compiling: makes the context of compiling.

        PlanError if no plan is left; other errors of XLA as they are, in several processes out of memory, too.
        """

        def arrays():
            nonlocal frozen
            weights = finished(frozen.tree, self.planner.plan)
            frozen = Leaves.of(weights)
            return state.tree, self.sums_shapes(state.tree), weights

        while True:
            summed = None
            try:
                summed = self.accumulate(self.at(programs, step), sums, state, frozen, micro_batches)
                return programs, jax.block_until_ready(summed), frozen, micro_batches
            except jax.errors.JaxRuntimeError as error:
                if not _may_plan_again(error):
                    raise
                short = self._search.short_bytes(error, self.mesh.local_devices)
            rows = jax.tree.map(lambda *pieces: np.concatenate([np.asarray(piece) for piece in pieces]), *micro_batches)
            # The caller still refers to the arguments; the results of what failed hold the memory of donated sums.
            jax.tree.map(lambda array: array.delete(), (sums, summed, micro_batches))
            del sums, summed, micro_batches
            self.write_programs()  # else they stay in memory
            programs = None
            self._search.replan("the first step ran out of memory", None, print_line, True, short, True)
            self.follow_plan()
            with compiling():
                programs = self.fit(arrays, step, print_line, placed=True)
            sums = self.zero_sums(state.tree)
            count = self.planner.plan.micro_batches
            micro_batches = [self.place(rows, index, count) for index in range(count)]

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
        """Metrics of `batches`, on the host: the mean loss, objective.unit (its count), and the objective's own.

        evaluate: the compiled program of one batch.
        shown: called with (batches done, all); between: after each batch, for signals.
        load: runs a function that loads a batch and may fail in one process alone.
        trainable, frozen: states on the devices.
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
        own_sums = {
            name: (max if name in largest else sum)(float(sums[name]) for _, _, sums in totals)
            for name in objective.sums
        }
        values = {"loss": loss / max(number, 1.0), objective.unit: int(number)}
        return values | objective.metrics({"loss": loss, "count": number, **own_sums})
