"""Costs of a training step before it is decided how to run it, from shapes and from what the layers' segments declare
(models/layers/segment.py).
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxtune.models import initial
from jaxtune.models.components import stored_as
from jaxtune.models.config import DecoderConfig
from jaxtune.models.decoder import Decoder, abstract_decoder
from jaxtune.models.layers.block import LAYER_OUTPUT, Block
from jaxtune.models.layers.segment import Segment
from jaxtune.models.layers.tiles import tiled_residuals
from jaxtune.models.placement import partition
from jaxtune.models.reward import with_head
from jaxtune.models.stack.residual_plan import residuals_of
from jaxtune.models.stack.stack_layers import keeps_low_rank
from jaxtune.models.vision.tower import Tower
from jaxtune.pallas.linear_cross_entropy import fills_up
from jaxtune.system import timing
from jaxtune.train.config import OptimConfig
from jaxtune.train.config.tower import with_trained_parts
from jaxtune.train.objectives.checkpoints import computing
from jaxtune.train.objectives.objective import RunNeeds
from jaxtune.train.objectives.teachers import teacher_shapes, with_teacher
from jaxtune.train.optimizer import optimizer_offload
from jaxtune.train.optimizer.optim import make_optimizer, weight_storage
from jaxtune.train.planning.exchange import exchange_of, sync_bytes
from jaxtune.train.planning.layer_costs import (
    LayerKind,
    Work,
    experts_adapters,
    kind_of,
    low_rank_bytes,
    masked_sizes,
    nbytes,
)
from jaxtune.train.planning.movables import MOVABLES
from jaxtune.train.planning.movables.movable import Movable
from jaxtune.train.planning.parts import (
    FROZEN,
    PICTURES,
    STATES,
    TEACHER,
    Divided,
    Head,
    Layers,
    Moved,
    SegmentCost,
    Shape,
    StepParts,
    Update,
)
from jaxtune.train.planning.parts import Tower as TowerParts
from jaxtune.train.planning.step_spec import ModelSpec, StepSpec
from jaxtune.train.planning.sums_memory import NO_SUMS, sums_memory
from jaxtune.train.program.gradient_sync import GradientSync, gradient_sync_of

_BLOCKED_STATES = {"adamw_8bit": 2 + 8 / 256, "lion_8bit": 1 + 4 / 256}  # bytes for an element
# For an element: the direction, the momentum with Nesterov's, an iteration's sum in float32, and two bfloat16 copies.
_MUON_BYTES = 3 * 4.0 + 2 * 2.0


@dataclasses.dataclass(frozen=True)
class StepCost(StepParts):
    """The parts of a step, and what of them a plan may move."""

    movables: Mapping[str, Movable] = dataclasses.field(default_factory=dict)  # {word: movable}, as MOVABLES
    limits: Mapping[str, tuple[int, float]] = dataclasses.field(default_factory=dict)  # {word: (least, most) level}

    def limited(self, limits: Mapping[str, tuple[int, float]]) -> StepCost:
        return dataclasses.replace(self, limits={**self.limits, **limits})

    def without_last_resorts(self) -> StepCost:
        """Of plans with all weights on the device."""
        return self.limited({word: (0, 0) for word, movable in self.movables.items() if movable.last_resort})

    def may(self, word: str, level: int) -> bool:
        """Whether a plan may have this much of a movable moved."""
        least, most = self.limits.get(word, (0, math.inf))
        return least <= level <= most and (level == 0 or self.movables[word].able)

    def placed(self, levels: Mapping[str, int]) -> StepCost:
        """The costs with each movable as far moved as `levels` say."""
        costs = self
        for word, movable in self.movables.items():
            costs = movable.at(costs, levels.get(word, 0))
        return costs


@timing.during("plan", "costs", "planning: costs of a step")
def step_cost(model: Decoder, spec: StepSpec) -> StepCost:
    """The costs of a step of `model`, which may be abstract."""
    optim, precision, adapts, needs = spec.optim, spec.model.precision, spec.model.adapts, spec.needs
    shape, dtype = model.config, jnp.dtype(precision.dtype)
    _, trainable, frozen = nnx.split(model, nnx.Param, ...)
    masters = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), trainable)
    states = jax.eval_shape((spec.optimizer or _configured_optimizer(optim)).init, masters)
    storage = weight_storage(optim.weights, precision.computes_in, sum(a.size for a in jax.tree.leaves(masters)))
    stored, on_host = _stored(masters, storage), float(optim.offload * optimizer_offload.hosted_bytes(states))
    divided = spec.mesh_shape
    weight_shards, trained_bytes, sync = divided.shard_count, nbytes(masters), gradient_sync_of(spec.mesh)
    # Of one device; a teacher trains none.
    share = partition.bytes_per_device(masters, weight_shards) / max(trained_bytes, 1.0)
    sync_errors, sync_update = sync_bytes(masters, sync, divided)
    layers = dataclasses.replace(
        _layers(model.layers, shape, spec.length, dtype, storage, spec.attended),
        given_bytes=_given_bytes(model, dtype),
        dropout_bytes=max(masked_sizes(model), default=0) * (1.0 + dtype.itemsize),
    )
    tower, pictures, held_out, held_out_bytes = None, 0.0, None, 0.0
    if model.vision is not None:
        of_tower = shape, dtype, storage, [tree.get("vision", {}) for tree in (stored, frozen)]
        tower = _tower(model.vision, spec, *of_tower) if spec.patches else None
        pictures = _picture_bytes(model.vision, spec)
        if spec.held_out_patches:
            of_held_out = dataclasses.replace(spec, patches=spec.held_out_patches)
            held_out = _tower(model.vision, of_held_out, *of_tower)
            held_out_bytes = _picture_bytes(model.vision, of_held_out)
    fixed = {
        **_frozen_parts(frozen, weight_shards),
        **({PICTURES: pictures} if pictures else {}),
        **({"the model as it was given": nbytes(trainable)} if spec.keeps_model else {}),
        f"trainable parameters ({storage})": share * nbytes(stored),
        STATES: share * nbytes(states) - on_host,
        "gradient sums": share * nbytes(masters if spec.micro_batches != 1 else stored),
        **sync_errors,
    }
    return StepCost(
        shape=Shape(
            rows=spec.rows,
            length=spec.length,
            document=spec.attended,
            devices=divided.size,
            num_layers=len(model.layers),
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            dtype=dtype,
        ),
        layers=dataclasses.replace(
            layers, given_bytes=layers.given_bytes + (tower.kept * spec.patches / spec.length if tower else 0.0)
        ),
        head=_head(model, dtype, storage),
        update=Update(
            trained=trained_bytes / 4,
            trained_here=share * trained_bytes / 4,
            bytes=share * _update_bytes(masters, optim, spec.max_grad_norm, adapts),
            sync_bytes=sync_update,
            less_sums=0.0 if spec.micro_batches == 1 else share * float(nbytes(masters) - nbytes(stored)),
            sums=NO_SUMS if adapts or divided.size > 1 else sums_memory(model, stored),
            hosted_bytes=on_host,
        ),
        divided=_divided(model, stored, frozen, storage, divided, spec.keeps_model, sync),
        fixed=fixed,
        moved=Moved(pinned_bytes=on_host, batch_bytes=pictures),
        tower=tower,
        held_out=held_out,
        held_out_bytes=held_out_bytes,
        reference_runs=needs.reference_runs,
        teacher=None
        if model.teacher is None
        else step_cost(model.teacher, dataclasses.replace(spec.forward, needs=RunNeeds(needs.sampler))),
        movables={word: movable.of(model, states, spec) for word, movable in MOVABLES.items()},
    )


def _layers(
    layers: Sequence[Block],
    shape: DecoderConfig,
    length: int,
    dtype: jnp.dtype,
    storage: str,
    document: float | None = None,
    seen: float | None = None,
) -> Layers:
    """storage: "fp32" or "bf16". document, seen: as of `kind_of`."""
    all_residuals = residuals_of(layers)
    of_all = shape, length, dtype, document, seen
    kinds = [kind_of(layer, spec, *of_all) for layer, spec in zip(layers, shape.layers, strict=True)]
    segments = [segment for kind in kinds for segment in kind.block.segments()]
    return Layers(
        all_residuals=all_residuals,
        residuals={r.name: _mean([kind.residuals.get(r.name, 0.0) for kind in kinds]) for r in all_residuals},
        padding={r.name: _mean([kind.padding.get(r.name, 0.0) for kind in kinds]) for r in all_residuals},
        segments=_segment_costs(kinds, dtype),
        kinds=tuple({id(kind): kind for kind in kinds}.values()),
        kind_counts=tuple(collections.Counter(map(id, kinds)).values()),
        cast_bytes=0.0 if storage == "bf16" else sum(_trained_matrix_bytes(layer, dtype) for layer in layers),
        tiled=tuple(dict.fromkeys(name for kind in kinds for name in tiled_residuals(kind.block.segments()))),
        shared=experts_adapters(layers, dtype),
        has_experts=any(segment.experts_per_token for segment in segments),
    )


def _tower(
    tower: Tower, spec: StepSpec, text: DecoderConfig, dtype: jnp.dtype, storage: str, weights: Sequence[Mapping]
) -> TowerParts:
    """As if a picture filled each row. weights: nnx.States of the tower's trained and frozen ones."""
    config, patches, trains, shards = tower.config.blocks, spec.patches, tower.trains, spec.mesh_shape.shard_count
    hidden = float(config.hidden_size * dtype.itemsize)
    step_costs = StepParts(
        shape=Shape(
            rows=spec.rows,
            length=patches,
            document=float(patches),
            devices=spec.mesh_shape.size,
            num_layers=len(tower.layers),
            hidden_size=config.hidden_size,
            vocab_size=1,
            dtype=dtype,
        ),
        layers=_layers(tower.layers, config, patches, dtype, storage, seen=float(patches)),
        head=Head(0.0, 0.0, 0.0, False, dtype),
        update=Update(0.0, 0.0),
        divided=Divided(
            layer_bytes=_whole_layer_bytes(weights, len(tower.layers), shards),
            gradient_bytes=0.0 if shards == 1 else _whole_gradient_bytes(tower.layers, storage),
        ),
        fixed={},
    )
    merger = tower.linears(layers=False)
    flops = sum(2.0 * math.prod(linear.sizes) for _, linear in merger) / tower.config.merge_size**2
    # Of a tower that trains: each layer's input, a rotary table, and the merger's input, normed, and before and after
    # its activation.
    of_merger = 4 * hidden if trains else 0.0
    rotary = 4.0 * config.head_dim * any(layer.rotary is not None for layer in config.layers)
    kept_bytes = (len(tower.layers) * hidden + rotary) * trains + of_merger
    if not trains and spec.needs.reference_runs:  # its features serve the reference, too
        kept_bytes = len(tower.mergers) * tower.config.out_size * dtype.itemsize / tower.config.merge_size**2
    kinds = tower.config.both_ways
    both_ways = sum(kinds == "all" or (kinds == "windows" and layer.window is not None) for layer in text.layers)
    return TowerParts(step_costs, trains, flops, kept_bytes, of_merger, both_ways)


