"""What a step consists of: bytes and work, read from the model's layers before it is decided how to run it.

A layer's residuals and its work are read from its shapes and from what its segments declare (models/layers/segment.py).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.files.quant import compute_in_fp8, quantize
from jaxtune.models.fitted import ALLOCATOR_BYTES, PRODUCT_TIME
from jaxtune.models.layers.block import LAYER_INPUT, LAYER_OUTPUT, Block
from jaxtune.models.layers.segment import Residual, Segment, Sizes, matrix_of, numbers_met
from jaxtune.models.layers.tiles import tiled_residuals
from jaxtune.models.lora import get_peft_model
from jaxtune.models.placement import partition
from jaxtune.models.residual_plan import residuals_of
from jaxtune.models.reward import reward_model
from jaxtune.models.rope import rotary_tables
from jaxtune.models.stack import layer_forward
from jaxtune.pallas import dispatch
from jaxtune.pallas.attention import PackedLayout, packed_layout
from jaxtune.pallas.formats import FP8, FourBit, Stored
from jaxtune.pallas.formats.fp8 import TILE
from jaxtune.pallas.grouped_matmul.layout import TILE_ROWS
from jaxtune.pallas.linear_cross_entropy import fills_up
from jaxtune.train.config import MeshConfig, TrainConfig
from jaxtune.train.optimizer import optimizer_offload
from jaxtune.train.optimizer.optim import make_optimizer, weight_storage
from jaxtune.train.optimizer.schedule import learning_rate_schedule

COMPUTE_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
_PROBE_TOKENS = 128
_ADAM8_STATES = 2 + 8 / 256  # bytes for an element


@dataclasses.dataclass(frozen=True)
class Work:
    """One segment's forward, for one token: FLOPs of products (of one in FP8, as many as take its time in 16 bits) and
    of attention, bytes moved by everything else.

    kernel_forward, kernel_backward: Segment.kernel_bytes. weight_flops: of the weights' own gradients. Once a pass,
    whatever the tokens: weight_bytes read, elements decoded, and empty_flops, products with the rows that fill up the
    experts' last tiles.
    """

    flops: float = 0.0
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    kernel_forward: float = 0.0
    kernel_backward: float = 0.0
    weight_flops: float = 0.0
    weight_bytes: float = 0.0
    decoded: float = 0.0
    empty_flops: float = 0.0


@dataclasses.dataclass(frozen=True)
class SegmentCost:
    """A segment of those layers that have it; its work is spread over all layers.

    in_mixer: it belongs to the mixer, first: as its first. ends: it makes the layer's output.
    separable, tokenwise, decodes_once: as in models/layers/segment.py. runs_again: its derivative runs it once more,
    which is also what makes its outputs again.
    """

    name: str
    outputs: tuple[str, ...]
    work: Work
    in_mixer: bool
    first: bool
    ends: bool
    separable: bool
    tokenwise: bool
    decodes_once: bool
    runs_again: bool = False


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """Layers that have the same residuals and the same work: bytes a token of each residual, bytes beside that whatever
    the tokens (empty rows of experts), and the work of each segment. block: one of them, its arrays abstract."""

    block: Block
    residuals: Mapping[str, float]
    padding: Mapping[str, float]
    work: Mapping[str, Work]

    def residual_bytes(self, name: str, tokens: float) -> float:
        return self.residuals[name] * tokens + self.padding[name]

    @functools.cached_property
    def mixer_outputs(self) -> tuple[tuple[str, ...], ...]:
        """What each of the mixer's segments makes."""
        return tuple(segment.outputs for segment in self.block.part_segments("mixer"))

    @functools.cached_property
    def held(self) -> tuple[tuple[tuple[str, ...], Callable[[Sizes], float]], ...]:
        """(what it makes, its held_bytes) of each of the mixer's segments that has them."""
        segments = self.block.part_segments("mixer")
        return tuple((s.outputs, s.held_bytes) for s in segments if s.held_bytes is not None)

    @functools.cached_property
    def feed_forward_outputs(self) -> tuple[str, ...]:
        return tuple(name for segment in self.block.part_segments("mlp") for name in segment.outputs)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Bytes that a device receives from the others of its mesh. weights: of all layers, for a forward, and again for a
    backward; gradients: of what trains of them and is divided, in a backward; around: both of embedding and head, under
    which nothing runs; sums: of what trains and is whole, once a step. frozen, frozen_around: of weights and of around,
    what does not train."""

    weights: float = 0.0
    gradients: float = 0.0
    around: float = 0.0
    sums: float = 0.0
    frozen: float = 0.0
    frozen_around: float = 0.0


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Bytes and work of a step, before it is decided how to run it; on one device of `devices` that share the rows.

    known: the residuals of all layers. residuals: {name: bytes a token} of a layer, the mean of all layers; padding:
    {name: bytes} beside that, whatever the tokens. segments: likewise, the mean of all layers. kinds: the different
    layers there are. tiled: residuals that exist for a tile only where layers run in tiles.
    trained: parameters; trained_here: those that a device updates.
    fixed: {part: bytes} of what is always there, less_sums of it only where micro-batches add up. cast_bytes: trained
    weights of the layers in the compute dtype, which live from forward to backward. head_bytes: of a trained head's
    gradient, and what lies beside it at the loss: the head in the compute dtype, or, of a bf16 head, a chunk's share in
    float32; and of the copy of a head that the loss fills up. head_gradient_bytes: later, of a trained one's alone.
    reference_runs: forward passes, in each micro-batch, of a model that does not train.
    shared_bytes: of experts' adapters as kernels take them, which XLA makes once for the forward and the backward where
    every residual is kept (the stack ties them to the backward elsewhere). dropout_bytes: for one token, the largest
    input of an adapter with dropout as it is masked, and its mask.
    whole_layer_bytes, whole_head_bytes: of the largest layer's and the head's weights that are divided over devices,
    whole. whole_gradient_bytes: of a layer's gradients that are, as they come and as they are added up.
    frozen_layer_bytes: of the largest layer's, what does not train. resident_layer_bytes, resident_around_bytes: what a
    device holds more where these, and where embedding and head, are whole on it all the time.
    hosted_bytes: of a device's optimizer states in host memory. update_bytes: what the update takes beside what is
    always there.
    """

    rows: int
    length: int
    devices: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: jnp.dtype
    known: tuple[Residual, ...]
    residuals: Mapping[str, float]
    padding: Mapping[str, float]
    segments: tuple[SegmentCost, ...]
    kinds: tuple[LayerKind, ...]
    fixed: Mapping[str, float]
    cast_bytes: float
    head_bytes: float
    head_gradient_bytes: float
    head_trains: bool
    trained: float
    trained_here: float
    has_experts: bool = False
    tiled: tuple[str, ...] = ()
    hosted_bytes: float = 0.0
    update_bytes: float = 0.0
    less_sums: float = 0.0
    reference_runs: int = 0
    exchange: Exchange = Exchange()
    shared_bytes: float = 0.0
    dropout_bytes: float = 0.0
    whole_layer_bytes: float = 0.0
    whole_head_bytes: float = 0.0
    whole_gradient_bytes: float = 0.0
    frozen_layer_bytes: float = 0.0
    resident_layer_bytes: float = 0.0
    resident_around_bytes: float = 0.0

    def fixed_bytes(self, micro_batches: int, resident: int = 0) -> float:
        """Of a step of so many; resident: as in ResidualPlan."""
        less = self.less_sums if micro_batches == 1 else 0.0
        return sum(self.fixed.values()) + self.resident_bytes(resident) - less

    def resident_bytes(self, resident: int) -> float:
        """What a device holds more where the frozen weights of so many layers are whole on it all the time."""
        around = self.resident_around_bytes if resident == self.num_layers else 0.0
        return resident * self.resident_layer_bytes + around

    def residual_bytes(self, name: str, tokens: float) -> float:
        """Of the mean layer, for `tokens` tokens on a device."""
        return self.residuals[name] * tokens + self.padding[name]


