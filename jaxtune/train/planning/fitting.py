"""Advice by forecast: changes of the config with which a plan would fit, and the longest row that fits."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxtune.models.config import DecoderConfig
from jaxtune.models.decoder import Decoder
from jaxtune.models.stack.residual_plan import ResidualPlan
from jaxtune.system import timing
from jaxtune.train.config import AdapterConfig
from jaxtune.train.config.sections import HOSTED_OPTIMIZERS
from jaxtune.train.planning.choice import (
    CHUNK_LOGITS,
    PlanError,
    choose,
    smallest_plan,
    tile_tokens_of,
)
from jaxtune.train.planning.cost import StepCost, abstract_model, step_cost
from jaxtune.train.planning.devices import Device, card_gb
from jaxtune.train.planning.forecasts import forecast, head_forecast
from jaxtune.train.planning.host_room import HostError, beside_moved, places
from jaxtune.train.planning.layer_forecasts import bytes_with_gaps, layer_forecasts
from jaxtune.train.planning.movables.residuals import layer_plans
from jaxtune.train.planning.plan import StepPlan
from jaxtune.train.planning.step_spec import StepSpec


def fitting_settings(
    shape: DecoderConfig, spec: StepSpec, device: Device, budget_bytes: float, most: int = 3
) -> list[str]:
    """Changes, each of which alone lets a plan fit; least intrusive first, one for each key. If there are too few, the
    last entry is the memory of a card that would do ("a card of 24.0 GB").

      spec: with a user's optimizer no change of config.optim is proposed.
      device, budget_bytes: the card and the bytes of its memory that a plan may take. most: changes to return.
    """
    keeps, spec = spec.keeps_model, dataclasses.replace(spec, keeps_model=False)
    base, adapter, optim = spec.model.base, spec.model.adapter, spec.optim

    def of_model(**changes: Any) -> StepSpec:
        return dataclasses.replace(spec, model=dataclasses.replace(spec.model, **changes))

    def of_optim(**changes: Any) -> StepSpec:
        return dataclasses.replace(spec, optim=dataclasses.replace(optim, **changes))

    in_nf4 = dataclasses.replace(base, load_in="nf4") if base.from_config is None else None
    options: list[tuple[str, StepSpec]] = []
    if spec.micro_batches is not None or spec.memory.plan is not None:
        free = dataclasses.replace(spec, memory=dataclasses.replace(spec.memory, plan=None), micro_batches=None)
        options.append(("memory.plan=null micro_batches=null (the planner chooses)", free))
    if optim.name in ("adamw", "lion") and spec.optimizer is None:
        name = f"{optim.name}_8bit"
        options.append((f"optim.name={name}", of_optim(name=name)))
    hosted = optim.name in HOSTED_OPTIMIZERS and spec.optimizer is None
    if hosted and spec.max_grad_norm is not None and adapter is None and not optim.offload:
        options.append(("optim.offload=true", of_optim(offload=True)))
    if adapter is not None and base.load_in is None and in_nf4 is not None:
        options.append(("model.load_in=nf4", of_model(base=in_nf4)))
    if adapter is not None and adapter.target_parameters:
        alone = "adapter.target_parameters=null (no adapters on experts)"
        options.append((alone, of_model(adapter=dataclasses.replace(adapter, target_parameters=None))))
    length = spec.length // 2
    while length >= 256:
        options.append((f"data.length={length}", dataclasses.replace(spec, length=length)))
        length //= 2
    if adapter is None and not optim.offload and optim.weights != "bf16":  # an adapter refuses these
        options.append(("adapter={r: 16}", of_model(adapter=AdapterConfig())))
        if in_nf4 is not None:
            options.append(("adapter={r: 16} model.load_in=nf4", of_model(adapter=AdapterConfig(), base=in_nf4)))
    changes: list[str] = []
    models: dict[tuple, Decoder] = {}

    def parts_of(option: StepSpec) -> StepCost:
        key = (option.model.base, repr(option.model.adapter))
        if key not in models:
            models[key] = abstract_model(shape, option.model)
        costs = step_cost(models[key], option)
        return costs.without_last_resorts() if keeps else costs

    for text, option in options:
        key = text.split("=")[0]
        if len(changes) < most and not any(earlier.split("=")[0] == key for earlier in changes):
            with timing.phase("plan", "settings", f"planning: whether it fits with {text}"):
                try:
                    choose(parts_of(option), option, device, budget_bytes)
                except ValueError:
                    continue
            changes.append(text)
    if len(changes) < most:
        changes.append(f"a card of {card_gb(smallest_plan(parts_of(spec), spec, device).peak_bytes):.1f} GB")
    return changes


def _surely_fits(costs: StepCost, spec: StepSpec, device: Device, budget: float) -> bool | None:
    """Whether a plan of one micro-batch fits; None if that needs a search.

    It fits if one layer plan for all layers does. It does not if the least bytes with any price of host bytes (a
    Lagrange multiplier) are too many.
    """
    count, tokens, device = costs.shape.num_layers, costs.shape.tokens(1), beside_moved(costs, device)
    chunk = max(1, min(int(tokens), CHUNK_LOGITS[-1] // costs.shape.vocab_size))
    head, _ = head_forecast(costs, chunk, tokens, device)
    plans, room = layer_plans(costs, device.link > 0), budget - costs.fixed_bytes(1) - costs.layers.cast_bytes
    room -= min(costs.gathered_bytes) + costs.moved.streaming[0] + costs.layers.given_bytes * tokens
    sure: bool | None = False
    for tile in dict.fromkeys((tile_tokens_of(costs, spec), None)):
        forecasts = layer_forecasts(costs, plans.placed, tokens, device, tile)
        peak_work = np.maximum(
            np.maximum(head, forecasts.work_forward) + forecasts.hosted, forecasts.work + costs.head.gradient_bytes
        )
        alike = count * forecasts.kept + np.maximum(
            peak_work, forecasts.hosted + forecasts.work_forward + bytes_with_gaps(forecasts.leaving, device)
        )
        plan = plans[int(np.where(count * forecasts.hosted <= device.host_bytes, alike, np.inf).argmin())]
        uniform = StepPlan(ResidualPlan.uniform(plan, count, tile), 1, chunk, costs.moved.levels)
        if forecast(costs, uniform, device).peak_bytes <= budget:
            return True
        prices = np.array([[0.0], [0.5], [1.0], [2.0]])
        layer = forecasts.kept + prices * forecasts.hosted
        least = (count - 1) * layer.min(1) + (layer + peak_work).min(1) - prices[:, 0] * device.host_bytes
        sure = None if least.max() <= room else sure
    return sure


def longest_row(costs: StepCost, spec: StepSpec, device: Device, budget_bytes: float, step: int = 1024) -> int:
    """Tokens of the longest row, a multiple of `step` below 4,096 x `step`, with which some plan fits, with one row on
    each device and one micro-batch; 0 if none does. budget_bytes: of device memory.
    """

    def fits(length: int) -> bool:
        row = costs.reshaped(rows=costs.shape.devices, length=length)
        row_spec = dataclasses.replace(spec, rows=costs.shape.devices, micro_batches=1)
        if spec.memory.plan is None:
            sure = [_surely_fits(placed, row_spec, device, budget_bytes) for placed in places(row, device)]
            if True in sure or None not in sure:
                return True in sure
        try:
            choose(row, row_spec, device, budget_bytes, CHUNK_LOGITS[-1:])  # the fewest logits at a time
        except (PlanError, HostError):
            return False
        return True

    def tried(length: int) -> bool:
        with timing.phase("plan", "longest row", f"planning: whether a row of {length:,} tokens fits"):
            return fits(length)

    low, high = 0, 1
    while high < 4096 and tried(high * step):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tried(middle * step) else (low, middle)
    return low * step
