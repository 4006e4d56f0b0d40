"""The model of a run (`TrainedModel`): as the caller gave it, as the run computes with it, and as it is returned.
Trainer makes one, and so does the pass of a teacher before a run (stored_teachers.py). `_with_scales` joins the frozen
weights with the scales of activations, and `_placed` makes shapes with shardings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune.models.components import follow
from jaxtune.models.decoder import Decoder
from jaxtune.models.fake_quant import INPUT_SCALES
from jaxtune.models.files.quant import convert_qat, prepare_qat, qat_spec, unrounded
from jaxtune.models.linear import InputScale
from jaxtune.models.lora import copy_structure, has_adapter, linears, matrices
from jaxtune.models.observed_inputs import known_scales, observed_scales, with_input_scales
from jaxtune.models.placement import host_table, partition, transposed_codes
from jaxtune.system import processes
from jaxtune.train.config import TrainConfig
from jaxtune.train.objectives.teachers import without_teacher
from jaxtune.train.optimizer import optimizer_offload
from jaxtune.train.planning.planner import out_of_memory
from jaxtune.train.program.programs import Engine
from jaxtune.train.program.step import Sums, TrainState


class TrainedModel:
    """The model that a run trains, in each form that the run needs. The Trainer makes one, and so does a teacher's pass
    before a run, which trains nothing. The model that the caller gave is never changed, and its arrays are never
    donated; without `keeps_model` they may be freed.

    A run first asks for `first_shapes`, from which its programs are compiled while the weights may still be loading,
    and then calls `begin`. Both describe (state, sums, frozen): the TrainState, new or from a checkpoint; the Sums of
    gradients and losses over a step's micro-batches; and the frozen weights on the mesh. `first_state` returns these
    for a new run too, but keeps the given trained tensors and does not set `fresh`: benchmarks and tests use it.
    `weights` returns what a forward pass needs, and `finished` the model with the trained weights.

    Args:
      model: what the caller gave; its arrays are shapes if `weights` is given.
      config: the run's.
      keeps_model: True: the caller still uses the model, so its arrays must not be freed. False: arrays are freed if
        nobody else refers to them: the trained tensors, which are replaced by shapes once the run has copied them or
        before it reads a checkpoint, and frozen ones as soon as they are divided over devices.
      weights: the model with its weights, while they are being loaded in a thread; None: `model` has them.

    Attributes:
      given: the caller's model without its teacher, with the config's precision map; its shapes while its weights are
        being loaded. Trained tensors are shapes after `release`, and frozen weights are where `placed_frozen` put them.
      prepared: the model that computes: in the compute dtype, over arrays that keep their own dtypes, with weights
        rounded under QAT, and with its teacher.
      keeps_model: the argument.
      graph: graph definition of `prepared`.
      plain_graph: the same without QAT, for the steps before qat.start.
      qat: how linears and experts are rounded (FakeQuant), or None without QAT.
      trainable, frozen: nnx.States of the weights that train (shapes after `release`) and of the others, with the
        teacher's.
      scales: nnx.State of the scales under which QAT rounds activations, if its format observes them; else empty. They
        are those that the model has from an earlier QAT; a model without has NaN until they are observed, by
        `placed_frozen` of a new run, or come from a checkpoint (`resume`).
      fresh: whether this process started a new run, with an adapter that does not change the model's outputs yet; set
        by `begin`, and False before it and in a resumed run. A check of the first step reads it
        (references.first_check).
    """

    def __init__(self, model: Decoder, config: TrainConfig, keeps_model: bool, weights: Future[Decoder] | None):
        self._config, self.keeps_model, self._weights = config, keeps_model, weights
        self.fresh = False
        self._hold(model)

    def _hold(self, model: Decoder) -> None:
        """Sets the attributes that describe `model`, which the caller gave or whose weights have been loaded, when the
        object is made and in `take_weights`. Raises ValueError if the config's precision map does not fit the model (a
        pattern or word fits no module, or a module is quantised otherwise than the map says; a weight in another dtype
        is no error), QAT cannot round it (prepare_qat), or its dtype cannot hold the weights that QAT rounds."""
        config = self._config
        if config.components:
            model = copy_structure(model)
            follow(model, config.components)
        self.given, known = without_teacher(model), known_scales(model)
        model = unrounded(model)  # only config.qat decides whether weights are rounded
        model.dtype = config.dtype
        if config.components:
            follow(model, config.components)
        if model.teacher is not None:
            model.teacher.dtype = model.dtype
        if config.qat is not None:
            scales = known or {name: math.nan for name, _ in linears(model)}
            model = prepare_qat(model, config.qat.format, config.qat.group_size, config.qat.gradients, scales)
        self.graph, self.qat = nnx.graphdef(model), qat_spec(model)
        self._unobserved = self.qat is not None and self.qat.observes and not known
        plain = copy_structure(model)
        for _, matrix in matrices(plain):
            matrix.fake_quant = None
        self.plain_graph, self.trainable, self.scales, self.frozen = nnx.split(plain, nnx.Param, InputScale, ...)
        self._graph_alone = nnx.graphdef(without_teacher(model))
        if self.qat is not None and not self.qat.represented_by(self.given.dtype):
            raise ValueError(
                f"qat: precision = {config.computes_in} rounds weights in {self.qat.dtype}, which a model loaded in "
                f"{self.given.dtype} does not hold: load it in {self.qat.dtype} or float32"
            )

    @property
    def prepared(self) -> Decoder:
        """The model that the run computes with: its dtype is the compute dtype, its layers round under QAT, and it has
        its teacher. Planning, checks and descriptions of the run read it. Each call makes a new object over the same
        arrays, or shapes: no array is cast here, but where it multiplies."""
        return nnx.merge(self.graph, self.trainable, self.frozen, self.scales)

    # ---- the scales of activations

    def recorded(self) -> dict[str, dict[str, float]]:
        """What a checkpoint's metadata has of the model beside the run's record: {INPUT_SCALES: {name of a linear:
        scale}} if QAT rounds activations under observed scales, else {}. `resume` takes it."""
        observes = self.qat is not None and self.qat.observes
        return {INPUT_SCALES: known_scales(self.prepared)} if observes else {}

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Makes the model ready for the state of a checkpoint, before it is read: takes the scales of activations from
        its metadata, if QAT needs them, so that a resumed run and an evaluation of the checkpoint round as the run did,
        and gives up the given trained tensors (`free_given`). saved: the metadata, with what `recorded` returned.
        Raises ValueError if it lacks the scale of a linear that is rounded."""
        if self.qat is not None and self.qat.observes:
            self._set_scales(saved.get(INPUT_SCALES, {}))
        self.free_given()

    def _set_scales(self, scales: Mapping[str, float]) -> None:
        """Sets the scales of activations, with which QAT rounds them, as observed in this run or read from a
        checkpoint; they are then not observed again. `_observe` and `resume` call it. scales: {name of a linear:
        scale}. Raises ValueError if a linear that is rounded has none."""
        model = with_input_scales(self.prepared, scales)
        self.scales, self._unobserved = nnx.state(model, InputScale), False

    def _observe(self, engine: Engine) -> None:
        """Observes the scales under which QAT rounds the inputs of linears, by a forward pass of the untrained model,
        in the compute dtype, over the rows of the run's first step (from `engine`), and sets them (`scales`). Nothing
        is rounded in that pass. `placed_frozen` calls it if the scales are not known yet. Raises ValueError if the
        weights are divided, and FloatingPointError if an input is not finite."""
        model = nnx.merge(self.plain_graph, self.trainable, self.frozen, self.scales)
        rows = engine.batches.batch_at(0)
        assert self.qat is not None
        scales = observed_scales(without_teacher(model), self.qat.format, rows.tokens, rows.segment_ids, rows.positions)
        self._set_scales(scales)

    # ---- the start

    @property
    def is_loading(self) -> bool:
        """Whether a thread is still loading the weights. False if it has finished, or if there was none; the model has
        the weights only after `take_weights`. The run tells the user that it waits, if this is True."""
        return self._weights is not None and not self._weights.done()

    def take_weights(self) -> None:
        """Waits for weights that are being loaded in a thread, and sets the attributes that describe the model with
        them; does nothing if they are there. `begin` of a new run, `weights` and `first_state` call it themselves; the
        Trainer calls it before it compares a checkpoint or results with the run, because the digest of the base is
        computed from the weights, and the train command before it has the given model answer questions. Raises what the
        loading raised."""
        if self._weights is not None:
            self._hold(self._weights.result())
            self._weights = None

    def first_state(self, engine: Engine) -> tuple[TrainState, Sums, Any]:
        """(state, sums, frozen) at the start of a new run, placed on the mesh of `engine`, for benchmarks and tests; a
        run calls `begin`. Arrays of the caller that the step would donate are copied, and the given trained tensors
        stay. Waits for weights that are being loaded."""
        state, frozen = self._first(engine)
        return state, engine.zero_sums(state), frozen

    def _first(self, engine: Engine) -> tuple[TrainState, Any]:
        """(state, frozen) of a new run, placed on the mesh of `engine`. `first_state` and `begin` call it, and make the
        sums to which a step adds its gradients themselves. Waits for weights that are being loaded."""
        self.take_weights()
        frozen = self.placed_frozen(engine)  # comes first, so that the blocks it frees are used for what follows
        program, where = engine.program, engine.replicated
        if engine.mesh.size == 1 or program.offload:
            state = program.init(self.trainable, self._config.seed, where)
            state = partition.put(state, program.shardings(state, where))
        else:  # no device ever has a whole tensor that is divided
            shapes, _, _ = self.first_shapes(engine)
            trainable = partition.put(self.trainable, partition.shardings(self.trainable, engine.mesh))
            init = jax.jit(program.init, static_argnums=1, out_shardings=jax.tree.map(lambda a: a.sharding, shapes))
            state = init(trainable, self._config.seed)
        return state, frozen

    def weights(self, engine: Engine) -> tuple[nnx.State, nnx.State]:
        """(trainable, frozen) for a forward pass of the given model, on the mesh of `engine`. The trained tensors are
        the given ones in their own dtypes: on one device none of them is copied, and there is no optimizer. An
        evaluation without training and a teacher's pass use it. Waits for weights that are being loaded."""
        self.take_weights()
        frozen = self.placed_frozen(engine)
        return partition.put(self.trainable, partition.shardings(self.trainable, engine.mesh)), frozen

    def placed_frozen(self, engine: Engine) -> nnx.State:
        """The frozen weights, whole or divided over devices as the plan in force says, and the scales of activations,
        if QAT observes any, on the mesh of `engine`: the `frozen` that a run's programs take. The weights must be
        loaded (`take_weights`). If the scales are not known yet, they are observed here. Raises ValueError if processes
        have loaded different base models, or if scales are to be observed and the weights are divided already, and
        FloatingPointError as `_observe` does. The tables of embeddings are moved to where the plan has them, and
        `engine.tables` set; a table on the host has no rows in the result.

        If weights are divided and the caller does not keep the model, each array is given up before the next one is
        moved, and freed if nobody else refers to it, so that a device never has all whole arrays beside its shares of
        them; `given` and `frozen` then have the shares. All processes start this at the same time, because gathering is
        collective and must not wait for a process that is still loading."""
        processes.require_same({"the base model": self.given.base_digest}, "give all of them the same weights")
        self._move_tables(engine)
        if self._unobserved:
            self._observe(engine)
        scales = partition.put(self.scales, partition.shardings(self.scales, engine.mesh))
        return _with_scales(self._placed_frozen(engine), scales)

    def _placed_frozen(self, engine: Engine) -> nnx.State:
        """The frozen weights, without the scales of activations, on the mesh of `engine`. It moves or divides them,
        gives up whole arrays as `placed_frozen` describes, makes the transposed codes that the plan keeps, which
        `given` and `frozen` do not have, and sets `engine.tables`. Only `placed_frozen` calls it, as its last step: the
        base models were compared, the tables moved and the scales observed before."""
        declared = self._declared(engine)
        where = partition.shardings(declared, engine.mesh)
        if partition.MeshShape.of(engine.mesh).parts == 1:
            placed = partition.put(declared, where)
            return transposed_codes.with_copies(placed) if engine.planner.plan.transposed_codes else placed
        if self.keeps_model:
            return jax.tree.map(partition.moved, declared, where)
        graph, trainable = nnx.split(self.given, nnx.Param, ...)[:2]
        arrays, structure = jax.tree.flatten(self.frozen)
        as_declared = jax.tree.structure(declared)
        del self.frozen, self.given, declared
        try:
            for index, sharding in enumerate(jax.tree.leaves(where)):
                arrays[index] = jax.block_until_ready(partition.moved(arrays[index], sharding))
        finally:
            self.frozen = jax.tree.unflatten(structure, arrays)
            own = nnx.State({key: value for key, value in self.frozen.items() if key != "teacher"})
            self.given = nnx.merge(graph, trainable, own)
        return jax.tree.unflatten(as_declared, arrays)

    def _declared(self, engine: Engine) -> nnx.State:
        """The frozen weights as nnx variables whose axes tell partition.shardings where to place them, by the plan in
        force (`engine.planner.plan`): variables that the plan keeps whole on every device have empty axes, and the
        others keep their axes, along which the mesh divides them. No array is moved or copied. If the plan has
        tables of embeddings on the host, `engine.tables` is set to them, which have no rows in the result; otherwise it
        is set to {}. `first_shapes` and `_placed_frozen` call it."""
        plan, frozen = engine.planner.plan, self.frozen
        engine.tables = self._tables if plan.table_on_host else {}
        frozen = host_table.without_rows(frozen, engine.tables)
        return partition.declared_resident(frozen, plan.residuals.resident, len(plan.residuals.layers))

    @property
    def _tables(self) -> dict[str, host_table.Array]:
        """{name: table} of the frozen tables of embeddings that a plan may have on the host (Decoder.tables), wherever
        they are: numpy arrays there, jax arrays on devices, or shapes while the weights are loaded."""
        return host_table.tables_of(self.frozen, self.given.tables)

    def _move_tables(self, engine: Engine) -> None:
        """Moves the frozen tables of embeddings to where the plan in force (of `engine`) has them: to the host as numpy
        arrays, or from there to the devices; those that are there already stay. The given model then has them in the
        same place, so that each is in memory once.

        `placed_frozen` calls it before it places the weights. They may be loaded before the plan is known, and the
        loader leaves the tables on the host if a plan may have them there. If memory runs out in the first step, the
        new plan has the tables where they are, and this is not called again."""
        on_host = engine.planner.plan.table_on_host
        self._replace_tables(
            {
                name: partition.on_host(table) if on_host else partition.put(table, engine.replicated)
                for name, table in self._tables.items()
                if isinstance(table, np.ndarray) != on_host
            }
        )

    def _replace_tables(self, tables: dict[str, host_table.Array]) -> None:
        """Puts these tables, {name: array}, in place of those of the given model and of the frozen weights."""
        if tables:
            graph, trainable, frozen = nnx.split(self.given, nnx.Param, ...)
            self.frozen = host_table.with_tables(self.frozen, tables)
            self.given = nnx.merge(graph, trainable, host_table.with_tables(frozen, tables))

    def first_shapes(self, engine: Engine) -> tuple[TrainState, Sums, Any]:
        """Returns (state, sums, frozen) as `begin` does for a new run, with the shape of each array in its place. Each
        shape has its sharding under the plan of `engine`. The programs of a run are compiled from these shapes while
        the weights are still being loaded. `train --plan` compiles from them too. The method also sets
        `engine.tables`, as `_declared` says."""
        program, state = engine.program, self.state_shapes(engine)
        sums = jax.eval_shape(program.zero_sums, state.trainable)
        sums = _placed(sums, program.sums_shardings(state.trainable, engine.replicated))
        frozen = _with_scales(self._declared(engine), self.scales)
        frozen = _placed(frozen, partition.shardings(frozen, engine.mesh))
        return state, sums, transposed_codes.with_copies(frozen) if engine.planner.plan.transposed_codes else frozen

    def state_shapes(self, engine: Engine) -> TrainState:
        """The shapes of a run's state with their shardings on the mesh of `engine`, a TrainState of
        jax.ShapeDtypeStruct, into which a checkpoint is read: each device then reads only its parts. No array is
        made. `first_shapes` returns it too."""
        program = engine.program
        state = jax.eval_shape(lambda trainable: program.init(trainable, self._config.seed), self.trainable)
        return _placed(state, program.shardings(state, engine.replicated))

    def begin(self, engine: Engine, resumed: TrainState | None) -> tuple[TrainState, Sums, Any]:
        """(state, sums, frozen) with which a run starts, placed on the mesh of `engine`; the Trainer calls it once the
        programs are compiled. resumed: the state from a checkpoint, whose optimizer states are moved to where the plan
        has them; None: a new run, with a new state. For a new run it also sets `fresh`, whether its adapter does not
        change the model's outputs yet (False without an adapter), and gives up the given trained tensors
        (`free_given`); it waits for weights that are being loaded. On a GPU the sums leave a block of memory free, into
        which the next step's rows are copied (Engine.first_sums)."""
        if resumed is not None:
            where = engine.program.shardings(resumed, engine.replicated)
            resumed = dataclasses.replace(
                resumed, opt_state=optimizer_offload.moved(resumed.opt_state, where.opt_state)
            )
            frozen = self.placed_frozen(engine)  # before the sums leave a block free, as it may make transposed codes
            return resumed, engine.first_sums(resumed), frozen
        self.take_weights()
        factors = [matrix.lora.b.get_value() for _, matrix in matrices(self.given) if matrix.lora is not None]
        self.fresh = bool(factors) and not any(bool(partition.on_host(jnp.any(b != 0))) for b in factors)
        state, frozen = self._first(engine)
        # The given tensors are freed before the sums are made, so that the sums take their place. Otherwise the step's
        # temporary buffer, which is a single block, may find no room although enough bytes are free.
        self.free_given()
        return state, engine.first_sums(state), frozen

    def free_given(self) -> None:
        """Replaces the trained tensors in `given` by their shapes (`release`), once the run has copied them or before a
        checkpoint's take their place, so that their memory is freed if nobody else refers to the arrays. It does
        nothing with keeps_model, when the caller still uses the model."""
        if not self.keeps_model:
            self.release()

    @property
    def teacher_digest(self) -> str | None:
        """A digest of the weights of the teacher that computes in this run's steps, by which a run is not resumed with
        another teacher; None without such a teacher, while weights are being loaded, or if the digest is not known."""
        teacher = self.prepared.teacher
        return None if teacher is None else teacher.base_digest

    def release(self) -> None:
        """Replaces the trained tensors in `given` and `trainable` by their shapes. Their memory is freed, if nobody
        else refers to the arrays, for the state that trains in their place; `first_state` and `weights` cannot be
        called after it. Frozen weights stay. A run calls it by `free_given`, benchmarks directly."""
        graph, trainable, frozen = nnx.split(self.given, nnx.Param, ...)
        self.trainable = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), trainable)
        self.given = nnx.merge(graph, self.trainable, frozen)

    # ---- the result

    def finished(self, trainable: Any) -> Decoder:
        """A new model, without a teacher: the given one with `trainable`, the trained tensors of a TrainState, each in
        the dtype in which it was given. A run returns it at its end, as does the evaluation of a checkpoint, and
        answers are sampled from it and callbacks get it between steps. It shares the frozen arrays of `given`, and
        trained ones whose dtype does not change.

        Its arrays are on the mesh's devices, but tables of embeddings may be on the host; in a run of
        several processes that all have every array whole, each process gets its own copy on one device. After QAT, a
        model with adapters still rounds its weights whenever it computes, and merge_adapter converts it; a model
        without adapters is converted here: its weights have the rounded values. With or without QAT, base_digest and
        base_fingerprint of a model without adapters are None, because its weights changed."""
        _, _, frozen = nnx.split(self.given, nnx.Param, ...)
        trained, frozen = partition.colocated(trainable, frozen)
        model = nnx.merge(self._graph_alone, trained, frozen, self.scales)
        if not has_adapter(model):
            # The weights changed, so adapters trained over the old base do not belong to them.
            model.base_digest = model.base_fingerprint = None
            model.qat = None
            if self.qat is not None:
                model = convert_qat(model)  # from the float32 masters, which are more precise than the given dtype
        graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
        trainable = jax.tree.map(lambda new, old: new.astype(old.dtype), trainable, self.trainable)
        model = nnx.merge(graph, trainable, frozen)
        model.dtype = self.given.dtype
        return model


def with_embedding_on_device(model: Decoder) -> Decoder:
    """The model that a run returns, with its token embedding on the device, where what computes with the model reads it
    as fast as the other weights; the run may have had it on the host, and leaves it there if there is no room. It is
    changed in place. A table of per-layer embeddings stays on the host: it may be as large as all other weights."""
    weight = model.embedding.weight
    if isinstance(table := weight.get_value(), np.ndarray):
        place = model.norm.weight.get_value().sharding
        try:
            weight.set_value(jax.block_until_ready(partition.put(table, place)))
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
    return model


def _with_scales(frozen: nnx.State, scales: nnx.State) -> nnx.State:
    """The frozen weights with the scales of activations, which programs take as one nnx.State: for `placed_frozen` and
    `first_shapes`. frozen: an nnx.State, which is returned as it is if QAT observes no scales. scales:
    TrainedModel.scales, placed where the weights are."""
    return nnx.merge_state(frozen, scales) if jax.tree.leaves(scales) else frozen


def _placed(tree, shardings):
    """The shapes and dtypes of a tree's arrays as jax.ShapeDtypeStructs, with the shardings of `shardings`, a tree of
    the same structure: what `first_shapes` and `state_shapes` return. No array is placed."""
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings)
