"""Costs of a training step before it is decided how to run it: bytes and work, from shapes and from what the layers'
segments declare (models/layers/segment.py).
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxtune.models.components import stored_as
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.quant import compute_in_fp8
from jaxtune.models.fitted import FLOAT32_HEAD_TIME
from jaxtune.models.layers.block import LAYER_OUTPUT, Block
from jaxtune.models.layers.segment import Residual, Segment
from jaxtune.models.layers.tiles import tiled_residuals
from jaxtune.models.lora import get_peft_model
from jaxtune.models.placement import partition
from jaxtune.models.reward import with_head
from jaxtune.models.stack.residual_plan import residuals_of
from jaxtune.models.stack.stack_layers import keeps_low_rank
from jaxtune.pallas.linear_cross_entropy import fills_up
from jaxtune.train.config import MeshConfig, TrainConfig
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.objectives.objective import RunNeeds
from jaxtune.train.optimizer import optimizer_offload
from jaxtune.train.optimizer.optim import make_optimizer, weight_storage
from jaxtune.train.optimizer.schedule import learning_rate_schedule
from jaxtune.train.planning.devices import Device, float32_time
from jaxtune.train.planning.exchange import NO_EXCHANGE, Exchange, exchange_of, sync_bytes
from jaxtune.train.planning.host_states import NO_STATES, States, states_of, update_bytes
from jaxtune.train.planning.host_table import NO_TABLE, Table, table_of
from jaxtune.train.planning.kept_codes import codes_bytes
from jaxtune.train.planning.layer_costs import (
    LayerKind,
    Work,
    experts_adapters,
    kind_of,
    low_rank_bytes,
    masked_sizes,
    nbytes,
)
from jaxtune.train.planning.plan import StepPlan
from jaxtune.train.planning.sums_memory import NO_SUMS, SumsMemory, sums_memory
from jaxtune.train.program.gradient_sync import gradient_sync_of
from jaxtune.train.references.teachers import teacher_shapes, with_teacher

# Names of bytes in StepCost.fixed.
TEACHER = "teacher's weights"
TABLE_ROWS = "rows of embeddings on the host"
TRANSPOSED_CODES = "transposed codes of FP8 weights"


@dataclasses.dataclass(frozen=True)
class SegmentCost:
    """Cost of one segment, a function of a layer's computation such as the q, k and v products."""

    name: str  # the segment's name
    outputs: tuple[str, ...]  # names of the residuals that it makes, and LAYER_OUTPUT if it makes the layer's output
    work: Work  # FLOPs and bytes; layers without the segment count as zero in the mean
    in_mixer: bool  # whether it belongs to a mixer, such as attention; False: to a feed-forward
    first: bool  # whether it is the first segment of a mixer
    ends: bool  # whether it makes the layer's output
    separable: bool  # whether each of its outputs can be computed without the others; False: only all at once
    tokenwise: bool  # whether it may run over tiles of a row's tokens; False: it needs whole rows
    # if it is run again in the backward: whether the weights that it decodes also serve its gradients, or (False) the
    # gradients decode them once more
    decodes_once: bool
    # True: its backward always runs its forward once more, which also recomputes its outputs; False: it does not
    runs_again: bool = False
    low_rank: float = 0.0  # bytes per token of its low-rank inputs
    low_rank_with: tuple[str, ...] = ()  # the residuals of which none may be recomputed if these are kept


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Bytes and work of a step on one of `devices` that share the rows, under any plan."""

    rows: int  # of the step, on all devices
    length: int  # tokens of a row
    devices: int  # the number of devices of the run's mesh
    num_layers: int  # of the model, as are the next two
    hidden_size: int
    vocab_size: int
    dtype: jnp.dtype  # the compute dtype
    all_residuals: tuple[Residual, ...]  # the residuals of all layers, each name once: what a plan can place
    residuals: Mapping[str, float]  # {residual: bytes per token}, the mean over all layers
    padding: Mapping[str, float]  # {residual: bytes that do not depend on the tokens}, the mean over all layers
    # the pieces of the layers' computation between residuals; their work is the mean over all layers
    segments: tuple[SegmentCost, ...]
    kinds: tuple[LayerKind, ...]  # the different layers of the model
    kind_counts: tuple[int, ...]  # the number of layers of each kind
    fixed: Mapping[str, float]  # {what: bytes} that are in memory during the whole step
    cast_bytes: float  # the layers' trained matrices in the compute dtype, which live from forward to backward
    head_bytes: float  # at the loss: gradient and compute-dtype copies of a trained head, and a head padded by the loss
    # at the loss: of a logit, while its chunk exists: in float32, and its gradient in head_dtype or, capped, in float32
    logit_bytes: float
    # after the loss: gradient of a trained head, and the copy in 16 bits of one that is stored in float32
    head_gradient_bytes: float
    head_trains: bool  # whether the output head trains; False: it has no gradient
    head_dtype: jnp.dtype  # the dtype in which the head multiplies: the compute dtype, or its own by a precision map
    trained: float  # number of trained parameters
    trained_here: float  # those that this device updates
    has_experts: bool = False  # whether any layer has a mixture of experts
    # residuals of which only one tile exists at a time if tokenwise segments run over tiles of tokens
    tiled: tuple[str, ...] = ()
    hosted_bytes: float = 0.0  # optimizer states of this device in host memory
    update_bytes: float = 0.0  # taken by the update in addition to `fixed`
    sync_bytes: float = 0.0  # taken by the update for a quantised sync of gradients
    # the part of `fixed` that a step of one micro-batch does not need: its gradient sums are not in float32 but in the
    # dtype in which the trained weights are stored. 0 if the config sets one micro-batch: `fixed` is then without it.
    less_sums: float = 0.0
    reference_runs: int = 0  # forward passes of a frozen model in each micro-batch
    teacher: StepCost | None = None  # of the forward passes of the teacher, if the frozen model is one
    exchange: Exchange = NO_EXCHANGE  # bytes that this device receives from other devices
    # experts' adapters in the kernels' layout, if every residual is kept: XLA copies them once for forward and backward
    shared: float = 0.0
    given_bytes: float = 0.0  # per token: values that layers take from outside, with their gradients
    dropout_bytes: float = 0.0  # per token: the largest adapter input with dropout, masked, and its mask
    whole_layer_bytes: float = 0.0  # weights of the largest layer that are divided over devices, gathered
    whole_head_bytes: float = 0.0  # weights of the head that are divided over devices, gathered
    whole_gradient_bytes: float = 0.0  # gradients of a layer's trained matrices, computed and summed; 0 if undivided
    frozen_layer_bytes: float = 0.0  # the part of `whole_layer_bytes` that does not train
    resident_layer_bytes: float = 0.0  # added by each layer whose frozen weights are whole for the whole run
    resident_around_bytes: float = 0.0  # added by frozen embedding and head that are whole for the whole run
    table: Table = NO_TABLE  # the model's tables of embeddings that a plan may have on the host
    table_on_host: bool = False  # whether `fixed` is that of a plan with these tables on the host
    sums: SumsMemory = NO_SUMS  # the memory of gradient sums in which other values lie before
    states: States = NO_STATES  # the optimizer's states that a plan may have on the host
    states_on_host: bool = False  # whether `fixed` is that of a plan with these states on the host
    codes_bytes: float = 0.0  # of the transposed codes of frozen FP8 weights that a plan may keep; 0: there are none
    transposed_codes: bool = False  # whether `fixed` is that of a plan that keeps them

    @property
    def places(self) -> tuple[bool, bool, bool]:
        return self.table_on_host, self.states_on_host, self.transposed_codes

    def placed(self, plan: StepPlan) -> StepCost:
        """The costs with tables, optimizer states and transposed codes where `plan` has them."""
        placed = self.with_table(plan.table_on_host).with_states(plan.states_on_host)
        if plan.transposed_codes == placed.transposed_codes:
            return placed
        assert plan.transposed_codes and self.codes_bytes
        fixed = {**placed.fixed, TRANSPOSED_CODES: self.codes_bytes}
        return dataclasses.replace(placed, fixed=fixed, transposed_codes=True)

    def with_states(self, on_host: bool) -> StepCost:
        """The costs with the optimizer's states on the host. They free device memory until the update, which has them
        all there.
        """
        if on_host == self.states_on_host:
            return self
        assert on_host and self.states.bytes
        size = self.states.bytes
        fixed = {**self.fixed, "optimizer states": self.fixed["optimizer states"] - size}
        return dataclasses.replace(self, fixed=fixed, hosted_bytes=size, update_bytes=size, states_on_host=True)

    def with_table(self, on_host: bool) -> StepCost:
        """The costs with the tables of embeddings on the host. The device has the rows of two steps instead: this
        step's and the next one's, copied meanwhile.
        """
        if on_host == self.table_on_host:
            return self
        assert on_host and self.table.bytes
        rows = 2 * self.rows * self.length / self.devices * self.table.row_bytes
        fixed = {**self.fixed, "frozen weights": self.fixed["frozen weights"] - self.table.bytes, TABLE_ROWS: rows}
        return dataclasses.replace(self, fixed=fixed, table_on_host=True)

    def head_time(self, device: Device) -> float:
        """How many times as long a product with the head takes as one in the compute dtype; above 1 for a float32 head
        beside 16 bits.
        """
        if self.head_dtype != jnp.float32 or self.dtype.itemsize == 4:
            return 1.0
        return FLOAT32_HEAD_TIME.of("xla", device.name) if device.hopper else float32_time(device.name)

    def head_parts_bytes(self, device: Device) -> tuple[float, float]:
        """(bytes, bytes per logit of a chunk) of the parts into which XLA divides operands of a float32 head on Hopper
        (linear_cross_entropy's `precision_of`); else 0.
        """
        if self.head_dtype != jnp.float32 or not device.hopper:
            return 0.0, 0.0
        return 8.0 * self.vocab_size * self.hidden_size, 4.0

    @property
    def table_rows_bytes(self) -> float:
        """Device bytes of two steps' rows of the tables on the host; 0 with the tables on the device."""
        return self.fixed.get(TABLE_ROWS, 0.0)

    @property
    def frozen_bytes(self) -> float:
        """Device bytes of frozen weights, a teacher's included, without tables on the host and without
        `resident_bytes`.
        """
        return self.fixed["frozen weights"] + self.fixed.get(TEACHER, 0.0)

    def fixed_bytes(self, micro_batches: int, resident: int = 0) -> float:
        """Device bytes in memory during the whole step. With one micro-batch gradient sums have the stored dtype of the
        weights, not float32. resident: layers whose frozen weights are whole on each device.
        """
        sums_saving = self.less_sums if micro_batches == 1 else 0.0
        return sum(self.fixed.values()) + self.resident_bytes(resident) - sums_saving

    def resident_bytes(self, resident: int) -> float:
        """Device bytes added if the frozen weights of `resident` layers stay whole for the run, each as large as the
        largest; with all layers, embedding's and head's, too. The whole weights replace the device's share, unless the
        given model stays in memory.
        """
        embedding_and_head = self.resident_around_bytes if resident == self.num_layers else 0.0
        return resident * self.resident_layer_bytes + embedding_and_head

    def residual_bytes(self, name: str, tokens: float) -> float:
        """Bytes of a residual of the mean layer."""
        return self.residuals[name] * tokens + self.padding[name]


def step_cost(
    model: Decoder,
    config: TrainConfig,
    length: int | None = None,
    keeps_model: bool = False,
    optimizer: optax.GradientTransformation | None = None,
    needs: RunNeeds | None = None,
) -> StepCost:
    """The costs of a step of `model`, which may be abstract.

    length: tokens of a row; None: data.length.
    keeps_model: whether `model` stays in memory beside the copies that train.
    optimizer: only its states count; None: config.optim's.
    needs: None: those of config.objective.
    """
    needs = needs or RunNeeds.of(objective_of(config))
    length, shape, dtype = length or config.data.length, model.config, jnp.dtype(config.dtype)
    _, trainable, frozen = nnx.split(model, nnx.Param, ...)
    masters = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), trainable)
    states = jax.eval_shape((optimizer or _configured_optimizer(config)).init, masters)
    storage = weight_storage(config.optim.weights, config.computes_in, sum(a.size for a in jax.tree.leaves(masters)))
    stored, on_host = _stored(masters, storage), float(config.optim.offload * optimizer_offload.hosted_bytes(states))
    divided = partition.mesh_shape(*(config.mesh or MeshConfig()).sizes)
    weight_shards, all_residuals, trained_bytes = divided.shard_count, residuals_of(model.layers), nbytes(masters)
    # Of one device; a teacher trains none.
    share = partition.bytes_per_device(masters, weight_shards) / max(trained_bytes, 1.0)
    fixed = {
        **_frozen_parts(frozen, weight_shards),
        **({"the model as it was given": nbytes(trainable)} if keeps_model else {}),
        f"trainable parameters ({storage})": share * nbytes(stored),
        "optimizer states": share * nbytes(states) - on_host,
        "gradient sums": share * nbytes(masters if config.micro_batches != 1 else stored),
        **sync_bytes(masters, config, divided)[0],
    }
    kinds = [kind_of(layer, spec, shape, length, dtype) for layer, spec in zip(model.layers, shape.layers, strict=True)]
    residuals = {r.name: _mean([kind.residuals.get(r.name, 0.0) for kind in kinds]) for r in all_residuals}
    padding = {r.name: _mean([kind.padding.get(r.name, 0.0) for kind in kinds]) for r in all_residuals}
    frozen_layers = [partition.divided_sizes(layer, weight_shards)[0] for layer in frozen.get("layers", {}).values()]
    # The divided weights stay beside the gathered ones if they are kept.
    added_share = 1.0 if keeps_model else 1 - 1 / weight_shards
    head_bytes, head_gradient_bytes, head_dtype = _head_costs(model, dtype, storage)
    return StepCost(
        rows=config.rows_per_step,
        length=length,
        devices=divided.size,
        num_layers=len(kinds),
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        dtype=dtype,
        all_residuals=all_residuals,
        residuals=residuals,
        padding=padding,
        segments=_segment_costs(kinds, dtype),
        kinds=tuple({id(kind): kind for kind in kinds}.values()),
        kind_counts=tuple(collections.Counter(map(id, kinds)).values()),
        fixed=fixed,
        cast_bytes=0.0 if storage == "bf16" else sum(_trained_matrix_bytes(layer, dtype) for layer in model.layers),
        head_bytes=head_bytes,
        logit_bytes=8.0 if shape.final_soft_cap is not None else 4.0 + head_dtype.itemsize,
        head_gradient_bytes=head_gradient_bytes,
        head_trains=isinstance(model.head_variable, nnx.Param),
        head_dtype=head_dtype,
        trained=trained_bytes / 4,
        trained_here=share * trained_bytes / 4,
        has_experts=any(s.experts_per_token for kind in kinds for s in kind.block.segments()),
        tiled=tuple(dict.fromkeys(name for kind in kinds for name in tiled_residuals(kind.block.segments()))),
        hosted_bytes=on_host,
        update_bytes=share * update_bytes(masters, config),
        reference_runs=needs.reference_runs,
        teacher=None
        if model.teacher is None
        else step_cost(model.teacher, config, length, optimizer=optax.identity(), needs=RunNeeds(needs.sampler)),
        less_sums=0.0 if config.micro_batches == 1 else share * float(nbytes(masters) - nbytes(stored)),
        shared=experts_adapters(model.layers, dtype),
        given_bytes=_given_bytes(model, dtype),
        dropout_bytes=max(masked_sizes(model), default=0) * (1.0 + dtype.itemsize),
        sync_bytes=sync_bytes(masters, config, divided)[1],
        exchange=exchange_of(stored, frozen, divided, gradient_sync_of(config.mesh)),
        whole_layer_bytes=_whole_layer_bytes((stored, frozen), len(kinds), weight_shards),
        whole_head_bytes=partition.divided_sizes(nnx.State({"head": model.head_variable}), weight_shards)[0],
        frozen_layer_bytes=max(frozen_layers, default=0.0),
        resident_layer_bytes=added_share * max(frozen_layers, default=0.0),
        resident_around_bytes=added_share * (partition.divided_sizes(frozen, weight_shards)[0] - sum(frozen_layers)),
        whole_gradient_bytes=0.0 if weight_shards == 1 else _whole_gradient_bytes(model, storage),
        table=table_of(model, config, weight_shards, needs.samples),
        codes_bytes=codes_bytes(model, config, weight_shards, needs.samples),
        sums=sums_memory(model, stored, config, divided.size),
        states=NO_STATES if optimizer is not None or divided.size > 1 else states_of(states, config),
    )


