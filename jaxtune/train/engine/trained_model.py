"""The model of a run: as the caller gave it, as the run computes with it, and as it is returned."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxtune.models.components import follow
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.quant import convert_qat, prepare_qat, qat_spec, unrounded
from jaxtune.models.linear import InputScale
from jaxtune.models.lora import copy_structure, has_adapter, linears, matrices
from jaxtune.models.observed_inputs import known_scales, observed_scales, with_input_scales
from jaxtune.models.placement import partition
from jaxtune.models.placement.streams import declared_as_placed
from jaxtune.models.programs.compiling import out_of_memory
from jaxtune.models.qat.fake_quant import INPUT_SCALES
from jaxtune.system import processes, timing
from jaxtune.system.waiting import Handover
from jaxtune.train.config import QatConfig
from jaxtune.train.config.precision import Precision
from jaxtune.train.engine.programs import Engine, finished, placed
from jaxtune.train.objectives.teachers import without_teacher
from jaxtune.train.optimizer import optimizer_offload
from jaxtune.train.planning.movables import MOVABLES
from jaxtune.train.planning.plan import StepPlan
from jaxtune.train.program.leaves import Leaves, differences
from jaxtune.train.program.step import Sums, TrainState

_EARLY_BYTES = 1 << 30  # of a state that is made beside compiling, which needs memory to time algorithms


class TrainedModel:
    """The model that a run trains. The caller's is never changed and its arrays never donated; without `keeps_model`
    they may be freed. `first_shapes` come first, from which programs are compiled while weights load, then `begin`;
    both describe (state, sums, frozen weights).

      model: has shapes if `weights` is given.
      seed: of the first state.
      keeps_model: False: trained tensors become shapes once copied, and frozen ones are freed as they are divided.
      weights: the model that a thread is loading.

    Attributes:
      given: the caller's model without its teacher. Trained tensors are shapes after `release`.
      graph, plain_graph: of `prepared`, with and without QAT.
      qat: how weights are rounded (FakeQuant); None without QAT.
      trainable, frozen: nnx.States; frozen includes the teacher's.
      scales: nnx.State of activation scales that QAT observes; NaN until known.
      fresh: this process began a new run whose adapter does not change outputs yet.
    """

    def __init__(
        self,
        model: Decoder,
        precision: Precision,
        qat: QatConfig | None,
        seed: int,
        keeps_model: bool,
        weights: Future[Handover[Decoder]] | None,
    ):
        self._precision, self._qat, self._seed = precision, qat, seed
        self.keeps_model, self._weights = keeps_model, weights
        self.fresh = False
        self._state_shapes: tuple[object, object, TrainState] | None = None  # with what they follow from
        self._early_state: TrainState | None = None  # of `make_state`
        self._early_fresh: bool | None = None  # `fresh`, by `make_state`
        # frozen weights on the mesh, of a run that divides them beside a model that is kept, or in several processes
        self._divided: nnx.State | None = None
        self._hold(model)

    def _hold(self, model: Decoder) -> None:
        """ValueError if the precision map does not fit, QAT cannot round the model, or its dtype cannot hold rounded
        weights.
        """
        precision, qat = self._precision, self._qat
        if precision.components:
            model = copy_structure(model)
            follow(model, precision.components)
        self.given, saved_scales = without_teacher(model), known_scales(model)
        model = unrounded(model)  # only `qat` decides whether weights are rounded
        model.dtype = precision.dtype
        if precision.components:
            follow(model, precision.components)
        if model.teacher is not None:
            model.teacher.dtype = model.dtype
        if qat is not None:
            scales = saved_scales or {name: math.nan for name, _ in linears(model)}
            model = prepare_qat(model, qat.format, qat.group_size, qat.gradients, scales)
        self.qat = qat_spec(model)
        self._unobserved = self.qat is not None and self.qat.observes and not saved_scales
        self.graph, self.trainable, self.scales, self.frozen = nnx.split(model, nnx.Param, InputScale, ...)
        self.plain_graph = self._graph_alone = self.graph
        if qat is not None:
            plain = copy_structure(model)
            for _, matrix in matrices(plain):
                matrix.fake_quant = None
            self.plain_graph = nnx.graphdef(plain)
        if model.teacher is not None:
            self._graph_alone = nnx.graphdef(without_teacher(model))
        if self.qat is not None and not self.qat.represented_by(self.given.dtype):
            raise ValueError(
                f"qat: precision = {precision.computes_in} rounds weights in {self.qat.dtype}, which a model loaded in "
                f"{self.given.dtype} does not hold: load it in {self.qat.dtype} or float32"
            )

    @property
    def prepared(self) -> Decoder:
        """The model that computes: in the compute dtype, rounding under QAT, with its teacher; a new object over the
        same arrays or shapes, which keep their dtypes.
        """
        return nnx.merge(self.graph, self.trainable, self.frozen, self.scales)

    # ---- the scales of activations

    def recorded(self) -> dict[str, dict[str, float]]:
        """What a checkpoint keeps beside the run's record: {INPUT_SCALES: {linear: scale}} if QAT observes scales, else
        {}.
        """
        observes = self.qat is not None and self.qat.observes
        return {INPUT_SCALES: known_scales(self.prepared)} if observes else {}

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Takes a checkpoint's activation scales and gives up the given trained tensors (`free_given`), before its
        state is read. ValueError if a scale is missing.
        """
        if self.qat is not None and self.qat.observes:
            self._set_scales(saved.get(INPUT_SCALES, {}))
        self.free_given()

    def _set_scales(self, scales: Mapping[str, float]) -> None:
        model = with_input_scales(self.prepared, scales)
        self.scales, self._unobserved = nnx.state(model, InputScale), False

    def _observe(self, engine: Engine) -> None:
        """Observes activation scales by an unrounded forward pass over the first step's rows. ValueError for weights
        that devices divide, FloatingPointError for an activation that is not finite.
        """
        model = nnx.merge(self.plain_graph, self.trainable, self.frozen, self.scales)
        rows = engine.batches.batch_at(0)
        assert self.qat is not None
        scales = observed_scales(without_teacher(model), self.qat.format, rows.tokens, rows.segment_ids, rows.positions)
        self._set_scales(scales)

    # ---- the start

    @property
    def is_loading(self) -> bool:
        """Whether a thread is still loading. The model has the weights only after `take_weights`."""
        return self._weights is not None and not self._weights.done()

    def take_weights(self) -> None:
        """Waits for weights that a thread loads, and takes them; raises what loading raised."""
        if self._weights is not None:
            with timing.phase("wait", "weights"):
                model = self._weights.result().take()
            self._weights = None
            self._hold(model)

    def first_state(self, engine: Engine) -> tuple[TrainState, Sums, Any]:
        """(state, sums, frozen) of a new run on the mesh; the given trained tensors stay, as `begin` does not keep
        them. For benchmarks and tests.
        """
        state, frozen = self._first(engine)
        return state, engine.zero_sums(state).tree, frozen

    def _first(self, engine: Engine) -> tuple[TrainState, Any]:
        self.take_weights()
        frozen = self.placed_frozen(engine)  # comes first, so that the blocks it frees are used for what follows
        program = engine.program
        if self._early_state is not None:
            state, self._early_state = self._early_state, None
        elif engine.mesh.size == 1 or program.offload:
            state = self._made_state(engine)
        else:  # no device ever has a whole tensor that is divided
            shapes, _, _ = self.first_shapes(engine)
            trainable = partition.put(self.trainable, partition.shardings(self.trainable, engine.mesh))
            init = jax.jit(program.init, static_argnums=1, out_shardings=jax.tree.map(lambda a: a.sharding, shapes))
            state = init(trainable, self._seed)
        return state, frozen

    def make_state(self, engine: Engine) -> None:
        """Makes the first state of a new run, which `begin` then has, while programs compile, and looks whether it is
        `fresh`: on one device, if it is small and no thread loads weights any more.
        """
        if self._early_state is not None or self.is_loading or engine.mesh.size > 1 or engine.program.offload:
            return
        if sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.state_shapes(engine))) > _EARLY_BYTES:
            return
        self.take_weights()
        if self._early_fresh is None:
            self._early_fresh = _is_fresh(self.given)
        try:
            self._early_state = self._made_state(engine)
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):  # `begin` has the memory that compiling takes now
                raise

    def drop_state(self) -> None:
        """Of `make_state`: another plan may have it elsewhere, and compiles without it in memory."""
        self._early_state = None

    def _made_state(self, engine: Engine) -> TrainState:
        program, where = engine.program, engine.replicated
        state = program.init(self.trainable, self._seed, where)
        return partition.put(state, program.shardings(state, where))

    def weights(self, engine: Engine) -> tuple[nnx.State, nnx.State]:
        """(trainable, frozen) for a forward pass on the mesh, in the given dtypes; on one device nothing is copied."""
        self.take_weights()
        frozen = self.placed_frozen(engine)
        return partition.put(self.trainable, partition.shardings(self.trainable, engine.mesh)), frozen

    def placed_frozen(self, engine: Engine) -> nnx.State:
        """The frozen weights with activation scales, placed as the plan says, which moves the given model's, too;
        unknown scales are observed.

        Collective: gathering must not wait for a process that still loads. If weights are divided and the caller does
        not keep the model, each array is freed before the next moves, so that no device has all whole arrays beside its
        shares. ValueError if base models differ between processes, or for unknown scales of divided weights;
        FloatingPointError as in `_observe`.
        """
        processes.require_same({"the base model": self.given.base_digest}, "give all of them the same weights")
        self._move(engine)
        if self._unobserved:
            self._observe(engine)
        scales = partition.put(self.scales, partition.shardings(self.scales, engine.mesh))
        return _with_scales(self._placed_frozen(engine), scales)

    def _placed_frozen(self, engine: Engine) -> nnx.State:
        """The last step of `placed_frozen`, without scales. Further copies are only in the result."""
        return finished(self._divided_frozen(engine), engine.planner.plan)

    def _divided_frozen(self, engine: Engine) -> nnx.State:
        declared = self._declared(engine)
        where = partition.shardings(declared, engine.mesh)
        if partition.MeshShape.of(engine.mesh).shard_count == 1:
            frozen = partition.put(declared, where)
            self._divided = frozen if self._is_placed(engine.mesh) else None
            return frozen
        if self.keeps_model:
            self._divided = frozen = jax.tree.map(partition.moved, declared, where)
            return frozen
        graph, trainable = nnx.split(self.given, nnx.Param, ...)[:2]
        arrays, structure = jax.tree.flatten(self.frozen)
        as_declared = jax.tree.structure(declared)
        del self.frozen, self.given, declared
        try:
            for index, sharding in enumerate(jax.tree.leaves(where)):
                arrays[index] = jax.block_until_ready(partition.moved(arrays[index], sharding))
        finally:
            self.frozen = jax.tree.unflatten(structure, arrays)
            self.given = nnx.merge(graph, trainable, _own_weights(self.frozen))
        return jax.tree.unflatten(as_declared, arrays)

    def _declared(self, engine: Engine) -> nnx.State:
        """The frozen weights as variables whose axes say how the plan places them; no array moves."""
        plan, frozen, model = engine.planner.plan, self.frozen, self.given
        engine.tables, engine.placeholder = {}, model.vision and model.vision.config.placeholder
        for word, movable in MOVABLES.items():
            engine.tables |= movable.looked_up(model, frozen, plan.level(word))
            frozen = movable.declared(model, frozen, plan.level(word))
        return frozen

    def sampled(self, plan: StepPlan, mesh: partition.AnyMesh) -> Decoder:
        """The shapes of the model that `sampling` returns in a run by this plan, with shardings of what is not on one
        device alone.
        """
        frozen = self.frozen
        for word, movable in MOVABLES.items():
            frozen = movable.declared(self.given, frozen, plan.level(word))
        if self._is_placed(mesh):
            frozen = placed(frozen, partition.shardings(frozen, mesh))
        trainable = placed(self.trainable, partition.shardings(self.trainable, mesh))
        return nnx.merge(self._graph_alone, trainable, _own_weights(frozen), self.scales)

    def _is_placed(self, mesh: partition.AnyMesh) -> bool:
        """Whether the weights of `sampling` are those of the mesh."""
        return partition.MeshShape.of(mesh).shard_count > 1 or processes.count() > 1

    def _move(self, engine: Engine) -> None:
        """Moves frozen weights, which the model shares, to the memory in which the plan has them."""
        moved = self.frozen
        for word, movable in MOVABLES.items():
            moved = movable.moved(self.given, moved, engine.planner.plan.level(word), engine.replicated)
        arrays = zip(jax.tree.leaves(self.frozen), jax.tree.leaves(moved), strict=True)
        changes = {id(array): copy for array, copy in arrays if copy is not array}
        if changes:
            graph, trainable, frozen = nnx.split(self.given, nnx.Param, ...)
            frozen = declared_as_placed(jax.tree.map(lambda array: changes.get(id(array), array), frozen))
            self.frozen, self.given = moved, nnx.merge(graph, trainable, frozen)

    def first_shapes(self, engine: Engine) -> tuple[TrainState, Sums, Any]:
        """Shapes of what `begin` returns for a new run, with shardings, while weights may still load. Sets
        `engine.tables`.
        """
        state = self.state_shapes(engine)
        frozen = _with_scales(self._declared(engine), self.scales)
        frozen = placed(frozen, partition.shardings(frozen, engine.mesh))
        return state, engine.sums_shapes(state), finished(frozen, engine.planner.plan)

    def state_shapes(self, engine: Engine) -> TrainState:
        """Shapes and shardings of the state, by which each device reads only its parts of a checkpoint."""
        program, where = engine.program, engine.replicated
        leaves, tree = jax.tree.flatten(self.trainable)
        of_trained = tree, [(leaf.shape, leaf.dtype) for leaf in leaves]
        if self._state_shapes is None or self._state_shapes[0] is not program or self._state_shapes[1] != of_trained:
            state = jax.eval_shape(lambda trainable: program.init(trainable, self._seed), self.trainable)
            self._state_shapes = program, of_trained, placed(state, program.shardings(state, where))
        return self._state_shapes[2]

    def begin(self, engine: Engine, resumed: TrainState | None) -> tuple[TrainState, Leaves[Sums], Any]:
        """(state, sums, frozen) with which a run starts, on the mesh. resumed: a checkpoint's state; its optimizer
        states move to where the plan has them. A new run waits for weights, sets `fresh` and gives up the given trained
        tensors. The sums leave a free block on a GPU (Engine.first_sums).
        """
        if resumed is not None:
            where = engine.program.shardings(resumed, engine.replicated)
            resumed = dataclasses.replace(
                resumed, opt_state=optimizer_offload.moved(resumed.opt_state, where.opt_state)
            )
            frozen = self.placed_frozen(engine)  # before the sums leave a block free, as it may make transposed codes
            self._require_as_compiled(engine, resumed, frozen)
            return resumed, engine.first_sums(resumed), frozen
        self.take_weights()
        self.fresh = _is_fresh(self.given) if self._early_fresh is None else self._early_fresh
        state, frozen = self._first(engine)
        self._require_as_compiled(engine, state, frozen)
        # The given tensors are freed before the sums are made, so that the sums take their place. Otherwise the step's
        # temporary buffer, which is a single block, may find no room although enough bytes are free.
        self.free_given()
        return state, engine.first_sums(state), frozen

    def _require_as_compiled(self, engine: Engine, state: TrainState, frozen: nnx.State) -> None:
        """RuntimeError if what a step is given is not what its programs were compiled for (`first_shapes`)."""
        shapes, _, frozen_shapes = self.first_shapes(engine)
        if lines := [*differences(shapes, state), *differences(frozen_shapes, frozen)]:
            raise RuntimeError(
                f"{len(lines)} tensors are not as the step's programs were compiled for them, a fault of jaxtune "
                f'(memory.plan = "recompute" may avoid it): {"; ".join(lines[:3])}'
            )

    def free_given(self) -> None:
        """`release` without keeps_model. For when the run has copied the trained tensors, or before it reads a
        checkpoint's.
        """
        if not self.keeps_model:
            self.release()

    @property
    def teacher_digest(self) -> str | None:
        """Digest of the teacher's weights, so that a run does not resume with another; None if there is none or it is
        unknown.
        """
        teacher = self.prepared.teacher
        return None if teacher is None else teacher.base_digest

    def release(self) -> None:
        """Replaces trained tensors by shapes, which frees them if nobody else has them; `first_state` and `weights`
        cannot follow.
        """
        graph, trainable, frozen = nnx.split(self.given, nnx.Param, ...)
        self.trainable = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), trainable)
        self.given = nnx.merge(graph, self.trainable, frozen)

    # ---- the result

    def finished(self, trainable: Any) -> Decoder:
        """A new model without a teacher: the given one with the trained tensors in the dtypes in which they were given;
        it shares the frozen arrays, or has the run's parts of them. It is on the mesh's devices, tables perhaps on the
        host as numpy arrays, and weights that streamed still do; in several processes with whole arrays, a copy on one
        device each.

        After QAT, a model with adapters still rounds, and merge_adapter converts it. Without adapters it is converted
        here, and its base_digest and base_fingerprint are None, as its weights changed.
        """
        trained, frozen = partition.colocated(trainable, self._own_frozen())
        return self._with(trained, frozen, self.scales)

    def sampling(self, trainable: nnx.State) -> Decoder:
        """`finished` for sampling during a run: in several processes on the devices of all."""
        if processes.count() == 1:
            return self.finished(trainable)
        return self._with(trainable, self._own_frozen(), self.scales)

    def _own_frozen(self) -> nnx.State:
        if self._divided is not None:
            return _own_weights(self._divided)
        _, _, frozen = nnx.split(self.given, nnx.Param, ...)
        return frozen

    def _with(self, trained: nnx.State, frozen: nnx.State, scales: nnx.State) -> Decoder:
        model = nnx.merge(self._graph_alone, trained, frozen, scales)
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
    """Moves the model's token embedding to the device, in place, unless there is no room. Per-layer embeddings stay on
    the host: they may be as large as all other weights.
    """
    weight = model.embedding.weight
    if isinstance(table := weight.get_value(), np.ndarray):
        sharding = model.norm.weight.get_value().sharding
        try:
            weight.set_value(jax.block_until_ready(partition.put(table, sharding)))
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
    return model


