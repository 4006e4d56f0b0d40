"""Advice on what fits, by forecast: where no plan does, changes of the config with which one would, for the PlanError
(`fitting_settings`); and where one does, the longest row that fits, for the report of --plan (`longest_row`, which
`_surely_fits` makes fast)."""

from __future__ import annotations

import dataclasses

import numpy as np
import optax

from jaxtune.models.decoder import Decoder
from jaxtune.models.residual_plan import ResidualPlan
from jaxtune.train.config import AdapterConfig, TrainConfig
from jaxtune.train.config.sections import HOSTED_OPTIMIZERS
from jaxtune.train.planning.choice import (
    CHUNK_LOGITS,
    PlanError,
    choose,
    smallest_plan,
    tile_tokens_of,
    tokens_of,
)
from jaxtune.train.planning.cost import StepCost, abstract_model, step_cost
from jaxtune.train.planning.devices import Device, card_gb
from jaxtune.train.planning.forecasts import forecast, gathered_bytes, head_forecast
from jaxtune.train.planning.host_room import beside_states, places
from jaxtune.train.planning.layer_forecasts import bytes_with_gaps, layer_forecasts
from jaxtune.train.planning.layer_plans import layer_plans
from jaxtune.train.planning.plan import StepPlan


def fitting_settings(
    shape,
    config: TrainConfig,
    device: Device,
    budget_bytes: float,
    wanted: int = 3,
    optimizer: optax.GradientTransformation | None = None,
    reference_runs: int = 0,
) -> list[str]:
    """Up to `wanted` changes of the config, each of which alone lets a plan fit by forecast; the least intrusive first.
    Of changes that begin with the same key, only the first that fits is taken (such as the longest data.length). A
    PlanError shows them; none is applied.

    Args:
      shape: the model's DecoderConfig.
      config: the config for which nothing fits.
      device: the device.
      budget_bytes: the bytes of its memory that a step may take.
      wanted: how many changes to look for.
      optimizer: updates the weights; None: the one that config.optim asks for. With one of the caller's own, no change
        of config.optim is proposed.
      reference_runs: how many forward passes of a frozen reference model each loss has.
    Returns:
      changes as they are written on the command line, such as "model.load_in=nf4", some with a remark in parentheses;
        if there are fewer than `wanted`, one more entry is the memory of a device on which the config as it is would
        fit, such as "a card of 24.0 GB".
    """

    def changed(section: str, **values) -> TrainConfig:
        """The config with these values in its section `section`, such as memory."""
        return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})

    options: list[tuple[str, TrainConfig]] = []
    if config.micro_batches is not None or config.memory.plan is not None:
        free = dataclasses.replace(changed("memory", plan=None), micro_batches=None)
        options.append(("memory.plan=null micro_batches=null (the planner chooses)", free))
    if config.optim.name in ("adamw", "lion") and optimizer is None:
        name = f"{config.optim.name}_8bit"
        options.append((f"optim.name={name}", changed("optim", name=name)))
    hosted = config.optim.name in HOSTED_OPTIMIZERS and optimizer is None
    if hosted and config.max_grad_norm is not None and config.adapter is None and not config.optim.offload:
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
        adapted = dataclasses.replace(config, adapter=AdapterConfig())
        options.append(("adapter={r: 16}", adapted))
        if config.model.from_config is None:
            model = dataclasses.replace(config.model, load_in="nf4")
            options.append(("adapter={r: 16} model.load_in=nf4", dataclasses.replace(adapted, model=model)))
    found: list[str] = []
    models: dict[tuple, Decoder] = {}

    def parts_of(option: TrainConfig) -> StepCost:
        """The costs of a step with the config `option`; models with the same weights and adapters are made once."""
        key = (option.model, repr(option.adapter))
        if key not in models:
            models[key] = abstract_model(shape, option)
        return step_cost(models[key], option, optimizer=optimizer, reference_runs=reference_runs)

    for text, option in options:
        key = text.split("=")[0]
        if len(found) < wanted and not any(other.split("=")[0] == key for other in found):
            try:
                choose(parts_of(option), option, device, budget_bytes)
            except ValueError:
                continue
            found.append(text)
    if len(found) < wanted:
        found.append(f"a card of {card_gb(smallest_plan(parts_of(config), config, device).peak_bytes):.1f} GB")
    return found