def step_cost(
    model: Decoder,
    config: TrainConfig,
    length: int | None = None,
    keeps_model: bool = False,
    optimizer: optax.GradientTransformation | None = None,
    reference_runs: int = 0,
) -> StepCost:
    """Reads a model, whose arrays may be abstract, and a config; length: of the rows, if not config.data.length;
    keeps_model: the model that was given lies beside the run, as it does not in a run of the command; optimizer: what
    moves the weights, if not what config.optim says; reference_runs: of a model that does not train, in each
    micro-batch."""
    length = length or config.data.length
    shape = model.config
    dtype = jnp.dtype(COMPUTE_DTYPES[config.precision])
    _, trainable, frozen = nnx.split(model, nnx.Param, ...)
    masters = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), trainable)
    states = jax.eval_shape((optimizer or _configured_optimizer(config)).init, masters)
    storage = weight_storage(config.optim.weights, config.precision, sum(a.size for a in jax.tree.leaves(masters)))
    kept = jax.tree.map(
        lambda a: a.update(dtype=jnp.dtype(jnp.bfloat16)) if storage == "bf16" and a.ndim >= 2 else a, masters
    )
    on_host = float(optimizer_offload.hosted_bytes(states)) if config.optim.offload else 0.0
    mesh = config.mesh or MeshConfig()
    data, fsdp = partition.mesh_shape(mesh.data, mesh.fsdp)
    share = partition.held_bytes(masters, fsdp) / nbytes(masters)  # of what trains, on a device
    fixed = {
        "frozen weights": partition.held_bytes(frozen, fsdp) + packed_slack(frozen) / fsdp,
        **({"the model as it was given": nbytes(trainable)} if keeps_model else {}),
        f"trained parameters ({storage})": share * nbytes(kept),
        "optimizer states": share * nbytes(states) - on_host,
        "gradient sums": share * nbytes(masters if config.micro_batches != 1 else kept),
    }
    kinds = [_kind(layer, spec, shape, length, dtype) for layer, spec in zip(model.layers, shape.layers, strict=True)]
    known, devices = residuals_of(model.layers), data * fsdp
    residuals = {r.name: _mean([kind.residuals.get(r.name, 0.0) for kind in kinds]) for r in known}
    padding = {r.name: _mean([kind.padding.get(r.name, 0.0) for kind in kinds]) for r in known}
    frozen_layers = [partition.divided_sizes(layer, fsdp)[0] for layer in frozen.get("layers", {}).values()]
    around = partition.divided_sizes(frozen, fsdp)[0] - sum(frozen_layers)
    # Parts stay beside what is whole where somebody else holds them.
    more = 1.0 if keeps_model else 1 - 1 / fsdp
    head = model.head_variable
    head_bytes, head_gradient_bytes = _head_costs(head, shape.vocab_size, dtype, storage)
    return StepCost(
        rows=config.rows_per_step,
        length=length,
        devices=devices,
        num_layers=len(kinds),
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        dtype=dtype,
        known=known,
        residuals=residuals,
        padding=padding,
        segments=_segment_costs(kinds),
        kinds=tuple({id(kind): kind for kind in kinds}.values()),
        fixed=fixed,
        cast_bytes=0.0 if storage == "bf16" else sum(_trained_matrix_bytes(layer, dtype) for layer in model.layers),
        head_bytes=head_bytes,
        head_gradient_bytes=head_gradient_bytes,
        head_trains=isinstance(head, nnx.Param),
        trained=nbytes(masters) / 4,
        trained_here=share * nbytes(masters) / 4,
        has_experts=any(s.experts_per_token for kind in kinds for s in kind.block.segments()),
        tiled=tuple(dict.fromkeys(name for kind in kinds for name in tiled_residuals(kind.block.segments()))),
        hosted_bytes=on_host,
        update_bytes=share * _update_bytes(masters, config),
        reference_runs=reference_runs,
        less_sums=0.0 if config.micro_batches == 1 else share * float(nbytes(masters) - nbytes(kept)),
        shared_bytes=sum(_adapter_bytes(layer, dtype) for layer in model.layers),
        dropout_bytes=max(_masked_sizes(model), default=0) * (1.0 + dtype.itemsize),
        exchange=_exchange(kept, frozen, data, fsdp),
        whole_layer_bytes=_whole_layer_bytes((kept, frozen), len(kinds), fsdp),
        whole_head_bytes=partition.divided_sizes(nnx.State({"head": head}), fsdp)[0],
        frozen_layer_bytes=max(frozen_layers, default=0.0),
        resident_layer_bytes=more * max(frozen_layers, default=0.0),
        resident_around_bytes=more * around,
        whole_gradient_bytes=0.0 if fsdp == 1 else _whole_gradient_bytes(model, storage),
    )


