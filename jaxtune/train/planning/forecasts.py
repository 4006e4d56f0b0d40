"""Forecasts of a step's bytes and seconds under a plan."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

import numpy as np

from jaxtune.models.fitted import ALLOCATOR_BYTES
from jaxtune.models.stack.residual_plan import KEEP, RECOMPUTE
from jaxtune.pallas.linear_cross_entropy import chunk_length
from jaxtune.train.planning.cost import StepCost
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.layer_forecasts import (
    LayerForecast,
    bytes_with_gaps,
    layer_forecast,
    product_time,
    step_time,
)
from jaxtune.train.planning.parts import StepParts
from jaxtune.train.planning.plan import StepPlan
from jaxtune.train.planning.sums_memory import in_sums

STREAMED = "weights that arrive from the host"


# What happens, then summands of its bytes: residuals, work, weights, and, negative, what is then in the memory of the
# gradients' sums, which counts with these.
type Moment = tuple[str, float, float, float, float]


@dataclasses.dataclass(frozen=True)
class Forecast:
    plan: StepPlan  # the plan that is forecast
    parts: Mapping[str, float]  # {what: device bytes} at the moment of the peak
    device_seconds: float  # the whole step on the device, by which plans are chosen
    host_seconds: float  # in which the host launches a step, while the device computes the one before
    recompute_seconds: float  # the part of device_seconds that recomputes residuals
    wait_seconds: float  # the part of device_seconds that waits for residuals on the host link
    host_bytes: float  # pinned host memory for one device
    tokens: int  # of the step on all devices, padding included
    collective_seconds: float = 0.0  # of all collectives, hidden or not
    exposed_seconds: float = 0.0  # the part of device_seconds that waits for collectives

    @property
    def peak_bytes(self) -> float:
        return sum(self.parts.values())

    @property
    def step_seconds(self) -> float:
        return max(self.device_seconds, self.host_seconds)

    @property
    def tokens_per_second(self) -> float:
        """On all devices, padding included."""
        return self.tokens / self.step_seconds


def forecast(costs: StepCost, plan: StepPlan, device: Device) -> Forecast:
    costs = costs.placed(plan.moved)
    tokens = costs.shape.tokens(plan.micro_batches)
    different, tile = dict.fromkeys(plan.residuals.layers), plan.residuals.tile_tokens
    cache = {layer: layer_forecast(costs, layer, tokens, device, tile) for layer in different}
    groups = [(cache[layer], len(list(group))) for layer, group in itertools.groupby(plan.residuals.layers)]
    return _forecast(costs, plan, groups, head_forecast(costs, plan.chunk_tokens, tokens, device), tokens, device)


def streamed_bytes(costs: StepParts, kept, backward, device: Device) -> tuple:
    """Device bytes of weights that stream: at the loss, where the last layer's stay; in the last layer's forward, or
    the one before with the last one's beside; in a layer's backward, in which the next one's arrive at its end.

      kept, backward: bytes and seconds of layers, numbers or arrays.
    """
    layer, next_layer, piece = costs.moved.streaming
    if not layer:
        return 0.0, 0.0, 0.0
    late = next_layer / (device.link * backward) if device.link else 1.0
    # Whole matrices arrive: where copies begin in the first half of a backward, the next one is there at its peak.
    matrix = np.where((late > 0.5) | (piece >= next_layer), piece, 0.0)
    arrived = np.minimum(next_layer * late + matrix, next_layer)
    return layer, layer + np.maximum(next_layer - kept, 0.0), layer + arrived


def head_forecast(costs: StepParts, chunk_tokens: int, tokens: float, device: Device) -> tuple[float, float]:
    """(device bytes at the loss, seconds) of output head and loss for a micro-batch. tokens: a mean over devices,
    perhaps a fraction. chunk_tokens: tokens whose logits exist at a time.
    """
    shape, head = costs.shape, costs.head
    rows = max(round(tokens / shape.length), 1)
    chunk = rows * chunk_length(rows, shape.length, int(chunk_tokens))
    hidden = tokens * shape.hidden_size * shape.dtype.itemsize
    head_parts, logit_parts = head.parts_bytes(shape, device)
    logits = (chunk + -chunk % 8) * shape.vocab_size * (head.logit_bytes + logit_parts)  # XLA pads to a multiple of 8
    products = 3 if head.trains else 2
    flops = 2.0 * products * shape.vocab_size * shape.hidden_size * tokens * head.time(shape.dtype, device)
    fit = step_time(device)
    passes = tokens * shape.vocab_size * fit.logit_bytes / device.copy
    if head.trains:  # every chunk reads and writes the gradient's sum
        passes += tokens / chunk * shape.vocab_size * shape.hidden_size * fit.head_gradient_bytes / device.copy
    seconds = flops / (device.gemm * chunk / (chunk + product_time(device).half_tokens)) + passes
    # With one chunk there is a new gradient.
    loss_buffers = (ALLOCATOR_BYTES.of("xla", device.name).loss + (chunk >= tokens)) * hidden
    return logits + loss_buffers + head.bytes + head_parts, seconds


def _reference_forecast(costs: StepParts, plan: StepPlan, tokens: float, device: Device) -> tuple[float, float]:
    """(seconds, bytes of a layer's values) of a frozen model's forward. costs: of that model."""
    layer, head = layer_forecast(costs, KEEP, tokens, device), head_forecast(costs, plan.chunk_tokens, tokens, device)
    seconds = layer.forward * costs.shape.num_layers + head[1] / (3 if costs.head.trains else 2)
    return seconds, layer.kept + layer.work_forward


def pass_seconds(costs: StepCost, plan: StepPlan, device: Device) -> float:
    """Of a pass without a backward over a step's rows under a plan, such as a reference's or an evaluation's; a layer
    takes as long as its products or its weights on the link, whichever is longer.
    """
    costs = costs.placed(plan.moved)
    seconds, _ = _reference_forecast(costs, plan, costs.shape.tokens(plan.micro_batches), device)
    return plan.micro_batches * seconds


@dataclasses.dataclass(frozen=True)
class TowerForecast:
    """Of a micro-batch."""

    seconds: float = 0.0
    forward: float = 0.0  # device bytes of its forward
    backward: float = 0.0  # of its layers' backward, beside Tower.kept; 0 for a frozen one


def tower_forecast(costs: StepParts, micro_batches: int, device: Device) -> TowerForecast:
    if (tower := costs.tower) is None:
        return TowerForecast()
    step_costs = tower.parts
    patches = step_costs.shape.tokens(micro_batches)
    embeddings = costs.shape.tokens(micro_batches) * costs.shape.hidden_size * costs.shape.dtype.itemsize
    merger = tower.merger_flops * patches / device.gemm
    forward, backward = merger, 2.0 * merger
    again = 0 if costs.teacher else costs.reference_runs  # a reference has the features of a frozen tower
    if not step_costs.shape.num_layers:
        return TowerForecast(forward + (backward + again * forward if tower.trains else 0.0), embeddings)
    keeping, layer = (layer_forecast(step_costs, plan, patches, device) for plan in (KEEP, RECOMPUTE))
    forward += step_costs.shape.num_layers * layer.forward
    backward += step_costs.shape.num_layers * layer.backward
    return TowerForecast(
        seconds=forward + (backward + again * forward if tower.trains else 0.0),
        forward=keeping.work_forward + embeddings,
        backward=layer.work - tower.of_merger * patches if tower.trains else 0.0,
    )


def _collective_seconds(costs: StepCost, plan, forward: float, backward: float, device) -> tuple[float, float]:
    """(seconds of all collectives of a step, seconds in which it waits for them)."""
    divided, layers = costs.divided, costs.shape.num_layers
    exchange, rate, micro, fit = divided.exchange, device.peer, plan.micro_batches, step_time(device)
    trained = exchange.weights - exchange.frozen
    share, whole_share = 1 - divided.resident / layers, max(divided.whole, 1) / layers
    weights = trained + exchange.frozen * share
    again = trained * (1 - whole_share) + exchange.frozen * max(share - whole_share, 0.0)
    embedding_and_head = exchange.around - (exchange.frozen_around if divided.resident == layers else 0.0)
    total = micro * (weights + again + exchange.gradients + embedding_and_head) / rate + exchange.sums / rate
    exposed = 0.0
    for size, above in ((weights, forward), (again + exchange.gradients, backward)):
        exposed += max(size / rate - fit.hidden * above, fit.collective_lost * size / rate)
    return total, micro * (exposed + embedding_and_head / rate) + exchange.sums / rate


def _host_seconds(costs: StepCost, micro_batches: int, device: Device) -> float:
    fit, passes = step_time(device), 1 + costs.reference_runs / 3  # a forward launches a third of a layer
    layers = costs.shape.num_layers * fit.host_layer_seconds * passes
    if costs.tower is not None:
        of_tower = costs.tower.parts.shape.num_layers * fit.host_layer_seconds
        layers += of_tower if costs.tower.trains else of_tower / 3
    return fit.host_step_seconds + micro_batches * (fit.host_micro_batch_seconds + layers)


def _moments(
    costs: StepCost,
    plan,
    groups: list[tuple[LayerForecast, int]],
    head_bytes: float,
    teacher_bytes: float,
    towers: tuple[TowerForecast, TowerForecast],
    tokens,
    device,
) -> list[Moment]:
    """Those at which memory may be fullest. towers: of the model, and of the teacher."""
    kept_bytes = sum(layer.kept * count for layer, count in groups)
    # The last layer's residuals are not offloaded, because the backward starts with them.
    last, count = groups[-1]
    before = last if count > 1 else groups[max(len(groups) - 2, 0)][0]
    leaving = bytes_with_gaps(before.leaving, device)
    gathered, streamed = costs.gathered_bytes, streamed_bytes(costs, last.kept, last.row_backward, device)
    at_loss, at_forward = gathered[0] + streamed[0], gathered[1] + streamed[1]
    of_model = costs.layers.kinds, costs.layers.kind_counts, costs.layers.all_residuals, costs.layers.cast_bytes
    lying = in_sums(costs.update.sums, *of_model, plan.residuals, plan.micro_batches, tokens)
    reused_bytes = -lying(costs.shape.num_layers, False)
    moments: list[Moment] = [
        ("the loss: logits of a chunk, hidden states", kept_bytes, head_bytes + last.hosted, at_loss, reused_bytes),
        ("the forward of a layer", kept_bytes, last.hosted + last.work_forward + leaving, at_forward, reused_bytes),
    ]
    (tower, teachers), teacher = towers, costs.teacher
    if teacher:
        of_teacher = last.hosted + teacher_bytes, teacher.gathered_bytes[1]
        moments.append(("the forward of the teacher", kept_bytes, *of_teacher, reused_bytes))
    if teacher and teacher.tower:
        of_tower = teacher.tower.parts.gathered_bytes
        moments.append(("the forward of the teacher's tower", kept_bytes, teachers.forward, of_tower[1], 0.0))
    if costs.tower:
        again = costs.tower.trains and costs.reference_runs and not teacher  # beside all residuals
        of_tower = costs.tower.parts.gathered_bytes
        moments.append(("the forward of the tower", kept_bytes if again else 0.0, tower.forward, of_tower[1], 0.0))
        if costs.tower.trains:
            moments.append(("the backward of the tower", 0.0, tower.backward, of_tower[2], 0.0))
    below, above, layers = 0.0, 0.0, 0
    for layer, count in groups:
        below += layer.kept * count
        layers += count
        # The layer below, under another plan, has more bytes arriving.
        added_bytes = max(above - layer.arriving, 0.0)
        weights = gathered[2] + streamed_bytes(costs, layer.kept, layer.row_backward, device)[2]
        moments.append(("the backward of a layer", below, layer.work + added_bytes, weights, -lying(layers, True)))
        above = layer.arriving
    return moments


def _bytes_at(peak: Moment, costs: StepCost, plan, tokens) -> dict[str, float]:
    """The bytes of the fullest moment, or of the update if these are more."""
    moment, residuals, work, weights, reused_bytes = peak
    micro, model = plan.micro_batches, costs.layers
    arrived = STREAMED if any(costs.moved.streaming) else "gathered weights"
    bytes_ = {"kept residuals": residuals, moment: work, arrived: float(weights)}
    if all(layer == KEEP for layer in plan.residuals.layers):
        bytes_["experts' adapters for the kernels"] = model.shared
    of_tower = 0.0 if costs.tower is None else costs.tower.kept * costs.tower.parts.shape.tokens(micro)
    bytes_["values of the tower"] = of_tower
    bytes_["values that layers take from outside"] = model.given_bytes * tokens - of_tower
    bytes_["trainable weights in the compute dtype"] = model.cast_bytes
    if costs.head.gradient_bytes and moment.startswith("the backward"):
        bytes_["gradient of the head"] = costs.head.gradient_bytes
    update = {"the update": costs.update.bytes}
    if costs.shape.devices > 1 and (micro > 1 or costs.update.sync_bytes):
        update["gradient sums of all devices"] = costs.update.sync_bytes or 4.0 * costs.update.trained
    if sum(update.values()) > sum(bytes_.values()) + reused_bytes:
        bytes_, reused_bytes = update, 0.0
    bytes_ = {**costs.fixed, **bytes_}
    if sums_change := reused_bytes - (costs.update.less_sums if micro == 1 else 0.0):
        bytes_["gradient sums"] += sums_change
    return bytes_


def _forecast(costs: StepCost, plan, groups: list[tuple[LayerForecast, int]], head, tokens, device) -> Forecast:
    """The forecast of a step. groups: (forecast of a layer, number of layers). head: (bytes, seconds)."""
    head_bytes, head_seconds = head
    reference = (0.0, 0.0)
    if costs.reference_runs:
        reference = _reference_forecast(costs.teacher or costs, plan, tokens, device)
    if costs.teacher:
        head_bytes += tokens * costs.teacher.shape.hidden_size * costs.shape.dtype.itemsize
    micro = plan.micro_batches
    tower, teachers = tower_forecast(costs, micro, device), TowerForecast()
    if costs.teacher and costs.teacher.tower:
        teachers = tower_forecast(costs.teacher, micro, device)
    moments = _moments(costs, plan, groups, head_bytes, reference[1], (tower, teachers), tokens, device)
    peak = max(moments, key=lambda moment: sum(moment[1:]))
    forward = sum(layer.forward * count for layer, count in groups)
    backward = sum(layer.backward * count for layer, count in groups)
    collective, exposed = _collective_seconds(costs, plan, forward, backward, device)
    added = [movable.seconds(costs, device) for movable in costs.movables.values()]
    step = forward + backward + head_seconds + costs.reference_runs * (reference[0] + teachers.seconds) + tower.seconds
    step += sum(each.micro_batch for each in added)
    update = max(costs.update.trained_here * 4.0 * 9 / device.copy, sum(each.update for each in added))
    seconds = micro * (step + step_time(device).micro_batch_seconds) + update + exposed
    return Forecast(
        plan=plan,
        parts={name: value for name, value in _bytes_at(peak, costs, plan, tokens).items() if value},
        device_seconds=max(seconds, *(each.beside for each in added)),
        host_seconds=_host_seconds(costs, micro, device),
        recompute_seconds=micro * sum(layer.recompute * count for layer, count in groups),
        wait_seconds=micro * sum(layer.wait * count for layer, count in groups),
        host_bytes=sum(layer.hosted * count for layer, count in groups) + costs.moved.pinned_bytes,
        tokens=costs.shape.rows * costs.shape.length,
        collective_seconds=collective,
        exposed_seconds=exposed,
    )