def _picture_bytes(tower: Tower, spec: StepSpec) -> float:
    """Of the arrays of two steps' pictures on one device: those of the next one come while a step runs."""
    if not spec.patches:
        return 0.0
    of_patch, rows = 4.0 * (tower.config.patch_numbers + 5), spec.rows / spec.mesh_shape.size
    return 2 * rows * (spec.patches * of_patch + 4.0 * spec.length)


def _divided(
    model: Decoder,
    stored: nnx.State,
    frozen: nnx.State,
    storage: str,
    mesh: partition.MeshShape,
    keeps_model: bool,
    sync: GradientSync | None,
) -> Divided:
    """storage: "fp32" or "bf16". stored: the trained weights in their stored dtypes."""
    shards = mesh.shard_count
    frozen_layers = [partition.divided_sizes(layer, shards)[0] for layer in frozen.get("layers", {}).values()]
    # The divided weights stay beside the gathered ones if they are kept.
    added_share = 1.0 if keeps_model else 1 - 1 / shards
    return Divided(
        layer_bytes=_whole_layer_bytes((stored, frozen), len(model.layers), shards),
        head_bytes=partition.divided_sizes(nnx.State({"head": model.head_variable}), shards)[0],
        gradient_bytes=0.0 if shards == 1 else _whole_gradient_bytes(model.layers, storage),
        frozen_layer_bytes=max(frozen_layers, default=0.0),
        resident_layer_bytes=added_share * max(frozen_layers, default=0.0),
        resident_around_bytes=added_share * (partition.divided_sizes(frozen, shards)[0] - sum(frozen_layers)),
        exchange=exchange_of(stored, frozen, mesh, sync),
    )