def _configured_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    schedule = learning_rate_schedule(config.schedule, config.optim.learning_rate, config.steps or 1000)
    return make_optimizer(config.optim, schedule)


def _head_costs(head: nnx.Variable, vocab_size: int, dtype, storage: str) -> tuple[float, float]:
    """Bytes beside the head's weight while the loss runs, and those of its gradient."""
    trains, size = isinstance(head, nnx.Param), math.prod(head.shape)
    loss = 8.0 if storage == "bf16" else 4.0 + (dtype.itemsize if dtype.itemsize < 4 else 0)
    copy = 0.0 if trains and storage != "bf16" else 2.0 * fills_up(vocab_size, dtype)
    return size * (loss * trains + copy), size * (2.0 if storage == "bf16" else loss) if trains else 0.0


def _whole_layer_bytes(trees, layers: int, fsdp: int) -> float:
    """Of the largest layer, what a device receives to have its divided weights whole."""
    held = [[tree["layers"][i] for tree in trees if i in tree.get("layers", {})] for i in range(layers)]
    return max(sum(partition.divided_sizes(part, fsdp)[0] for part in parts) for parts in held)


def packed_slack(frozen) -> float:
    """Device bytes that the allocator loses on a model's packed weights: the 16-bit originals leave holes of other
    sizes where they lay."""
    leaves, fit = jax.tree.leaves(frozen, is_leaf=_is_stored), ALLOCATOR_BYTES.of("xla", _device_here())
    shares = {FourBit: fit.four_bit, FP8: fit.fp8}
    return sum(share * nbytes(leaf) for kind, share in shares.items() for leaf in leaves if isinstance(leaf, kind))