def _stored(masters, storage: str):
    """Shapes of trained weights in their stored dtypes: float32 ("fp32"), or bfloat16 for two and more dimensions
    ("bf16").
    """
    return jax.tree.map(
        lambda a: a.update(dtype=jnp.dtype(jnp.bfloat16)) if storage == "bf16" and a.ndim >= 2 else a, masters
    )


def _configured_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    schedule = learning_rate_schedule(config.schedule, config.optim.learning_rate, config.steps or 1000)
    return make_optimizer(config.optim, schedule)


def _head_costs(model: Decoder, dtype, storage: str) -> tuple[float, float, jnp.dtype]:
    """(bytes beside the head's weight at the loss; after it, bytes of the gradient and, with "fp32", of the 16-bit
    copy; the head's dtype). Not less if weights are divided. storage: "fp32" or "bf16".
    """
    head, dtype = model.head_variable, jnp.dtype(model.head_compute or dtype)
    trains, size = isinstance(head, nnx.Param), math.prod(head.shape)
    loss = 8.0 if storage == "bf16" else 4.0 + (dtype.itemsize if dtype.itemsize < 4 else 0)
    copy = 0.0 if trains and storage != "bf16" else 2.0 * fills_up(model.config.vocab_size, dtype)
    gradient = size * (4.0 if storage == "bf16" else loss) if trains else 0.0
    return size * (loss * trains + copy), gradient, dtype