def _update_bytes(masters, optim: OptimConfig, max_grad_norm: float | None, adapts: bool) -> float:
    """Device bytes of the update beside weights, states and gradients: the largest tensor's; 0 with an adapter."""
    if adapts:
        return 0.0
    size, name = max((leaf.size for leaf in jax.tree.leaves(masters)), default=0), optim.name
    if name in _BLOCKED_STATES:
        # The direction, for Lion the momentum before it is encoded, and if the update is computed twice (step.py), the
        # first states. With states on the host: one tensor's states, and half of the next one's.
        direction = 4.0 if name == "adamw_8bit" else 8.0
        twice = max_grad_norm is None and name == "adamw_8bit"
        extra_states = 1.5 if optim.offload else 1.0 if twice else 0.0
        return size * (direction + extra_states * _BLOCKED_STATES[name])
    if name == "muon":
        return size * _MUON_BYTES
    # Moments before and after the update, with the gaps that the compiler leaves between large buffers.
    return size * (24.0 if name == "adamw" else 12.0) if optim.offload else 0.0


def _stored(masters, storage: str):
    """Shapes of trained weights in their stored dtypes; storage "bf16": of two and more dimensions."""
    return jax.tree.map(
        lambda a: a.update(dtype=jnp.dtype(jnp.bfloat16)) if storage == "bf16" and a.ndim >= 2 else a, masters
    )


