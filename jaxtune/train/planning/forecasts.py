"""What a plan costs: the bytes and seconds of a step under it, predicted.

Bytes of residuals are exact, from the shapes of the segments; what the compiler adds around them, and the rates, are
fitted (models/fitted.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxtune.models.fitted import ALLOCATOR_BYTES, ATTENTION_TIME, PRODUCT_TIME, STEP_TIME, ProductTime, StepTime
from jaxtune.models.layers.segment import Sizes
from jaxtune.models.residual_plan import KEEP, PLACEMENTS, LayerPlan
from jaxtune.pallas.linear_cross_entropy import chunk_length
from jaxtune.train.planning.cost import LayerKind, StepCost, Work
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.plan import StepPlan

type Figure = Any  # a float, or an array of one for each plan


@dataclasses.dataclass(frozen=True)
class LayerForecast:
    """A layer under a LayerPlan for one micro-batch, in bytes and seconds.

    kept, hosted: from forward to backward. work: on the device in its own backward, beyond what is kept, where the next
    layer is like it; work_forward: at the end of its forward. leaving, arriving: of the hosted bytes, those that are on
    their way at the MLP of the layer above.
    lost: seconds of recomputation and of waits for the link, part of forward + backward.
    """

    kept: Figure
    hosted: Figure
    leaving: Figure
    arriving: Figure
    work_forward: Figure
    work: Figure
    forward: Figure
    backward: Figure
    recompute: Figure
    wait: Figure

    def at(self, index: Any) -> LayerForecast:
        """Of those plans, where these are arrays."""
        return LayerForecast(*(array[index] for array in vars(self).values()))


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A step under a plan. parts: {what: bytes} at the moment of the peak, for one device.

    recompute_seconds, wait_seconds (for the host link), exposed_seconds (of collectives): parts of step_seconds.
    collective_seconds: of all collectives, hidden or not. host_bytes: pinned for one device.
    """

    plan: StepPlan
    parts: Mapping[str, float]
    step_seconds: float
    recompute_seconds: float
    wait_seconds: float
    host_bytes: float
    tokens: int
    collective_seconds: float = 0.0
    exposed_seconds: float = 0.0

    @property
    def peak_bytes(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds


def product_time(device: Device) -> ProductTime:
    return PRODUCT_TIME.of("mosaic", device.name)


def _step_time(device: Device) -> StepTime:
    return STEP_TIME.of("xla", device.name)


def bytes_with_gaps(leaving: Figure, device: Device) -> Figure:
    """Bytes that values on their way to the host take, with the gaps that they leave."""
    return ALLOCATOR_BYTES.of("xla", device.name).leaving * leaving


def _decode_seconds(work: Work, device: Device) -> float:
    fit = product_time(device)
    return work.decoded * fit.decoded_bytes / (device.copy * fit.decoded_share)


def _segment_seconds(work: Work, tokens: float, length: int, device: Device) -> tuple[float, float]:
    """(forward, backward) of one segment over `tokens` tokens in documents of `length`."""
    fit, attend = product_time(device), ATTENTION_TIME.of("cudnn", device.name)
    rate = device.gemm * tokens / (tokens + fit.half_tokens)
    weights = work.weight_bytes / device.copy
    product = max(work.flops * tokens / rate, weights) + work.empty_flops / device.gemm
    product = product / (fit.experts if work.empty_flops else 1.0) + _decode_seconds(work, device)
    attention = work.attention_flops * tokens / (device.gemm * attend.share)
    passes = work.moved_bytes * tokens / device.copy
    forward = product + attention * (1 + attend.half_tokens / length) + fit.passes_forward * passes
    forward += work.kernel_forward * tokens / device.copy
    attention = attend.backward * attention * (1 + attend.half_tokens_backward / length)
    backward = product + attention + fit.passes_backward * passes
    backward += work.kernel_backward * tokens / device.copy
    return forward, backward + work.weight_flops * tokens / rate


def layer_forecast(
    parts: StepCost, plan: LayerPlan, tokens: float, device: Device, tile_tokens: int | None = None
) -> LayerForecast:
    """What the mean layer costs for `tokens` tokens of a micro-batch; tile_tokens as in ResidualPlan."""
    placed = np.asarray([[PLACEMENTS.index(plan.of(residual)) for residual in parts.known]])
    return LayerForecast(*map(float, vars(layer_forecasts(parts, placed, tokens, device, tile_tokens).at(0)).values()))


def layer_forecasts(
    parts: StepCost, placed: np.ndarray, tokens: float, device: Device, tile_tokens: int | None
) -> LayerForecast:
    """layer_forecast of many plans; placed: int[plans, parts.known], indices into PLACEMENTS."""
    whole = {name: parts.residual_bytes(name, tokens) for name in parts.residuals}
    of_kinds = [{name: kind.residual_bytes(name, tokens) for name in kind.residuals} for kind in parts.kinds]
    most_tiles = 1 if tile_tokens is None or not parts.tiled else parts.length // tile_tokens

    def segment_seconds(tiles: int) -> list[tuple[float, float]]:
        seconds = []
        for segment in parts.segments:
            work = segment.work
            if segment.tokenwise:  # the weights are read, and decoded, for every tile
                work = dataclasses.replace(work, weight_bytes=work.weight_bytes * tiles, decoded=work.decoded * tiles)
            forward, backward = _segment_seconds(work, tokens, parts.length, device)
            seconds.append((forward, backward + (forward if segment.runs_again else 0.0)))
        return seconds

    seconds_of = {tiles: segment_seconds(tiles) for tiles in {1, most_tiles}}

    # A plan is a few sets of residuals, by placement, as bits. Of each set there are far fewer than there are plans.
    count = len(parts.known)
    bits = 2 ** np.arange(count)
    kept, offloaded, dropped, rounded = ((placed == at) @ bits for at, _ in enumerate(PLACEMENTS))

    def names(mask: int) -> tuple[str, ...]:
        return tuple(residual.name for at, residual in enumerate(parts.known) if mask >> at & 1)

    def of_sets(masks: np.ndarray, function: Callable[[int], Any]) -> np.ndarray:
        """function(mask) of each: [plans, ...]."""
        values, where = np.unique(masks, return_inverse=True)
        return np.array([function(int(mask)) for mask in values])[where]

    def size(mask: int) -> float:
        return sum(whole[name] for name in names(mask))

    def remade(mask: int) -> tuple[float, ...]:
        dropped, rounded = names(mask), names(mask >> count)
        tiles = most_tiles if set(dropped).issuperset(parts.tiled) else 1
        return *_remade(parts, dropped, rounded, whole, of_kinds, seconds_of[tiles], device, tiles), tiles

    def travelling(mask: int) -> tuple[float, float]:
        seconds = seconds_of[most_tiles if mask >> count else 1]
        return _travelling(parts, names(mask), whole, size(mask & (1 << count) - 1), seconds, device)

    again, at_feed_forward, at_mixer, work_forward, tiles = of_sets(dropped | rounded << count, remade).T
    leaving, arriving = of_sets(offloaded | (tiles > 1).astype(int) << count, travelling).T
    hosted, in_fp8 = of_sets(offloaded, size), of_sets(rounded, size)
    rounding = in_fp8 * (1 + 1 / parts.dtype.itemsize)
    rounding = rounding / (device.copy * product_time(device).decoded_share)  # or reading it again
    fit = _step_time(device)
    once = {number: [sum(column) for column in zip(*seconds, strict=True)] for number, seconds in seconds_of.items()}
    forward, backward = (np.where(tiles > 1, once[most_tiles][i], once[1][i]) for i in (0, 1))
    forward = forward + rounding + fit.layer_seconds
    backward = backward + again + rounding + 2 * fit.layer_seconds
    link = hosted / (device.link or device.copy)
    waits = [np.maximum(link - fit.hidden * seconds, 0.0) for seconds in (forward, backward)]
    return LayerForecast(
        kept=of_sets(kept, size) + in_fp8 / parts.dtype.itemsize,  # a scale a token beside it is nothing
        hosted=hosted,
        leaving=leaving,
        arriving=arriving,
        work_forward=work_forward,
        work=np.maximum(np.maximum(at_feed_forward + (hosted + arriving), at_mixer + 2 * hosted), 0.0)
        + parts.dropout_bytes * tokens,
        forward=forward + waits[0] + fit.lost * link,
        backward=backward + waits[1] + fit.lost * link,
        recompute=again,
        wait=waits[0] + waits[1],
    )


def _remade(parts: StepCost, dropped, rounded, whole, of_kinds, seconds, device, tiles) -> tuple[float, ...]:
    """What a layer's recomputed residuals cost: seconds; and of the kind of layer that takes most, without what has
    come from the host, bytes at the feed-forward's backward, at the mixer's, and at the end of the forward.

    dropped, rounded: names of residuals that are computed again and that are kept in FP8; whole: {residual: bytes},
    of_kinds: the same of each kind of layer; seconds: (forward, backward) by segment.
    """

    def in_tiles(sizes):
        return sizes | {name: sizes[name] / tiles for name in parts.tiled if name in sizes}

    size = in_tiles(whole)
    recompute = 0.0
    for segment, (once, _) in zip(parts.segments, seconds, strict=True):
        missing = sum(size[name] for name in segment.outputs if name in dropped)
        if missing and not segment.ends and not segment.runs_again:
            share = missing / sum(size[name] for name in segment.outputs) if segment.separable else 1.0
            recompute += share * once
            if segment.decodes_once:
                recompute -= _decode_seconds(segment.work, device)
    at_feed_forward = at_mixer = -math.inf
    work_forward = 0.0
    for kind, sizes in zip(parts.kinds, of_kinds, strict=True):
        facts = Sizes(
            residuals=in_tiles(sizes),
            recomputed=frozenset((*dropped, *rounded)),  # what is kept in FP8 is there anew in the backward, too
            tiles=tiles,
            dtype=parts.dtype,
            length=parts.length,
            hopper=device.hopper,
            device=device.name,
        )
        moments = _backward_bytes(kind, facts)
        at_feed_forward, at_mixer = max(at_feed_forward, moments[0]), max(at_mixer, moments[1])
        work_forward = max(work_forward, kind.block.mlp.forward_bytes(facts))
    return recompute, at_feed_forward, at_mixer, work_forward


def _travelling(parts: StepCost, offloaded, whole, hosted: float, seconds, device) -> tuple[float, float]:
    """Bytes on their way at the feed-forward of the layer above: (forward, backward).

    Of what is offloaded, the largest leave first and come last: under the mixer, if they can.
    """
    travelling = [hosted, hosted]
    offloaded = sorted(offloaded, key=lambda name: whole[name], reverse=True)
    for direction in (0, 1):
        stages = [
            times[direction]
            for segment, times in zip(parts.segments, seconds, strict=True)
            if segment.in_mixer and not (direction and segment.first)
        ]
        room = _step_time(device).hidden * sum(stages) * (device.link or device.copy)
        for name in offloaded:
            if whole[name] > room:
                break
            room -= whole[name]
            travelling[direction] -= whole[name]
    return travelling[0], travelling[1]


def _backward_bytes(kind: LayerKind, sizes: Sizes) -> tuple[float, float]:
    """Bytes of what a layer recomputes and makes in its backward: at the feed-forward's, and at the mixer's."""
    dropped = {name: sizes[name] for name in kind.residuals if name in sizes.recomputed}
    total = sum(dropped.values())
    mixer, feed_forward = kind.block.mixer, kind.block.mlp
    scratch = feed_forward.backward_bytes(sizes)
    held = sum(held_bytes(sizes) for outputs, held_bytes in kind.held if not dropped.keys().isdisjoint(outputs))
    if scratch.covers_mixer:
        return -math.inf, scratch.own + mixer.waiting_bytes(sizes) + scratch.around + total + held
    first, *middle, last = kind.mixer_outputs
    at_feed_forward = total + scratch.own + held
    if not any(name in dropped for outputs in middle for name in outputs):  # then what these read is not made before
        at_feed_forward -= sum(dropped.get(name, 0.0) for name in first)
    at_mixer = total
    for name in kind.feed_forward_outputs:
        at_mixer -= dropped.get(name, 0.0)
    at_mixer += mixer.backward_bytes(sizes)
    if sizes.tiles > 1:
        at_mixer -= sum(dropped.get(name, 0.0) for name in last)
    return at_feed_forward + scratch.around, at_mixer


def forecast(parts: StepCost, plan: StepPlan, device: Device) -> Forecast:
    """Bytes and seconds of a step under `plan`."""
    cache: dict[LayerPlan, LayerForecast] = {}
    tokens = parts.rows / plan.micro_batches / parts.devices * parts.length
    for layer in plan.residuals.layers:
        if layer not in cache:
            cache[layer] = layer_forecast(parts, layer, tokens, device, plan.residuals.tile_tokens)
    groups = [(cache[layer], len(list(same))) for layer, same in itertools.groupby(plan.residuals.layers)]
    return _forecast(parts, plan, groups, head_forecast(parts, plan.chunk_tokens, tokens, device), tokens, device)


def gathered_bytes(parts: StepCost, whole_weights: int, resident: int = 0) -> tuple[float, float, float]:
    """Bytes of divided weights that are whole, and of their gradients: at the loss, in the forward and in the backward
    of a layer, where the next one's come beside its own. whole_weights, resident: as in ResidualPlan."""
    frozen = parts.frozen_layer_bytes

    def of(layers: int) -> float:
        return layers * (parts.whole_layer_bytes - frozen) + min(layers, parts.num_layers - resident) * frozen

    head = 0.0 if _all_resident(parts, resident) and not parts.head_trains else parts.whole_head_bytes
    layers = of(max(whole_weights, 2))
    return of(max(whole_weights, 1)) + head, layers, layers + parts.whole_gradient_bytes


def _all_resident(parts: StepCost, resident: int) -> bool:
    return resident == parts.num_layers


def head_forecast(parts: StepCost, chunk_tokens: int, tokens: float, device: Device) -> tuple[float, float]:
    """(bytes around the loss, seconds) of the head and the loss of a micro-batch."""
    rows = max(round(tokens / parts.length), 1)
    chunk = rows * chunk_length(rows, parts.length, int(chunk_tokens))
    hidden = tokens * parts.hidden_size * parts.dtype.itemsize
    logits = (chunk + -chunk % 8) * parts.vocab_size * (4.0 + parts.dtype.itemsize)  # XLA fills products up
    products = 3 if parts.head_trains else 2
    flops = 2.0 * products * parts.vocab_size * parts.hidden_size * tokens
    fit = _step_time(device)
    passes = tokens * parts.vocab_size * fit.logit_bytes / device.copy
    if parts.head_trains:  # the gradient's sum is read and written for every chunk
        passes += tokens / chunk * parts.vocab_size * parts.hidden_size * fit.head_gradient_bytes / device.copy
    seconds = flops / (device.gemm * chunk / (chunk + product_time(device).half_tokens)) + passes
    around = ALLOCATOR_BYTES.of("xla", device.name).loss * hidden
    return logits + around + parts.head_bytes, seconds


def _reference_seconds(parts: StepCost, tokens: float, head_seconds: float, device: Device) -> float:
    """Of one forward pass without residuals, and its head: a third of the head's products train nothing."""
    layer = layer_forecast(parts, KEEP, tokens, device)
    return layer.forward * parts.num_layers + head_seconds / (3 if parts.head_trains else 2)


def state_seconds(parts: StepCost, device: Device) -> float:
    """Of a step: the optimizer's states from the host and back, one after the other (optimizer_offload.py)."""
    return 2 * parts.hosted_bytes / (device.link or device.copy)


def _collective_seconds(parts: StepCost, plan, forward: float, backward: float, device) -> tuple[float, float]:
    """(all, exposed) of a step's collectives; forward, backward: seconds of all layers in a micro-batch."""
    of, rate, micro, fit = parts.exchange, device.peer, plan.micro_batches, _step_time(device)
    resident, trained = plan.residuals.resident, of.weights - of.frozen
    divided, whole = 1 - resident / parts.num_layers, max(plan.residuals.whole_weights, 1) / parts.num_layers
    weights = trained + of.frozen * divided
    again = trained * (1 - whole) + of.frozen * max(divided - whole, 0.0)
    around = of.around - (of.frozen_around if _all_resident(parts, resident) else 0.0)
    total = micro * (weights + again + of.gradients + around) / rate + of.sums / rate
    exposed = 0.0
    for size, above in ((weights, forward), (again + of.gradients, backward)):
        exposed += max(size / rate - fit.hidden * above, fit.collective_lost * size / rate)
    return total, micro * (exposed + around / rate) + of.sums / rate


def _forecast(parts: StepCost, plan, groups: list[tuple[LayerForecast, int]], head, tokens, device) -> Forecast:
    """groups: runs of layers with one plan, first layers first."""
    head_bytes, head_seconds = head
    kept = sum(layer.kept * count for layer, count in groups)
    # What the last layer should offload stays: the backward begins with it.
    last, before = groups[-1][0], groups[-1 if groups[-1][1] > 1 else max(len(groups) - 2, 0)][0]
    resident = plan.residuals.resident
    gathered = gathered_bytes(parts, plan.residuals.whole_weights, resident)
    leaving = bytes_with_gaps(before.leaving, device)
    moments = [
        ("the loss: logits of a chunk, hidden states", kept, head_bytes + last.hosted, gathered[0]),
        ("the forward of a layer", kept, last.hosted + last.work_forward + leaving, gathered[1]),
    ]
    below = arriving = 0.0
    for layer, count in groups:
        below += layer.kept * count
        more = max(arriving - layer.arriving, 0.0)  # under the lowest of these layers comes what another plan has
        moments.append(("the backward of a layer", below, layer.work + more, gathered[2]))
        arriving = layer.arriving
    what, residuals, work, whole = max(moments, key=lambda moment: sum(moment[1:]))
    bytes_ = {"kept residuals": residuals, what: work, "gathered weights": whole}
    if all(layer == KEEP for layer in plan.residuals.layers):
        bytes_["experts' adapters in the compute dtype"] = parts.shared_bytes
    if parts.cast_bytes:
        bytes_["trained weights in the compute dtype"] = parts.cast_bytes
    if parts.head_gradient_bytes and what.startswith("the backward"):
        bytes_["gradient of the head"] = parts.head_gradient_bytes
    micro = plan.micro_batches
    update = {"the update of the largest tensor": parts.update_bytes}
    if parts.devices > 1 and micro > 1:
        update["gradient sums of all devices"] = 4.0 * parts.trained
    if sum(update.values()) > sum(bytes_.values()):
        bytes_ = update
    bytes_ = {**parts.fixed, **bytes_}
    if resident:
        bytes_["frozen weights"] += parts.resident_bytes(resident)
    if micro == 1 and parts.less_sums:
        bytes_["gradient sums"] -= parts.less_sums
    forward = sum(layer.forward * count for layer, count in groups)
    backward = sum(layer.backward * count for layer, count in groups)
    collective, exposed = _collective_seconds(parts, plan, forward, backward, device)
    step = forward + backward + head_seconds
    if parts.reference_runs:
        step += parts.reference_runs * _reference_seconds(parts, tokens, head_seconds, device)
    update = max(parts.trained_here * 4.0 * 9 / device.copy, state_seconds(parts, device))
    return Forecast(
        plan=plan,
        parts={name: value for name, value in bytes_.items() if value},
        step_seconds=micro * (step + _step_time(device).micro_batch_seconds) + update + exposed,
        recompute_seconds=micro * sum(layer.recompute * count for layer, count in groups),
        wait_seconds=micro * sum(layer.wait * count for layer, count in groups),
        host_bytes=sum(layer.hosted * count for layer, count in groups) + parts.hosted_bytes,
        tokens=parts.rows * parts.length,
        collective_seconds=collective,
        exposed_seconds=exposed,
    )