def _surely_fits(parts: StepCost, config: TrainConfig, device: Device, budget: float) -> bool | None:
    """Whether some plan of one micro-batch fits `budget` bytes of `device` (True) or none does (False), if that can be
    decided without a search; None if it cannot. It makes longest_row fast, which calls it if config.memory.plan is
    not set: plans are free here. parts: the step's costs. config: the run's, of which only dropout counts.

    A step fits if a plan that is the same for all layers does. It does not fit if the least bytes of layers under any
    plans are too many. For the second test, bytes on the host get a price in bytes on the device (a Lagrange
    multiplier): at any price, a mixture of plans that fits the host keeps at least the minimum of both combined minus
    the price of the host's room."""
    count, device = parts.num_layers, beside_states(parts, device)
    chunk = max(1, min(int(tokens_of(parts, 1)), CHUNK_LOGITS[-1] // parts.vocab_size))
    head, _ = head_forecast(parts, chunk, tokens_of(parts, 1), device)
    plans, room = layer_plans(parts, device.link > 0), budget - parts.fixed_bytes(1) - parts.cast_bytes
    room -= min(gathered_bytes(parts, 0)) + parts.given_bytes * tokens_of(parts, 1)
    sure: bool | None = False
    for tile in dict.fromkeys((tile_tokens_of(parts, config), None)):
        of = layer_forecasts(parts, plans.placed, tokens_of(parts, 1), device, tile)
        own = np.maximum(np.maximum(head, of.work_forward) + of.hosted, of.work + parts.head_gradient_bytes)
        alike = count * of.kept + np.maximum(own, of.hosted + of.work_forward + bytes_with_gaps(of.leaving, device))
        plan = plans[int(np.where(count * of.hosted <= device.host_bytes, alike, np.inf).argmin())]
        uniform = StepPlan(ResidualPlan.uniform(plan, count, tile), 1, chunk, *parts.places)
        if forecast(parts, uniform, device).peak_bytes <= budget:
            return True
        prices = np.array([[0.0], [0.5], [1.0], [2.0]])
        layer = of.kept + prices * of.hosted
        least = (count - 1) * layer.min(1) + (layer + own).min(1) - prices[:, 0] * device.host_bytes
        sure = None if least.max() <= room else sure
    return sure


def longest_row(parts: StepCost, config: TrainConfig, device: Device, budget_bytes: float, step: int = 1024) -> int:
    """The longest single row with which some plan fits by forecast, for the report of --plan alone: it limits no run.
    The step then has one row on each device and one micro-batch; what config.memory.plan sets stays.

    Args:
      parts: the step's costs.
      config: the run's.
      device: the device.
      budget_bytes: the bytes of its memory that a step may take.
      step: the result is a multiple of this number of tokens.
    Returns:
      tokens of a row, less than 4,096 times `step`; 0 if no row of `step` tokens fits.
    """

    def fits(length: int) -> bool:
        """Whether some plan fits with rows of `length` tokens."""
        row = dataclasses.replace(parts, rows=parts.devices, length=length)
        one = dataclasses.replace(config, rows_per_step=parts.devices, micro_batches=1)
        if config.memory.plan is None:
            sure = [_surely_fits(placed, one, device, budget_bytes) for placed in places(row, device)]
            if True in sure or None not in sure:
                return True in sure
        try:
            choose(row, one, device, budget_bytes, CHUNK_LOGITS[-1:])  # the fewest logits at a time
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