def _configured_optimizer(optim: OptimConfig) -> optax.GradientTransformation:
    return make_optimizer(optim, optax.constant_schedule(optim.learning_rate))  # no state depends on the schedule


def _head(model: Decoder, dtype, storage: str) -> Head:
    """Not less if weights are divided. storage: "fp32" or "bf16"."""
    head, dtype = model.head_variable, jnp.dtype(model.head_compute or dtype)
    trains, size = isinstance(head, nnx.Param), math.prod(head.shape)
    loss = 8.0 if storage == "bf16" else 4.0 + (dtype.itemsize if dtype.itemsize < 4 else 0)
    copy = 0.0 if trains and storage != "bf16" else 2.0 * fills_up(model.config.vocab_size, dtype)
    gradient = size * (4.0 if storage == "bf16" else loss) if trains else 0.0
    logit_bytes = 8.0 if model.config.final_soft_cap is not None else 4.0 + dtype.itemsize
    return Head(size * (loss * trains + copy), logit_bytes, gradient, trains, dtype)


def _whole_layer_bytes(trees, layers: int, weight_shards: int) -> float:
    """Gathered bytes of the largest layer's divided weights. trees: nnx.States of trained and frozen weights."""
    by_layer = [[tree["layers"][i] for tree in trees if i in tree.get("layers", {})] for i in range(layers)]
    sizes = (sum(partition.divided_sizes(tree, weight_shards)[0] for tree in layer) for layer in by_layer)
    return max(sizes, default=0.0)