def _device_here() -> str:
    return dispatch.device_kind() or ""


def _exchange(trained, frozen, data: int, fsdp: int) -> Exchange:
    """trained, frozen: states of variables, as they are kept on the devices."""

    def of_layers(tree) -> float:
        return partition.divided_sizes(tree["layers"], fsdp)[0] if "layers" in tree else 0.0

    received, weights = 1 - 1 / fsdp, of_layers(trained) + of_layers(frozen)
    _, gradients = partition.divided_sizes(trained["layers"], fsdp) if "layers" in trained else (0.0, 0.0)
    every, (_, divided) = partition.divided_sizes((trained, frozen), fsdp)[0], partition.divided_sizes(trained, fsdp)
    whole = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(trained)) - divided
    devices = data * fsdp
    # As partition.scatter sends gradients; sums of what is whole in float32.
    width = 4.0 if fsdp > 2 else partition.divided_sizes(trained, fsdp)[0] / max(divided, 1.0)
    return Exchange(
        weights=received * weights,
        gradients=received * width * gradients,
        around=received * (every - weights + width * (divided - gradients)),
        sums=8.0 * (whole * (1 - 1 / devices) + divided / fsdp * (1 - 1 / data)),
        frozen=received * of_layers(frozen),
        frozen_around=received * (partition.divided_sizes(frozen, fsdp)[0] - of_layers(frozen)),
    )


def _whole_gradient_bytes(model: Decoder, storage: str) -> float:
    """Of a layer's trained weights that are divided over devices: gradients as they come, and in float32 as they are
    added up."""
    layers = ([matrix.weight for *_, matrix in layer.matrices()] for layer in model.layers)
    sizes = (sum(math.prod(w.shape) for w in weights if isinstance(w, nnx.Param)) for weights in layers)
    return max(sizes) * (6.0 if storage == "bf16" else 8.0)


