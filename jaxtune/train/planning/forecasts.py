"""Forecasts of a step's bytes and seconds under a plan."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

from jaxtune.models.fitted import ALLOCATOR_BYTES
from jaxtune.models.stack.residual_plan import KEEP
from jaxtune.pallas.linear_cross_entropy import chunk_length
from jaxtune.train.planning.cost import StepCost
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.host_table import rows_seconds
from jaxtune.train.planning.layer_forecasts import (
    LayerForecast,
    bytes_with_gaps,
    layer_forecast,
    product_time,
    step_time,
)
from jaxtune.train.planning.plan import StepPlan
from jaxtune.train.planning.sums_memory import in_sums


@dataclasses.dataclass(frozen=True)
class Forecast:
    plan: StepPlan  # the plan that is forecast
    parts: Mapping[str, float]  # {what: device bytes} at the moment of the peak
    step_seconds: float  # the whole step
    recompute_seconds: float  # the part of step_seconds that recomputes residuals
    wait_seconds: float  # the part of step_seconds that waits for residuals on the host link
    host_bytes: float  # pinned host memory for one device: offloaded residuals and optimizer states
    tokens: int  # of the step on all devices, padding included
    collective_seconds: float = 0.0  # of all collectives, hidden or not
    exposed_seconds: float = 0.0  # the part of step_seconds that waits for collectives

    @property
    def peak_bytes(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """On all devices, padding included."""
        return self.tokens / self.step_seconds


def forecast(costs: StepCost, plan: StepPlan, device: Device) -> Forecast:
    costs = costs.placed(plan)
    tokens = costs.rows / plan.micro_batches / costs.devices * costs.length
    different, tile = dict.fromkeys(plan.residuals.layers), plan.residuals.tile_tokens
    cache = {layer: layer_forecast(costs, layer, tokens, device, tile) for layer in different}
    groups = [(cache[layer], len(list(group))) for layer, group in itertools.groupby(plan.residuals.layers)]
    return _forecast(costs, plan, groups, head_forecast(costs, plan.chunk_tokens, tokens, device), tokens, device)


def with_codes(costs: StepCost, base_forecast: Forecast, device: Device) -> Forecast:
    """The plan with transposed codes of frozen FP8 weights kept, if that is faster. Hopper only: its kernel reads the
    codes where they are; elsewhere they would be joined in each step. base_forecast: of the same plan without them.
    """
    if not (costs.codes_bytes and device.hopper):
        return base_forecast
    codes_forecast = forecast(costs, dataclasses.replace(base_forecast.plan, transposed_codes=True), device)
    return codes_forecast if codes_forecast.step_seconds < base_forecast.step_seconds else base_forecast


def codes_seconds(costs: StepCost, device: Device) -> float:
    """Seconds that kept transposed codes save in a micro-batch: a copy of codes takes as long as decoding them
    (FP8.decoded_share).
    """
    fit = product_time(device)
    return costs.transposed_codes * costs.codes_bytes * fit.decoded_bytes / (device.copy * fit.decoded_share)


def gathered_bytes(costs: StepCost, whole_weights: int, resident: int = 0) -> tuple[float, float, float]:
    """Bytes of gathered weights (at the loss, in a layer's forward, in its backward with gradients). The loss has one
    layer's and the head's, the others two layers' (the next ones arrive), or those of `whole_weights` layers if more.
    `resident` layers' frozen weights do not count. 0 if undivided.
    """
    frozen = costs.frozen_layer_bytes

    def of(layers: int) -> float:
        return layers * (costs.whole_layer_bytes - frozen) + min(layers, costs.num_layers - resident) * frozen

    head = 0.0 if _all_resident(costs, resident) and not costs.head_trains else costs.whole_head_bytes
    layers = of(max(whole_weights, 2))
    return of(max(whole_weights, 1)) + head, layers, layers + costs.whole_gradient_bytes


def _all_resident(costs: StepCost, resident: int) -> bool:
    """Then the frozen embedding and head are whole, too."""
    return resident == costs.num_layers


def head_forecast(costs: StepCost, chunk_tokens: int, tokens: float, device: Device) -> tuple[float, float]:
    """(device bytes at the loss, seconds) of output head and loss for a micro-batch. tokens: a mean over devices,
    perhaps a fraction. chunk_tokens: tokens whose logits exist at a time.
    """
    rows = max(round(tokens / costs.length), 1)
    chunk = rows * chunk_length(rows, costs.length, int(chunk_tokens))
    hidden = tokens * costs.hidden_size * costs.dtype.itemsize
    head_parts, logit_parts = costs.head_parts_bytes(device)
    logits = (chunk + -chunk % 8) * costs.vocab_size * (costs.logit_bytes + logit_parts)  # XLA pads to a multiple of 8
    products = 3 if costs.head_trains else 2
    flops = 2.0 * products * costs.vocab_size * costs.hidden_size * tokens * costs.head_time(device)
    fit = step_time(device)
    passes = tokens * costs.vocab_size * fit.logit_bytes / device.copy
    if costs.head_trains:  # every chunk reads and writes the gradient's sum
        passes += tokens / chunk * costs.vocab_size * costs.hidden_size * fit.head_gradient_bytes / device.copy
    seconds = flops / (device.gemm * chunk / (chunk + product_time(device).half_tokens)) + passes
    # With one chunk there is a new gradient.
    loss_buffers = (ALLOCATOR_BYTES.of("xla", device.name).loss + (chunk >= tokens)) * hidden
    return logits + loss_buffers + costs.head_bytes + head_parts, seconds


def _reference_forecast(costs: StepCost, plan: StepPlan, tokens: float, device: Device) -> tuple[float, float]:
    """(seconds, bytes of a layer's values) of a frozen model's forward; its head takes one of the products that
    head_forecast counts. costs: of that model.
    """
    layer, head = layer_forecast(costs, KEEP, tokens, device), head_forecast(costs, plan.chunk_tokens, tokens, device)
    seconds = layer.forward * costs.num_layers + head[1] / (3 if costs.head_trains else 2)
    return seconds, layer.kept + layer.work_forward


def state_seconds(costs: StepCost, device: Device) -> float:
    """Seconds a step to copy optimizer states from the host and back. They overlap with the update."""
    copies = costs.states.arrays * costs.states_on_host * step_time(device).copy_seconds
    return 2 * (copies + costs.hosted_bytes / (device.link or device.copy))


def _collective_seconds(costs: StepCost, plan, forward: float, backward: float, device) -> tuple[float, float]:
    """(seconds of all collectives of a step, seconds in which it waits for them). forward, backward: of all layers in a
    micro-batch, when collectives can run.
    """
    exchange, rate, micro, fit = costs.exchange, device.peer, plan.micro_batches, step_time(device)
    resident, trained = plan.residuals.resident, exchange.weights - exchange.frozen
    divided, whole_share = 1 - resident / costs.num_layers, max(plan.residuals.whole_weights, 1) / costs.num_layers
    weights = trained + exchange.frozen * divided
    again = trained * (1 - whole_share) + exchange.frozen * max(divided - whole_share, 0.0)
    embedding_and_head = exchange.around - (exchange.frozen_around if _all_resident(costs, resident) else 0.0)
    total = micro * (weights + again + exchange.gradients + embedding_and_head) / rate + exchange.sums / rate
    exposed = 0.0
    for size, above in ((weights, forward), (again + exchange.gradients, backward)):
        exposed += max(size / rate - fit.hidden * above, fit.collective_lost * size / rate)
    return total, micro * (exposed + embedding_and_head / rate) + exchange.sums / rate


def _forecast(costs: StepCost, plan, groups: list[tuple[LayerForecast, int]], head, tokens, device) -> Forecast:
    """The forecast of a step. groups: (forecast of a layer, number of layers) of consecutive layers with one plan.
    head: (bytes, seconds).
    """
    head_bytes, head_seconds = head
    reference = (0.0, 0.0)
    if costs.reference_runs:
        reference = _reference_forecast(costs.teacher or costs, plan, tokens, device)
    if costs.teacher:
        head_bytes += tokens * costs.teacher.hidden_size * costs.dtype.itemsize
    kept_bytes = sum(layer.kept * count for layer, count in groups)
    # The last layer's residuals are not offloaded, because the backward starts with them.
    last, count = groups[-1]
    before = last if count > 1 else groups[max(len(groups) - 2, 0)][0]
    micro, resident = plan.micro_batches, plan.residuals.resident
    gathered = gathered_bytes(costs, plan.residuals.whole_weights, resident)
    leaving = bytes_with_gaps(before.leaving, device)
    lying = in_sums(costs.sums, costs.kinds, costs.kind_counts, costs.all_residuals, costs.cast_bytes, plan, tokens)
    # Each moment: what it is, then summands of its bytes. The last is negative: what is then in the sums' memory, which
    # counts with the sums.
    reused_bytes = -lying(costs.num_layers, False)
    moments = [
        ("the loss: logits of a chunk, hidden states", kept_bytes, head_bytes + last.hosted, gathered[0], reused_bytes),
        ("the forward of a layer", kept_bytes, last.hosted + last.work_forward + leaving, gathered[1], reused_bytes),
    ]
    if costs.teacher:
        moments.append(
            ("the forward of the teacher", kept_bytes, last.hosted + reference[1], gathered[1], reused_bytes)
        )
    below, arriving, layers = 0.0, 0.0, 0
    for layer, count in groups:
        below += layer.kept * count
        layers += count
        # The layer below, under another plan, has more bytes arriving.
        added_bytes = max(arriving - layer.arriving, 0.0)
        moments.append(("the backward of a layer", below, layer.work + added_bytes, gathered[2], -lying(layers, True)))
        arriving = layer.arriving
    peak_moment, residuals, work, gathered_weights, reused_bytes = max(moments, key=lambda moment: sum(moment[1:]))
    bytes_ = {"kept residuals": residuals, peak_moment: work, "gathered weights": gathered_weights}
    if all(layer == KEEP for layer in plan.residuals.layers):
        bytes_["experts' adapters for the kernels"] = costs.shared
    bytes_["values that layers take from outside"] = costs.given_bytes * tokens
    bytes_["trainable weights in the compute dtype"] = costs.cast_bytes
    if costs.head_gradient_bytes and peak_moment.startswith("the backward"):
        bytes_["gradient of the head"] = costs.head_gradient_bytes
    update = {"the update": costs.update_bytes}
    if costs.devices > 1 and (micro > 1 or costs.sync_bytes):
        update["gradient sums of all devices"] = costs.sync_bytes or 4.0 * costs.trained
    if sum(update.values()) > sum(bytes_.values()) + reused_bytes:
        bytes_, reused_bytes = update, 0.0
    bytes_ = {**costs.fixed, **bytes_}
    sums_change = reused_bytes - (costs.less_sums if micro == 1 else 0.0)
    for name, added_bytes in (("frozen weights", costs.resident_bytes(resident)), ("gradient sums", sums_change)):
        bytes_ |= {name: bytes_[name] + added_bytes} if added_bytes else {}
    forward = sum(layer.forward * count for layer, count in groups)
    backward = sum(layer.backward * count for layer, count in groups)
    collective, exposed = _collective_seconds(costs, plan, forward, backward, device)
    step = forward + backward + head_seconds + costs.reference_runs * reference[0] - codes_seconds(costs, device)
    update = max(costs.trained_here * 4.0 * 9 / device.copy, state_seconds(costs, device))
    seconds = micro * (step + step_time(device).micro_batch_seconds) + update + exposed
    return Forecast(
        plan=plan,
        parts={name: value for name, value in bytes_.items() if value},
        step_seconds=max(seconds, rows_seconds(costs.table_rows_bytes, costs.devices, device)),
        recompute_seconds=micro * sum(layer.recompute * count for layer, count in groups),
        wait_seconds=micro * sum(layer.wait * count for layer, count in groups),
        host_bytes=sum(layer.hosted * count for layer, count in groups) + costs.hosted_bytes,
        tokens=costs.rows * costs.length,
        collective_seconds=collective,
        exposed_seconds=exposed,
    )