def _is_fresh(model: Decoder) -> bool:
    """Whether it has an adapter whose B is 0."""
    factors = [matrix.lora.b.get_value() for _, matrix in matrices(model) if matrix.lora is not None]
    return bool(factors) and not any(_has_number(partition.on_host(b)) for b in factors)


def _has_number(array: np.ndarray) -> bool:
    """Whether one is not 0; at once where all bits are."""
    return bool(np.ascontiguousarray(array).view(np.uint8).any()) and bool((array != 0).any())


def _own_weights(frozen: nnx.State) -> nnx.State:
    """Without a teacher's."""
    return nnx.State({key: value for key, value in frozen.items() if key != "teacher"})


def _with_scales(frozen: nnx.State, scales: nnx.State) -> nnx.State:
    return nnx.merge_state(frozen, scales) if jax.tree.leaves(scales) else frozen


def trainable_names(trainable) -> list[str]:
    """Dotted names of the tensors, such as "head.weight", in the order of jax.tree.leaves and metrics["grad_norms"]."""
    paths = jax.tree_util.tree_flatten_with_path(trainable)[0]
    return [
        ".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path if _names_a_place(k)) for path, _ in paths
    ]


def _names_a_place(key) -> bool:
    """False for "value" and "raw_value", which nnx.Variable adds."""
    return not (isinstance(key, jax.tree_util.GetAttrKey) and key.name in ("value", "raw_value"))