def _adapter_bytes(layer: Block, dtype) -> float:
    """Of a layer's experts' adapters, as kernels take them; nothing in float32, which they are kept in."""
    experts = (matrix for *_, matrix in layer.matrices() if matrix.num_experts and dtype.itemsize < 4)
    return sum(matrix.adapter_bytes(dtype.itemsize) for matrix in experts)


def _masked_sizes(model: Decoder) -> list[int]:
    """Of the inputs of adapters that have dropout."""
    matrices = (matrix for layer in model.layers for *_, matrix in layer.matrices())
    return [matrix.sizes[1] for matrix in matrices if matrix.lora is not None and matrix.lora.rate]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _segment_costs(kinds: list[LayerKind]) -> tuple[SegmentCost, ...]:
    """The segments of all layers, their work the mean over all of them. kinds: one a layer."""
    found: dict[tuple, tuple[Segment, bool, bool]] = {}
    for kind in {id(kind): kind for kind in kinds}.values():
        for segment in kind.block.segments():
            in_mixer, first = segment.outputs in kind.mixer_outputs, segment.outputs == kind.mixer_outputs[0]
            found.setdefault((segment.name, segment.outputs), (segment, in_mixer, first))
    costs = []
    for (name, outputs), (segment, in_mixer, first) in found.items():
        of_layers = [kind.work.get(name, Work()) if _makes(kind, name, outputs) else Work() for kind in kinds]
        work = Work(*(_mean(list(column)) for column in zip(*map(dataclasses.astuple, of_layers))))
        flags = (segment.separable, segment.tokenwise, segment.decodes_once, segment.held_bytes is not None)
        costs.append(SegmentCost(name, outputs, work, in_mixer, first, LAYER_OUTPUT in outputs, *flags))
    return tuple(costs)


def _makes(kind: LayerKind, name: str, outputs: tuple[str, ...]) -> bool:
    return any((segment.name, segment.outputs) == (name, outputs) for segment in kind.block.segments())


def _update_bytes(masters, config: TrainConfig) -> float:
    """Of an update tensor by tensor (optimizer_offload.py), at its largest tensor; of adapters, nothing that counts."""
    if config.adapter is not None:
        return 0.0
    size = max(leaf.size for leaf in jax.tree.leaves(masters))
    if config.optim.name == "adamw_8bit":
        # The direction, and where the update is made twice (step.py), moments for the first time. Beside states on the
        # host: a tensor's, and one of the next tensor's moments.
        beside = 1.5 if config.optim.offload else 1.0 if config.max_grad_norm is None else 0.0
        return size * (4.0 + beside * _ADAM8_STATES)
    # Moments as they come and as they go, with the gaps that the compiler leaves between large buffers.
    return size * 24.0 if config.optim.offload else 0.0


def _is_stored(leaf) -> bool:
    return isinstance(leaf, Stored)


def abstract_model(shape, config: TrainConfig) -> Decoder:
    """The model that `config` asks for, of this DecoderConfig, without arrays."""

    def make():
        model = Decoder(shape, jax.random.key(0), COMPUTE_DTYPES[config.precision])
        if config.model.load_in is not None:
            model = quantize(model, config.model.load_in)
            if config.model.compute == "fp8":
                model = compute_in_fp8(model)
        if config.objective.name == "reward":
            model = reward_model(model)
        if config.adapter is not None:
            model = get_peft_model(model, **config.adapter.settings, seed=config.seed)
        return model

    return nnx.eval_shape(make)


# ---- a layer


def nbytes(tree) -> float:
    return float(sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree)))


def _trained_matrix_bytes(layer: Block, dtype) -> float:
    """A layer's trained matrices in a compute dtype that is not their masters'."""
    trained = [matrix.weight for *_, matrix in layer.matrices() if isinstance(matrix.weight, nnx.Param)]
    return 0.0 if dtype.itemsize >= 4 else sum(math.prod(w.shape) for w in trained) * float(dtype.itemsize)