def _whole_layer_bytes(trees, layers: int, weight_shards: int) -> float:
    """Gathered bytes of the largest layer's divided weights. trees: nnx.States of trained and frozen weights."""
    by_layer = [[tree["layers"][i] for tree in trees if i in tree.get("layers", {})] for i in range(layers)]
    return max(sum(partition.divided_sizes(tree, weight_shards)[0] for tree in layer) for layer in by_layer)


def _frozen_parts(frozen: nnx.State, weight_shards: int) -> dict[str, float]:
    """Device bytes of the model's and of a teacher's frozen weights, divided over `weight_shards` devices."""
    every = partition.bytes_per_device(frozen, weight_shards)
    of_teacher = partition.bytes_per_device(frozen.get("teacher", {}), weight_shards)
    return {"frozen weights": every - of_teacher, **({TEACHER: of_teacher} if of_teacher else {})}


def _whole_gradient_bytes(model: Decoder, storage: str) -> float:
    """Bytes of the largest layer's matrix gradients, as computed and as summed in float32, neither divided."""
    layers = ([matrix.weight for *_, matrix in layer.matrices()] for layer in model.layers)
    sizes = (sum(math.prod(w.shape) for w in weights if isinstance(w, nnx.Param)) for weights in layers)
    return max(sizes) * (6.0 if storage == "bf16" else 8.0)


