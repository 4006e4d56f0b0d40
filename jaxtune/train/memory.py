"""What a step will need, and the plan that fits it, before step 0.

An analytic model gives the bytes and seconds of a step under a plan: which residuals are kept, carried to the host or
computed again, by layer; in how many micro-batches; with how many logits at a time. `choose` takes the fastest plan
that fits a budget. The model ranks; only the winner is compiled, and the compiler's own figure checks it (loop.py).

Where the numbers come from: bytes of residuals are exact, from the shapes of the segments; what the compiler adds
around them, and the rates, were fitted to programs compiled for an H200 and to steps measured on it; how well they
hold is what benchmarks/train/predictions.py and memory.py record.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.lora import get_peft_model
from jaxtune.models.quant import quantize
from jaxtune.models.stack import MOE_SEGMENTS, SEGMENTS, LayerPlan, ResidualPlan
from jaxtune.pallas.formats import FourBit
from jaxtune.pallas.gated.mosaic import MOST as MOST_GATED
from jaxtune.train import hosted
from jaxtune.train.config import TrainConfig
from jaxtune.train.devices import CONTEXT_BYTES, Device, with_fragments
from jaxtune.train.layer_work import (
    Work,
    abstract_leaves,
    backward_bytes,
    decoded_expert_bytes,
    gated_in_place,
    layer_anatomy,
    nbytes,
    trained_matrix_bytes,
)
from jaxtune.train.optim import make_optimizer, weight_storage
from jaxtune.train.plan import RESIDUALS, StepPlan, parse_residuals
from jaxtune.train.schedule import learning_rate_schedule

COMPUTE_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}

# ---- what a step consists of


@dataclasses.dataclass(frozen=True)
class Anatomy:
    """Bytes and work of a step, before it is decided how to run it; on one device of `devices` that share the rows.

    residuals: {name: bytes a token} of a layer, the mean of all layers; padding: {name: bytes} beside that, whatever
    the tokens (empty rows of experts). work: {segment: Work}, likewise.
    fixed: {part: bytes} of what is always there, less_sums of it only where micro-batches add up. cast_bytes: trained
    weights of the layers in the compute dtype, which live from forward to backward. head_bytes: of a trained head's
    gradient, and what lies beside it at the loss: the head in the compute dtype, or, of a bf16 head, a chunk's share in
    float32. head_gradient_bytes: later, of it alone.
    expert_rows: bytes of the rows that go into a layer's experts, as a multiple of gate_up's; 0 without experts.
    expert_bytes: of its largest expert matrices in the compute dtype, where they are decoded for each product.
    hosted_bytes: of optimizer states in host memory. update_bytes: what the update takes beside what is always there.
    gated_in_place: the gradients of gate and up take their place on a Hopper GPU (pallas/gated).
    """

    rows: int
    length: int
    devices: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    itemsize: int
    residuals: Mapping[str, float]
    padding: Mapping[str, float]
    work: Mapping[str, Work]
    fixed: Mapping[str, float]
    cast_bytes: float
    head_bytes: float
    head_gradient_bytes: float
    head_trains: bool
    trained: float  # parameters
    expert_rows: float = 0.0
    expert_bytes: float = 0.0
    hosted_bytes: float = 0.0
    update_bytes: float = 0.0
    gated_in_place: bool = False
    less_sums: float = 0.0

    def fixed_bytes(self, micro_batches: int) -> float:
        """Of a step of so many."""
        return sum(self.fixed.values()) - (self.less_sums if micro_batches == 1 else 0.0)

    def residual_bytes(self, name: str, tokens: float) -> float:
        """Of one layer, for `tokens` tokens on a device."""
        return self.residuals[name] * tokens + self.padding[name]


# Of layers with and without experts; `route` takes no time that counts.
_SEGMENT_NAMES = tuple(dict.fromkeys(segment.name for segment in (*SEGMENTS[:-1], *MOE_SEGMENTS)))
_ADAM8_STATES = 2 + 8 / 256  # bytes for an element
_PACKED_SLACK = 0.09  # of four-bit weights: what the allocator loses on them (0.36 GB for 8B on an H200)


def anatomy(model: Decoder, config: TrainConfig, length: int | None = None, keeps_model: bool = False) -> Anatomy:
    """Reads a model, whose arrays may be abstract, and a config; length: of the rows, if not config.data.length;
    keeps_model: the model that was given lies beside the run, as it does not in a run of the command."""
    length = length or config.data.length
    shape = model.config
    dtype = jnp.dtype(COMPUTE_DTYPES[config.precision])
    _, trainable, frozen = nnx.split(model, nnx.Param, ...)
    masters = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), trainable)
    schedule = learning_rate_schedule(config.schedule, config.optim.learning_rate, config.steps or 1000)
    states = jax.eval_shape(make_optimizer(config.optim, schedule).init, masters)
    storage = weight_storage(config.optim.weights, config.precision, sum(a.size for a in jax.tree.leaves(masters)))
    kept = jax.tree.map(
        lambda a: a.update(dtype=jnp.dtype(jnp.bfloat16)) if storage == "bf16" and a.ndim >= 2 else a, masters
    )
    on_host = float(hosted.hosted_bytes(states)) if config.optim.offload else 0.0
    packed = sum(nbytes(leaf) for leaf in jax.tree.leaves(frozen, is_leaf=_is_packed) if _is_packed(leaf))
    fixed = {
        "frozen weights": nbytes(frozen) + _PACKED_SLACK * packed,
        **({"the model as it was given": nbytes(trainable)} if keeps_model else {}),
        f"trained parameters ({storage})": nbytes(kept),
        "optimizer states": nbytes(states) - on_host,
        "gradient sums": nbytes(masters if config.micro_batches != 1 else kept),
    }
    found: dict = {}  # equal layers are looked at once
    kinds = []
    for layer, spec in zip(model.layers, shape.layers, strict=True):
        graph, trained, rest = nnx.split(layer, nnx.Param, ...)
        key = (graph, spec, *abstract_leaves((trained, rest)))
        if key not in found:
            found[key] = layer_anatomy(layer, key, shape, length, dtype)
        kinds.append(found[key])
    count = len(kinds)

    def mean(values):
        return sum(values) / count

    residuals, padding = (
        {name: mean([kind[i].get(name, 0.0) for kind in kinds]) for name in RESIDUALS} for i in (0, 1)
    )
    work = {
        name: Work(*(mean(column) for column in zip(*(dataclasses.astuple(k[2].get(name, Work())) for k in kinds))))
        for name in _SEGMENT_NAMES
    }
    head = model.head_variable
    head_trains = isinstance(head, nnx.Param)
    head_size = math.prod(head.shape)
    head_loss = 8.0 if storage == "bf16" else 4.0 + (dtype.itemsize if dtype.itemsize < 4 else 0)
    return Anatomy(
        rows=config.rows_per_step,
        length=length,
        devices=config.mesh.data,
        num_layers=count,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        itemsize=dtype.itemsize,
        residuals=residuals,
        padding=padding,
        work=work,
        fixed=fixed,
        cast_bytes=0.0 if storage == "bf16" else sum(trained_matrix_bytes(layer, dtype) for layer in model.layers),
        head_bytes=head_size * head_loss if head_trains else 0.0,
        head_gradient_bytes=head_size * (2.0 if storage == "bf16" else head_loss) if head_trains else 0.0,
        head_trains=head_trains,
        trained=nbytes(masters) / 4,
        expert_rows=0.0 if shape.moe is None else shape.hidden_size / (2 * shape.moe.expert_size),
        expert_bytes=decoded_expert_bytes(model.layers[0], dtype),
        hosted_bytes=on_host * config.mesh.data,
        update_bytes=_update_bytes(masters, config),
        gated_in_place=gated_in_place(shape, dtype, length),
        less_sums=0.0 if config.micro_batches == 1 else float(nbytes(masters) - nbytes(kept)),
    )


def _update_bytes(masters, config: TrainConfig) -> float:
    """Of an update tensor by tensor (hosted.py), at its largest tensor; of adapters, nothing that counts."""
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


def _is_packed(leaf) -> bool:
    return isinstance(leaf, FourBit)


def abstract_model(shape, config: TrainConfig) -> Decoder:
    """The model that `config` asks for, of this DecoderConfig, without arrays."""

    def make():
        model = Decoder(shape, jax.random.key(0), COMPUTE_DTYPES[config.precision])
        if config.model.load_in is not None:
            model = quantize(model, config.model.load_in)
        if config.adapter is not None:
            settings = dataclasses.asdict(config.adapter)
            settings.pop("path")
            model = get_peft_model(model, **settings, seed=config.seed)
        return model

    return nnx.eval_shape(make)


# ---- what a plan costs

# Fitted to steps of the 8B shape on an H200: everything that is not a product moves each segment's inputs and outputs
# this many times, forward and backward.
_PASSES_FORWARD, _PASSES_BACKWARD = 2.0, 2.2
# Four bits to 16: bytes moved for an element, at the speed of our kernel.
_DECODE_BYTES, _DECODE_SHARE = 2.5, 0.8
_EXPERT_SHARE = 0.75  # experts' products and what sorts their rows, against dense ones; by three steps of gpt-oss-20b
# Attention against large products, and the tokens at which it reaches half of that; its backward against it.
_ATTENTION_SHARE, _ATTENTION_HALF = 0.936, 1090
_ATTENTION_BACKWARD, _ATTENTION_HALF_BACKWARD = 2.87, 1365
_HALF_SPEED_TOKENS = 64  # tokens at which a product reaches half of its speed
# Of a layer's time, one direction, that transfers can hide under (models/ferry.py); and of theirs, what is lost then.
_COVER, _CARRY_LOSS = 0.9, 0.03
_GAPS = 1.4  # what leaves takes with the gaps that it leaves
_LAYER_PASS_SECONDS = 40e-6  # launches and gaps of a layer, one direction
_MICRO_BATCH_SECONDS = 6e-3


@dataclasses.dataclass(frozen=True)
class LayerForecast:
    """A layer under a LayerPlan for one micro-batch, in bytes and seconds.

    kept, hosted: from forward to backward. work: on the device in its own backward, beyond what is kept, where the next
    layer is like it; work_forward: at the end of its forward. leaving, arriving: of the hosted bytes, those that are on
    their way at the MLP of the layer above.
    lost: seconds of recomputation and of waits for the link, part of forward + backward.
    """

    kept: float
    hosted: float
    leaving: float
    arriving: float
    work_forward: float
    work: float
    forward: float
    backward: float
    recompute: float
    wait: float


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A step under a plan. parts: {what: bytes} at the moment of the peak, for one device.

    recompute_seconds, wait_seconds (for the host link): parts of step_seconds. host_bytes: pinned.
    """

    plan: StepPlan
    parts: Mapping[str, float]
    step_seconds: float
    recompute_seconds: float
    wait_seconds: float
    host_bytes: float
    tokens: int

    @property
    def peak_bytes(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds


def _decode_seconds(work: Work, device: Device) -> float:
    return work.decoded * _DECODE_BYTES / (device.copy * _DECODE_SHARE)


def _segment_seconds(work: Work, tokens: float, length: int, device: Device) -> tuple[float, float]:
    """(forward, backward) of one segment over `tokens` tokens in documents of `length`."""
    rate = device.gemm * tokens / (tokens + _HALF_SPEED_TOKENS)
    weights = work.weight_bytes / device.copy
    product = max(work.flops * tokens / rate, weights) + work.empty_flops / device.gemm
    product = product / (_EXPERT_SHARE if work.empty_flops else 1.0) + _decode_seconds(work, device)
    attention = work.attention_flops * tokens / (device.gemm * _ATTENTION_SHARE)
    passes = work.moved_bytes * tokens / device.copy
    forward = product + attention * (1 + _ATTENTION_HALF / length) + _PASSES_FORWARD * passes
    backward = (
        product + _ATTENTION_BACKWARD * attention * (1 + _ATTENTION_HALF_BACKWARD / length) + _PASSES_BACKWARD * passes
    )
    return forward, backward + work.weight_flops * tokens / rate


def layer_forecast(
    parts: Anatomy, plan: LayerPlan, tokens: float, device: Device, tile_tokens: int | None = None
) -> LayerForecast:
    """What one layer costs for `tokens` tokens of a micro-batch; tile_tokens as in ResidualPlan."""
    return _layer_forecasts(parts, tokens, device, tile_tokens)(plan)


def _layer_forecasts(
    parts: Anatomy, tokens: float, device: Device, tile_tokens: int | None
) -> Callable[[LayerPlan], LayerForecast]:
    """layer_forecast of any plan: what does not depend on the plan is computed once."""
    whole = {name: parts.residual_bytes(name, tokens) for name in parts.residuals}
    most_tiles = 1 if tile_tokens is None or parts.expert_rows else parts.length // tile_tokens

    def segment_seconds(tiles: int) -> dict[str, tuple[float, float]]:
        seconds = {}
        for name, work in parts.work.items():
            if name in ("expand", "contract"):  # the weights are read, and decoded, for every tile
                work = dataclasses.replace(work, weight_bytes=work.weight_bytes * tiles, decoded=work.decoded * tiles)
            seconds[name] = _segment_seconds(work, tokens, parts.length, device)
        return seconds

    seconds_of = {tiles: segment_seconds(tiles) for tiles in {1, most_tiles}}

    def one(plan: LayerPlan) -> LayerForecast:
        tiles = most_tiles if plan.gate == plan.up == "recompute" else 1
        return _layer_forecast(parts, plan, whole, seconds_of[tiles], device, tiles)

    return one


def _layer_forecast(parts, plan, size, seconds, device, tiles) -> LayerForecast:
    """size: {residual: bytes}; seconds: {segment: (forward, backward)}."""
    kept, hosted = (sum(size[name] for name in plan.named(fate)) for fate in ("keep", "offload"))
    whole, size = size, size | {name: size[name] / tiles for name in ("gate", "up")}
    dropped = plan.named("recompute")
    recompute = 0.0
    for segment in (*SEGMENTS[:-1], *MOE_SEGMENTS[3:-1]):  # those of layers without experts, then of layers with them
        missing = sum(size[name] for name in segment.outputs if name in dropped)
        if missing:  # gate and up can be computed each alone
            share = missing / sum(size[name] for name in segment.outputs) if segment.name == "expand" else 1.0
            recompute += share * seconds[segment.name][0]
            if segment.name == "expand" and parts.expert_rows:  # what it decodes serves its gradients too (moe.py)
                recompute -= _decode_seconds(parts.work["expand"], device)
    forward = sum(f for f, _ in seconds.values()) + _LAYER_PASS_SECONDS
    backward = sum(b for _, b in seconds.values()) + recompute + 2 * _LAYER_PASS_SECONDS
    link = hosted / (device.link or device.copy)
    waits = [max(link - _COVER * seconds, 0.0) for seconds in (forward, backward)]
    in_place = parts.gated_in_place and device.hopper and parts.devices == 1
    in_place = in_place and size["gate"] / parts.itemsize < MOST_GATED
    # Of what is offloaded, the largest leave first and come last: under what is before or after the MLP, if they can.
    travelling = [hosted, hosted]
    for direction, stages in enumerate((("project", "attend", "mix"), ("attend", "mix"))):
        room = _COVER * sum(seconds[stage][direction] for stage in stages) * (device.link or device.copy)
        for name in sorted(plan.named("offload"), key=lambda name: whole[name], reverse=True):
            if whole[name] > room:
                break
            room -= whole[name]
            travelling[direction] -= whole[name]
    leaving, arriving = travelling
    gathered = device.hopper and not parts.expert_bytes  # of bf16 experts: grouped_matmul's `gathers`
    work = backward_bytes(
        plan, size, tiles, in_place, parts.expert_rows, parts.expert_bytes, gathered, hosted + arriving, 2 * hosted
    )
    # The activation and what is not kept of gate and up.
    work_forward = size["gate"] + sum(size[name] for name in ("gate", "up") if name in dropped)
    work_forward += 2.9 * size["layer_input"]
    forward, backward = (s + w + _CARRY_LOSS * link for s, w in zip((forward, backward), waits, strict=True))
    return LayerForecast(kept, hosted, leaving, arriving, work_forward, work, forward, backward, recompute, sum(waits))


def forecast(parts: Anatomy, plan: StepPlan, device: Device) -> Forecast:
    """Bytes and seconds of a step under `plan`."""
    cache: dict[LayerPlan, LayerForecast] = {}
    tokens = parts.rows / plan.micro_batches / parts.devices * parts.length
    for layer in plan.residuals.layers:
        if layer not in cache:
            cache[layer] = layer_forecast(parts, layer, tokens, device, plan.residuals.tile_tokens)
    groups = [(cache[layer], len(list(same))) for layer, same in itertools.groupby(plan.residuals.layers)]
    return _forecast(parts, plan, groups, _head(parts, plan.chunk_tokens, tokens, device), tokens, device)


def _head(parts: Anatomy, chunk_tokens: int, tokens: float, device: Device) -> tuple[float, float]:
    """(bytes around the loss, seconds) of the head and the loss of a micro-batch."""
    chunk = min(chunk_tokens, tokens)
    hidden = tokens * parts.hidden_size * parts.itemsize
    logits = chunk * parts.vocab_size * (4.0 + parts.itemsize)
    products = 3 if parts.head_trains else 2
    flops = 2.0 * products * parts.vocab_size * parts.hidden_size * tokens
    passes = tokens * parts.vocab_size * 18.0 / device.copy
    if parts.head_trains:  # the gradient's sum is read and written for every chunk
        passes += tokens / chunk * parts.vocab_size * parts.hidden_size * 8.0 / device.copy
    seconds = flops / (device.gemm * chunk / (chunk + _HALF_SPEED_TOKENS)) + passes
    return logits + 3.5 * hidden + parts.head_bytes, seconds


def state_seconds(parts: Anatomy, device: Device) -> float:
    """Of a step: the optimizer's states from the host and back, one after the other (hosted.py)."""
    return 2 * parts.hosted_bytes / parts.devices / (device.link or device.copy)


def _forecast(parts, plan, groups: list[tuple[LayerForecast, int]], head, tokens, device) -> Forecast:
    """groups: runs of layers with one plan, first layers first."""
    head_bytes, head_seconds = head
    kept = sum(layer.kept * count for layer, count in groups)
    # What the last layer should offload stays: the backward begins with it.
    last, before = groups[-1][0], groups[-1 if groups[-1][1] > 1 else max(len(groups) - 2, 0)][0]
    moments = [
        ("the loss: logits of a chunk, hidden states", kept, head_bytes + last.hosted),
        ("the forward of a layer", kept, last.hosted + last.work_forward + _GAPS * before.leaving),
    ]
    below = arriving = 0.0
    for layer, count in groups:
        below += layer.kept * count
        more = max(arriving - layer.arriving, 0.0)  # under the lowest of these layers comes what another plan has
        moments.append(("the backward of a layer", below, layer.work + more))
        arriving = layer.arriving
    what, residuals, work = max(moments, key=lambda moment: moment[1] + moment[2])
    bytes_ = {"kept residuals": residuals, what: work}
    if parts.cast_bytes:
        bytes_["trained weights in the compute dtype"] = parts.cast_bytes
    if parts.head_bytes and what.startswith("the backward"):
        bytes_["gradient of the head"] = parts.head_gradient_bytes
    if parts.update_bytes > sum(bytes_.values()):
        bytes_ = {"the update of the largest tensor": parts.update_bytes}
    bytes_ = {**parts.fixed, **bytes_}
    micro = plan.micro_batches
    if micro == 1 and parts.less_sums:
        bytes_["gradient sums"] -= parts.less_sums
    step = sum((layer.forward + layer.backward) * count for layer, count in groups) + head_seconds
    update = max(parts.trained * 4.0 * 9 / device.copy, state_seconds(parts, device))
    return Forecast(
        plan=plan,
        parts={name: value for name, value in bytes_.items() if value},
        step_seconds=micro * (step + _MICRO_BATCH_SECONDS) + update,
        recompute_seconds=micro * sum(layer.recompute * count for layer, count in groups),
        wait_seconds=micro * sum(layer.wait * count for layer, count in groups),
        host_bytes=sum(layer.hosted * count for layer, count in groups) + parts.hosted_bytes,
        tokens=parts.rows * parts.length,
    )


# ---- the choice

# Residuals that are decided together: nothing is won by computing one of a group again and keeping another.
_GROUPS = (
    ("layer_input",),
    ("query",),
    ("key", "value"),
    ("attention_out", "lse"),
    ("mid",),
    ("gate",),
    ("up", "gate_up"),
)
_TILE_TOKENS = 16384  # of a row, that an MLP of a long one runs over at a time
_CHUNK_LOGITS = (2**28, 2**27, 2**26, 2**25, 2**24)


@functools.cache
def _layer_plans(offload: bool) -> tuple[LayerPlan, ...]:
    fates = ("keep", "offload", "recompute") if offload else ("keep", "recompute")
    plans = []
    for chosen in itertools.product(fates, repeat=len(_GROUPS)):
        if chosen[0] != "recompute":
            named: dict[str, Any] = {name: fate for group, fate in zip(_GROUPS, chosen, strict=True) for name in group}
            plans.append(LayerPlan(**named))
    return tuple(plans)


def splits(rows: int, devices: int, wanted: int | None) -> list[int]:
    """Numbers of micro-batches that the rows of a step can be computed in."""
    if wanted is not None:
        return [wanted]
    return [count for count in range(1, rows + 1) if rows % count == 0 and (rows // count) % devices == 0]


def choose(
    parts: Anatomy,
    config: TrainConfig,
    device: Device,
    budget_bytes: float | None,
    chunk_logits: Sequence[int] = _CHUNK_LOGITS,
) -> Forecast:
    """The fastest plan whose predicted peak is within `budget_bytes`; of equally fast ones that with the lower peak.

    What config.memory.plan and config.micro_batches fix stays as they say.

    Args:
      chunk_logits: numbers of logits at a time to choose from.
    Raises:
      PlanError: nothing fits.
      ValueError: the host cannot hold the optimizer's states.
    """
    if device.link and parts.hosted_bytes > device.host_bytes:
        raise ValueError(
            f"optim.offload: the states of {config.optim.name} take {parts.hosted_bytes / 1e9:.1f} GB of host memory, "
            f"of which {device.host_bytes / 1e9:.1f} GB may be pinned; use optim.name=adamw_8bit, or unset it"
        )
    # What residuals may take of it.
    device = dataclasses.replace(device, host_bytes=max(device.host_bytes - parts.hosted_bytes, 0.0))
    fixed = None if config.memory.plan is None else parse_residuals(config.memory.plan, parts.num_layers)
    budget = math.inf if budget_bytes is None else budget_bytes
    found: list[Forecast] = []
    for micro in splits(parts.rows, parts.devices, config.micro_batches):
        tokens = parts.rows / micro / parts.devices * parts.length
        # No more logits at a time than there are tokens, and no more sizes than make a difference.
        chunks = sorted({max(1, min(int(tokens), count // parts.vocab_size)) for count in chunk_logits})
        if fixed is not None:
            found += [forecast(parts, StepPlan(fixed, micro, chunk), device) for chunk in chunks]
        else:
            for tile in (None, _tile_tokens(parts, config)):
                table = _best_layers(parts, tokens, device, tile)
                found += [_best_pair(parts, table, micro, chunk, device, budget, tile) for chunk in chunks]
    fitting = [one for one in found if one.peak_bytes <= budget]
    if not fitting:
        raise PlanError(min(found, key=lambda one: one.peak_bytes), budget)
    return min(fitting, key=lambda one: (round(one.step_seconds, 4), one.peak_bytes))


def _tile_tokens(parts: Anatomy, config: TrainConfig) -> int | None:
    """The largest tile of at most _TILE_TOKENS that divides a long row; None for other rows, and with dropout."""
    dropout = config.adapter is not None and config.adapter.lora_dropout > 0
    if parts.length < 2 * _TILE_TOKENS or parts.expert_rows or dropout:
        return None
    tile = next(size for size in range(_TILE_TOKENS, 0, -1) if parts.length % size == 0)
    return tile if tile >= _TILE_TOKENS // 8 else None


def _best_pair(parts, table, micro: int, chunk_tokens: int, device, budget: float, tile: int | None) -> Forecast:
    """The fastest mixture that fits `budget` of two layer plans, one for the first layers, whose residuals live
    longest, and one for the rest; the smallest mixture where none fits."""
    count = parts.num_layers
    tokens = parts.rows / micro / parts.devices * parts.length
    head = _head(parts, chunk_tokens, tokens, device)
    kept, hosted, leaving, arriving, work_forward, work, seconds = np.array(
        [
            (f.kept, f.hosted, _GAPS * f.leaving, f.arriving, f.work_forward, f.work, f.forward + f.backward)
            for _, f in table
        ]
    ).T
    work, forward = work + parts.head_gradient_bytes, hosted + work_forward
    budget -= parts.fixed_bytes(micro) + parts.cast_bytes
    # Rows: the plan of the first layers; columns: that of the rest. As many first layers as the last moments need.
    last_work = work + np.maximum(arriving[:, None] - arriving[None, :], 0.0)
    over = count * kept + np.maximum(np.maximum(head[0] + hosted, forward + leaving), last_work) - budget
    saved = kept[None, :] - kept[:, None]  # by one layer more under the first plan
    with np.errstate(divide="ignore", invalid="ignore"):
        number = np.where(over > 0, np.where(saved > 0, np.ceil(over / saved), count), 0)
    number = np.clip(number, 0, count)
    rest = count - number
    residuals = number * kept[:, None] + rest * kept[None, :]
    last_work = np.where(rest > 0, last_work, 0.0)
    last_hosted = np.where(rest > 0, hosted[None, :], hosted[:, None])
    first_peak = np.where(number > 0, number * kept[:, None] + work[:, None], 0.0)
    last_forward = np.where(rest > 0, forward[None, :], forward[:, None])
    last_forward += np.where(rest > 1, leaving[None, :], leaving[:, None])  # of the layer before the last
    last_moments = np.maximum(np.maximum(head[0] + last_hosted, last_forward), last_work)
    peak = np.maximum(residuals + last_moments, first_peak)
    time = number * seconds[:, None] + rest * seconds[None, :]
    fits = (peak <= budget) & (number * hosted[:, None] + rest * hosted[None, :] <= device.host_bytes)
    order = np.where(fits, np.round(time, 6) + 1e-18 * peak, np.inf)
    if not fits.any():
        allowed = number * hosted[:, None] + rest * hosted[None, :] <= device.host_bytes
        order = np.where(allowed, peak, np.inf)
    first, last = np.unravel_index(int(np.argmin(order)), order.shape)
    first_layers = int(number[first, last])
    layers = (table[first][0],) * first_layers + (table[last][0],) * (count - first_layers)
    return forecast(parts, StepPlan(ResidualPlan(layers, tile), micro, chunk_tokens), device)


def _best_layers(parts, tokens, device, tile) -> list[tuple[LayerPlan, LayerForecast]]:
    """The layer plans that no other beats in memory kept, memory at work and time at once."""
    of = _layer_forecasts(parts, tokens, device, tile)
    table = [(plan, of(plan)) for plan in _layer_plans(device.link > 0)]
    figures = np.array([(f.kept, f.work, f.forward + f.backward, f.hosted) for _, f in table]).T
    # [i, j]: i is no worse than j in anything.
    no_more = functools.reduce(np.logical_and, (figure[:, None] <= figure[None, :] for figure in figures))
    beaten = (no_more & ~no_more.T).any(0)
    return [entry for entry, worse in zip(table, beaten, strict=True) if not worse]


class PlanError(ValueError):
    """Nothing fits. smallest: the forecast that needs least; budget_bytes: what there is."""

    def __init__(self, smallest: Forecast, budget_bytes: float, fixes: Sequence[str] = (), problem: str = ""):
        self.smallest, self.budget_bytes = smallest, budget_bytes
        largest = sorted(smallest.parts.items(), key=lambda part: -part[1])[:3]
        problem = problem or "no plan fits: the smallest"
        text = f"{problem} needs {smallest.peak_bytes / 1e9:.2f} GB of {budget_bytes / 1e9:.2f} GB. "
        text += "Its largest parts: " + "; ".join(f"{name} {value / 1e9:.2f} GB" for name, value in largest) + "."
        if fixes:
            text += " What would fit: " + "; ".join(fixes) + "."
        super().__init__(text)


def fitting_settings(shape, config: TrainConfig, device: Device, budget_bytes: float, wanted: int = 3) -> list[str]:
    """Changes of the config, each enough alone, under which a plan fits; the gentlest first."""

    def changed(section: str, **values) -> TrainConfig:
        return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})

    options: list[tuple[str, TrainConfig]] = []
    if config.micro_batches is not None or config.memory.plan is not None:
        free = dataclasses.replace(changed("memory", plan=None), micro_batches=None)
        options.append(("memory.plan=null micro_batches=null (the planner chooses)", free))
    if config.optim.name == "adamw":
        options.append(("optim.name=adamw_8bit", changed("optim", name="adamw_8bit")))
    adam = config.optim.name in ("adamw", "adamw_8bit")
    if adam and config.adapter is None and not config.optim.offload and config.max_grad_norm is not None:
        options.append(("optim.offload=true", changed("optim", offload=True)))
    if config.adapter is not None and config.model.load_in is None:
        options.append(("model.load_in=nf4", changed("model", load_in="nf4")))
    if config.adapter is not None and config.adapter.target_parameters:
        alone = "adapter.target_parameters=null (no adapters on experts)"
        options.append((alone, changed("adapter", target_parameters=None)))
    length = config.data.length // 2
    while length >= 256:
        options.append((f"data.length={length}", changed("data", length=length)))
        length //= 2
    if config.adapter is None:
        from jaxtune.train.config import AdapterConfig

        adapted = dataclasses.replace(config, adapter=AdapterConfig())
        options.append(("adapter={r: 16}", adapted))
        if config.model.from_config is None:
            model = dataclasses.replace(config.model, load_in="nf4")
            options.append(("adapter={r: 16} model.load_in=nf4", dataclasses.replace(adapted, model=model)))
    found: list[str] = []
    models: dict[tuple, Decoder] = {}

    def parts_of(option: TrainConfig) -> Anatomy:
        key = (option.model, repr(option.adapter))
        if key not in models:
            models[key] = abstract_model(shape, option)
        return anatomy(models[key], option)

    for text, option in options:
        key = text.split("=")[0]
        if len(found) < wanted and not any(other.split("=")[0] == key for other in found):
            try:
                choose(parts_of(option), option, device, budget_bytes)
            except ValueError:
                continue
            found.append(text)
    if len(found) < wanted:
        smallest = with_fragments(minimum_bytes(parts_of(config), config, device)) + CONTEXT_BYTES
        found.append(f"a device with {smallest / 1e9:.1f} GB free")
    return found


def minimum_bytes(parts: Anatomy, config: TrainConfig, device: Device) -> float:
    """The least that any plan needs."""
    try:
        return choose(parts, config, device, 0.0).peak_bytes
    except PlanError as error:
        return error.smallest.peak_bytes


def longest_row(parts: Anatomy, config: TrainConfig, device: Device, budget_bytes: float, step: int = 1024) -> int:
    """The longest single row, in tokens, a multiple of `step`, with which some plan fits; 0 if none does."""

    def fits(length: int) -> bool:
        row = dataclasses.replace(parts, rows=parts.devices, length=length)
        one = dataclasses.replace(config, rows_per_step=parts.devices, micro_batches=1)
        try:
            choose(row, one, device, budget_bytes, _CHUNK_LOGITS[-1:])  # the fewest logits at a time
        except PlanError:
            return False
        return True

    low, high = 0, 1
    while high < 4096 and fits(high * step):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step