def _frozen_parts(frozen: nnx.State, weight_shards: int) -> dict[str, float]:
    """Device bytes of the model's and of a teacher's frozen weights, divided over `weight_shards` devices."""
    every = partition.bytes_per_device(frozen, weight_shards)
    of_teacher = partition.bytes_per_device(frozen.get("teacher", {}), weight_shards)
    return {FROZEN: every - of_teacher, **({TEACHER: of_teacher} if of_teacher else {})}


def _whole_gradient_bytes(layers: Sequence[Block], storage: str) -> float:
    """Bytes of the largest layer's matrix gradients, as computed and as summed in float32, neither divided."""
    matrices = ([matrix.weight for *_, matrix in layer.matrices()] for layer in layers)
    sizes = (sum(math.prod(w.shape) for w in weights if isinstance(w, nnx.Param)) for weights in matrices)
    return max(sizes, default=0) * (6.0 if storage == "bf16" else 8.0)


def _given_bytes(model: Decoder, dtype) -> float:
    """Bytes per token of values that layers read and do not compute: the decoder's thrice, an earlier layer's twice."""
    from_decoder, from_layers, provided_names = 0, dict[str, int](), set[str]()
    for layer in model.layers:
        for name, shape in layer.takes.items():
            if name in provided_names:
                from_layers[name] = math.prod(shape)
            else:
                from_decoder += math.prod(shape)
        provided_names |= set(layer.gives.values())
    return float(dtype.itemsize * (3 * from_decoder + 2 * sum(from_layers.values())))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _segment_costs(kinds: list[LayerKind], dtype) -> tuple[SegmentCost, ...]:
    """One SegmentCost for each (name, outputs) of a segment in any layer; layers without it count as zero work."""
    segments: dict[tuple, tuple[Segment, bool, bool]] = {}
    kind_segments: dict[int, set[tuple]] = {}
    for kind in {id(kind): kind for kind in kinds}.values():
        kind_segments[id(kind)] = {(segment.name, segment.outputs) for segment in kind.block.segments()}
        for segment in kind.block.segments():
            in_mixer = any(segment.outputs in outputs for outputs in kind.mixer_outputs.values())
            first = any(segment.outputs == outputs[0] for outputs in kind.mixer_outputs.values())
            segments.setdefault((segment.name, segment.outputs), (segment, in_mixer, first))
    costs = []
    for (name, outputs), (segment, in_mixer, first) in segments.items():
        of_layers = [
            kind.work.get(name, Work()) if (name, outputs) in kind_segments[id(kind)] else Work() for kind in kinds
        ]
        work = Work(*(_mean(list(column)) for column in zip(*map(dataclasses.astuple, of_layers))))
        flags = (segment.separable, segment.tokenwise, segment.decodes_once, segment.derivative_bytes is not None)
        low_rank = _mean([low_rank_bytes(kind.block, (name, outputs), dtype) for kind in kinds])
        where = in_mixer, first, LAYER_OUTPUT in outputs
        costs.append(SegmentCost(name, outputs, work, *where, *flags, low_rank, keeps_low_rank(segment)))
    return tuple(costs)


@timing.during("plan", "shapes", "planning: shapes of the model")
def abstract_model(shape: DecoderConfig, spec: ModelSpec) -> Decoder:
    """The model as shapes. Reads the config.json of a teacher."""
    base, precision = spec.base, spec.precision

    model = abstract_decoder(shape, precision.dtype, spec.tower)
    with initial.as_shapes():
        if base.load_in is not None or precision.components:
            model = stored_as(model, precision.components, base.load_in)
        model = computing(base, model)
        model = with_trained_parts(with_head(model, spec.head), base, spec.adapter, spec.seed)
    return with_teacher(model, teacher_shapes(spec.objective, precision.dtype, spec.tower is not None))


def _trained_matrix_bytes(layer: Block, dtype) -> float:
    """Bytes of a layer's compute-dtype copies of matrices that are trained whole."""
    cast = (matrix.weight for *_, matrix in layer.matrices() if matrix.compute != "float32")
    trained = [weight for weight in cast if isinstance(weight, nnx.Param)]
    return 0.0 if dtype.itemsize >= 4 else sum(math.prod(w.shape) for w in trained) * float(dtype.itemsize)