def _given_bytes(model: Decoder, dtype) -> float:
    """Bytes per token of values that layers read and do not compute. The decoder's count three times (value, source,
    gradient), those of an earlier layer twice, however many layers read them.
    """
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
    """One SegmentCost for each (name, outputs) of a segment in any layer; layers without it count as zero work. kinds:
    of each layer.
    """
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


def abstract_model(shape, config: TrainConfig) -> Decoder:
    """The model that `config` asks for, as shapes. Reads the config.json of a teacher. shape: a DecoderConfig."""

    def make():
        model = Decoder(shape, jax.random.key(0), config.dtype)
        if config.model.load_in is not None or config.components:
            model = stored_as(model, config.components, config.model.load_in)
        if config.model.compute == "fp8":
            model = compute_in_fp8(model)
        model = with_head(model, objective_of(config).head)
        if config.adapter is not None:
            model = get_peft_model(model, **config.adapter.settings, seed=config.seed)
        return model

    return with_teacher(nnx.eval_shape(make), teacher_shapes(config.objective, config.dtype))


def _trained_matrix_bytes(layer: Block, dtype) -> float:
    """Bytes of a layer's compute-dtype copies of matrices that are trained whole; not of adapters, nor of float32
    matrices.
    """
    cast = (matrix.weight for *_, matrix in layer.matrices() if matrix.compute != "float32")
    trained = [weight for weight in cast if isinstance(weight, nnx.Param)]
    return 0.0 if dtype.itemsize >= 4 else sum(math.prod(w.shape) for w in trained) * float(dtype.itemsize)