def _kind(layer: Block, spec, shape, length: int, dtype) -> LayerKind:
    """The kind of a layer; equal layers have the same one."""
    graph, trained, rest = nnx.split(layer, nnx.Param, ...)
    leaves, structure = jax.tree.flatten((trained, rest))
    abstract = tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves)
    return _kind_of(graph, spec, shape, length, dtype, abstract, structure)


@functools.lru_cache(64)
def _kind_of(graph, spec, shape, length: int, dtype, leaves, structure) -> LayerKind:
    arrays = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*leaf) for leaf in leaves])
    block = nnx.merge(graph, *arrays)
    once, twice = (_residual_shapes(graph, spec, shape, dtype, arrays, n * _PROBE_TOKENS) for n in (1, 2))
    residuals = {name: (nbytes(twice[name]) - nbytes(once[name])) / _PROBE_TOKENS for name in once}
    padding = {name: 2 * nbytes(once[name]) - nbytes(twice[name]) for name in once}
    moved = residuals | {LAYER_OUTPUT: residuals[LAYER_INPUT]}
    window = min(spec.window or length, length)
    seen_keys = window - (window - 1) * window / (2 * length)  # the mean over a whole document of `length`
    work = {s.name: _segment_work(s, block, moved, seen_keys, shape.hidden_size, dtype) for s in block.segments()}
    return LayerKind(block, residuals, padding, work)


def _segment_work(segment: Segment, block: Block, residuals, seen_keys: float, hidden: int, dtype) -> Work:
    fit = PRODUCT_TIME.of("mosaic", _device_here())
    sums = dict.fromkeys((f.name for f in dataclasses.fields(Work)), 0.0)
    for name in segment.matrices:
        matrix = matrix_of(block, name)
        size, used, weight = math.prod(matrix.sizes), numbers_met(segment, matrix), matrix.stored_weight
        if matrix.num_experts:
            sums["empty_flops"] += 2.0 * size * TILE_ROWS / 2
            # To and from the rows sorted by expert.
            sums["moved_bytes"] += segment.experts_per_token * hidden * dtype.itemsize
        in_fp8 = matrix.fp8 and isinstance(weight, FP8)
        fp8_time = fit.fp8_blocks if in_fp8 and weight.block == TILE else fit.fp8_rows
        sums["flops"] += 2.0 * used * (fp8_time if in_fp8 else 1.0)
        sums["weight_bytes"] += nbytes(weight)
        # Codes of experts are transposed in one direction of two: as many bytes as decoding moves.
        passes = (0.5 if matrix.num_experts else 0.0) if in_fp8 else 1.0
        sums["decoded"] += passes * size if _is_stored(weight) else 0.0
        sums["weight_flops"] += 2.0 * used if isinstance(matrix.weight, nnx.Param) else 0.0
    sums["flops"] += segment.token_flops
    sums["kernel_forward"], sums["kernel_backward"] = segment.kernel_bytes
    if segment.attention_width:
        sums["attention_flops"] = 4.0 * segment.attention_width * seen_keys
    else:
        sums["moved_bytes"] += sum(residuals[name] for name in (*segment.reads, *segment.outputs))
    return Work(**sums)


def _residual_shapes(graph, spec, shape, dtype, arrays, tokens: int) -> dict[str, Any]:
    """Shapes of a layer's residuals."""

    def run(trainable, frozen, x):
        layout = packed_layout((1, tokens), None, 1)
        tables = rotary_tables(shape, layout.positions())
        layout = PackedLayout(layout.doc_start, layout.doc_end, tables, layout.max_documents, layout.full)
        names = tuple(residual.name for residual in nnx.merge(graph, trainable, frozen).residuals())
        # Not the jitted function: what it traces here must not be found again by a run on another device.
        one_layer = inspect.unwrap(layer_forward)
        return one_layer(graph, spec, names, trainable, frozen, x, layout, None)[1]

    with dispatch.unchecked():
        return jax.eval_shape(run, *arrays, jax.ShapeDtypeStruct((1, tokens, shape.hidden_size), dtype))
