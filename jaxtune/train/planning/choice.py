"""The choice of the fastest plan that fits, by forecast. A plan is a pair of layer plans, one for the first layers,
whose residuals live longest, and one for the rest. Pairs are formed of layer plans that no other beats in every figure,
without those that resemble failed plans.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxtune.models.stack.residual_plan import PLACEMENTS, LayerPlan, ResidualPlan
from jaxtune.train.config import TrainConfig
from jaxtune.train.planning.cost import StepCost
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.forecasts import Forecast, forecast, gathered_bytes, head_forecast, with_codes
from jaxtune.train.planning.host_room import beside_states, places
from jaxtune.train.planning.layer_forecasts import LayerForecast, bytes_with_gaps, layer_forecasts
from jaxtune.train.planning.layer_plans import LayerPlans, layer_plans
from jaxtune.train.planning.plan import StepPlan, parse_residuals

_TILE_TOKENS = 16384  # the MLPs of a long row run over at most this many tokens at a time
# This many pairs of layer plans are computed at a time. Their arrays of 128 KB stay in a core's cache; arrays of 2 MB
# took three times as long, because each one was new memory from the operating system.
_PAIRS = 2**14
CHUNK_LOGITS = (2**28, 2**27, 2**26, 2**25, 2**24)
# By how many times a plan with the optimizer's states on the host must be faster. Forecasts are not exact, and a moved
# state takes host memory and has to be copied back for every save. Tables of embeddings only take host memory.
_WORTH_MOVING, _TABLES_WORTH_MOVING = 1.01, 1.002


def splits(rows: int, devices: int, configured: int | None) -> list[int]:
    """Numbers of micro-batches, ascending, with which devices share the rows equally; or the config's number alone,
    unchecked. rows: of a step. configured: None: not configured.
    """
    if configured is not None:
        return [configured]
    return [count for count in range(1, rows + 1) if rows % count == 0 and (rows // count) % devices == 0]


def choose(
    costs: StepCost,
    config: TrainConfig,
    device: Device,
    budget_bytes: float | None,
    chunk_logits: Sequence[int] = CHUNK_LOGITS,
    resident: int = 0,
    unlike: Sequence[StepPlan] = (),
    alike_bytes: float = math.inf,
) -> Forecast:
    """The forecast of the fastest plan whose predicted peak is within `budget_bytes`.

    Of equally fast plans (to 0.1 ms) tables of embeddings on the device win, then the lowest peak. Optimizer states on
    the host must gain 1 %, tables there 0.2 %, unless only such plans fit. memory.plan is not checked against host
    memory.

      budget_bytes: None: no limit.
      chunk_logits: candidates for the most logits (tokens x vocabulary) at a time in the loss.
      resident: least number of layers whose frozen weights are whole on each device; ignored with config.memory.plan.
      unlike: failed plans; what resembles them (`_related`) is left out.
      alike_bytes: device memory for plans that run like these (`_run_alike`).
      costs: of a step on one device.

    PlanError if nothing else fits; ValueError if the host is too small for optimizer states or config.memory.plan is
    not for this model.
    """
    if device.link and costs.hosted_bytes > device.host_bytes:
        raise ValueError(
            f"optim.offload: the states of {config.optim.name} take {costs.hosted_bytes / 1e9:.1f} GB of host memory "
            f"for each device, which may pin {device.host_bytes / 1e9:.1f} GB; use an optimizer in 8 bits, or unset it"
        )
    budget = math.inf if budget_bytes is None else budget_bytes
    candidates: list[Forecast] = []

    @functools.cache
    def layers_of(micro: int, tile: int | None) -> tuple[LayerPlans, LayerForecast]:
        return _best_layers(costs, tokens_of(costs, micro), device, tile)

    for placed in places(costs, device):
        remaining_device = beside_states(placed, device)
        candidates += _candidates(
            placed, config, remaining_device, budget, chunk_logits, resident, unlike, layers_of, alike_bytes
        )

    def limit(plan: StepPlan) -> float:
        run = plan.micro_batches, plan.residuals.tile_tokens, plan.states_on_host
        return min(budget, alike_bytes) if any(_run_alike(failed, *run) for failed in unlike) else budget

    def fits(candidate: Forecast) -> bool:
        return candidate.peak_bytes <= limit(candidate.plan) and not _related(costs, candidate.plan, unlike)

    fitting = [candidate for candidate in candidates if fits(candidate)]
    if not fitting:
        raise PlanError(min(candidates, key=lambda candidate: candidate.peak_bytes), budget)

    def order(candidate: Forecast) -> tuple[float, bool, float]:
        seconds = candidate.step_seconds * (_WORTH_MOVING if candidate.plan.states_on_host else 1.0)
        seconds *= _TABLES_WORTH_MOVING if candidate.plan.table_on_host else 1.0
        return round(seconds, 4), candidate.plan.table_on_host, candidate.peak_bytes

    best = min(fitting, key=order)
    return with_transposed if fits(with_transposed := with_codes(costs, best, device)) else best


def _candidates(
    costs: StepCost,
    config: TrainConfig,
    device: Device,
    budget: float,
    chunk_logits: Sequence[int],
    resident: int,
    unlike: Sequence[StepPlan],
    layers_of: Callable[[int, int | None], tuple[LayerPlans, LayerForecast]],
    alike_bytes: float,
) -> list[Forecast]:
    """Forecasts of the plans to choose from; some may not fit.

    device: with the host memory that residuals may take.
    unlike: what resembles these is left out if something else fits, but never config.memory.plan.
    layers_of: `_best_layers` of (micro-batches, tokens of a tile).
    """
    fixed = (
        None
        if config.memory.plan is None
        else parse_residuals(config.memory.plan, costs.num_layers, costs.all_residuals)
    )
    candidates: list[Forecast] = []
    for micro in splits(costs.rows, costs.devices, config.micro_batches):
        # A chunk has at most the tokens of a micro-batch, and equal sizes are tried once.
        chunks = sorted(
            {max(1, min(int(tokens_of(costs, micro)), count // costs.vocab_size)) for count in chunk_logits}
        )
        if fixed is not None:
            plans = (StepPlan(fixed, micro, chunk, *costs.places) for chunk in chunks)
            candidates += [forecast(costs, plan, device) for plan in plans]
        else:
            for tile in dict.fromkeys((None, tile_tokens_of(costs, config))):
                table = layers_of(micro, tile)
                for resident_layers in _residents(costs, resident):
                    alike = [failed for failed in unlike if _run_alike(failed, micro, tile, costs.states_on_host)]
                    relatives = _Relatives(
                        costs, [failed for failed in alike if failed.places == costs.places], table[0]
                    )
                    limit = min(budget, alike_bytes) if alike else budget
                    pairs = _best_pairs(costs, table, micro, chunks, device, limit, tile, resident_layers, relatives)
                    candidates += [_with_whole_weights(costs, pair, device, limit) for pair in pairs]
    return candidates


def _residents(costs: StepCost, least: int) -> list[int]:
    """Candidates for `resident`: `least`, half of the layers (if more), all; only `least` if no frozen weights are
    divided.
    """
    if not costs.frozen_layer_bytes:
        return [least]
    return sorted({least, max(least, costs.num_layers // 2), costs.num_layers})


def _with_whole_weights(costs: StepCost, base_forecast: Forecast, device: Device, budget: float) -> Forecast:
    """The plan with as many more whole layers as fit, which saves exchanges. If all weights train, these stay gathered
    from forward to backward (whole_weights); else the frozen ones stay whole for the run, without a share (resident):
    to gather them in each step takes time, and at the loss, the peak, a device would hold share and whole.
    """

    def with_(**changes: int) -> Forecast:
        residuals = dataclasses.replace(base_forecast.plan.residuals, **changes)
        return forecast(costs, dataclasses.replace(base_forecast.plan, residuals=residuals), device)

    size, layers, room = costs.whole_layer_bytes, costs.num_layers, budget - base_forecast.peak_bytes
    if not size or room <= 0:
        return base_forecast
    if not costs.frozen_layer_bytes:
        return with_(whole_weights=layers if math.isinf(room) else min(layers, 1 + int(room / size)))
    if (all_of_them := with_(resident=layers)).peak_bytes <= budget:
        return all_of_them
    extra_layers = int(room / costs.resident_layer_bytes)
    return with_(resident=min(base_forecast.plan.residuals.resident + extra_layers, layers - 1))


def tile_tokens_of(costs: StepCost, config: TrainConfig) -> int | None:
    """Tokens of a tile of MLPs: the largest divisor of the row up to 16,384. None for rows below 32,768 tokens, without
    a divisor of at least 2,048, if no layer can be tiled, and with adapter dropout.
    """
    dropout = config.adapter is not None and config.adapter.lora_dropout > 0
    if costs.length < 2 * _TILE_TOKENS or not costs.tiled or dropout:
        return None
    tile = next(size for size in range(_TILE_TOKENS, 0, -1) if costs.length % size == 0)
    return tile if tile >= _TILE_TOKENS // 8 else None


# Two plans for a layer are near if they place at most this share of its residual bytes differently.
_NEAR = 0.1


def _near(costs: StepCost, placed: np.ndarray, plan: LayerPlan) -> np.ndarray:
    """bool[plans]: which layer plans place at most a tenth of the residuals' bytes otherwise than `plan`; their
    forecasts are taken to be equally wrong. placed: int[plans, known residuals], indices into PLACEMENTS.
    """
    sizes = np.array([costs.residuals[residual.name] for residual in costs.all_residuals])
    plan_placements = np.array([PLACEMENTS.index(plan.of(residual)) for residual in costs.all_residuals])
    return (placed != plan_placements) @ sizes <= _NEAR * sizes.sum()


def _run_alike(plan: StepPlan, micro: int, tile: int | None, states_on_host: bool) -> bool:
    """Whether a failed `plan` has these micro-batches, tile and place of states, so that forecasts err alike."""
    return (plan.micro_batches, plan.residuals.tile_tokens, plan.states_on_host) == (micro, tile, states_on_host)


def _related(costs: StepCost, plan: StepPlan, failed_plans: Sequence[StepPlan]) -> bool:
    """Whether `plan` resembles a failed one: it runs alike with all in the same places, and first and last layers are
    near.
    """
    layers = plan.residuals.layers
    placed = np.array([[PLACEMENTS.index(layers[index].of(r)) for r in costs.all_residuals] for index in (0, -1)])
    return any(
        plan.places == failed.places
        and _run_alike(failed, plan.micro_batches, plan.residuals.tile_tokens, plan.states_on_host)
        and all(_near(costs, placed[[index]], failed.residuals.layers[index])[0] for index in (0, -1))
        for failed in failed_plans
    )


class _Relatives:
    """Which pairs of layer plans of `table` resemble failed plans that run alike (`failed_plans`)."""

    def __init__(self, costs: StepCost, failed_plans: Sequence[StepPlan], table: LayerPlans):
        ends = [(plan.residuals.layers[0], plan.residuals.layers[-1]) for plan in failed_plans]
        self._near = [[_near(costs, table.placed, layer) for layer in layers] for layers in ends]

    def among(self, rows: slice, number: np.ndarray, count: int) -> np.ndarray:
        """bool[rows, plans]: which pairs resemble a failed plan; the first of a pair is one of `rows`. number: [rows,
        plans], how many of the `count` layers are under the first.
        """
        resembling = np.zeros(number.shape, bool)
        for first, last in self._near:
            uniform = np.where(number > 0, (first & last)[rows, None], (first & last)[None, :])
            mixed = first[rows, None] & last[None, :]
            resembling |= np.where((number > 0) & (number < count), mixed, uniform)
        return resembling


def smallest_plan(costs: StepCost, config: TrainConfig, device: Device, resident: int = 0) -> Forecast:
    """The forecast of the plan with the lowest predicted peak, fitting or not; of equal peaks the fastest. ValueError
    as `choose`. resident: least number of layers whose frozen weights are whole on each device.
    """
    try:
        return choose(costs, config, device, 0.0, resident=resident)
    except PlanError as error:
        smallest = error.smallest
    try:
        return choose(costs, config, device, smallest.peak_bytes, resident=resident)
    except PlanError:  # the search adds bytes in another order than the forecast, and may miss by less than a byte
        return smallest


def _best_pairs(
    costs,
    table,
    micro: int,
    chunks: Sequence[int],
    device,
    budget: float,
    tile,
    resident: int,
    relatives: _Relatives | None = None,
) -> list[Forecast]:
    """`_best_pair` for each number of tokens in `chunks` (ascending) whose logits exist at a time; one that does not
    fit is the last. More tokens make the head faster and larger, and change nothing in the layers: a pair stays the
    best while it fits.
    """
    pairs: list[Forecast] = []
    for chunk in chunks:
        if pairs:
            larger_chunk = forecast(costs, dataclasses.replace(pairs[-1].plan, chunk_tokens=chunk), device)
            if larger_chunk.peak_bytes <= budget:
                pairs.append(larger_chunk)
                continue
        pairs.append(_best_pair(costs, table, micro, chunk, device, budget, tile, resident, relatives))
        if pairs[-1].peak_bytes > budget:
            break
    return pairs


def tokens_of(costs: StepCost, micro: int) -> float:
    """Tokens of a micro-batch on one device, padding included; may be a fraction."""
    return costs.rows / micro / costs.devices * costs.length


def _best_pair(
    costs,
    table,
    micro: int,
    chunk_tokens: int,
    device,
    budget: float,
    tile: int | None,
    resident: int,
    relatives: _Relatives | None = None,
) -> Forecast:
    """The fastest pair of layer plans within `budget`, with as few layers under the first as fit; if none fits, the
    smallest. relatives: pairs to leave out, unless no other fits.
    """
    count = costs.num_layers
    plans, forecasts = table
    head = head_forecast(costs, chunk_tokens, tokens_of(costs, micro), device)
    kept_bytes, hosted, leaving, arriving = (
        forecasts.kept,
        forecasts.hosted,
        bytes_with_gaps(forecasts.leaving, device),
        forecasts.arriving,
    )
    seconds = forecasts.forward + forecasts.backward
    at_loss, at_forward, at_backward = gathered_bytes(costs, 0, resident)
    loss = head[0] + at_loss
    work, forward = (
        forecasts.work + costs.head_gradient_bytes + at_backward,
        hosted + forecasts.work_forward + at_forward,
    )
    room = budget
    budget -= costs.fixed_bytes(micro, resident) + costs.cast_bytes + costs.given_bytes * tokens_of(costs, micro)

    def best_of(rows: slice) -> tuple[bool, float, int, int, int]:
        """The best pair whose first plan is one of `rows`: (none fits; seconds, or peak bytes; layers under the first;
        index of the first; of the other).
        """
        last_work = work + np.maximum(arriving[rows, None] - arriving[None, :], 0.0)
        over = count * kept_bytes + np.maximum(np.maximum(loss + hosted, forward + leaving), last_work) - budget
        saved = kept_bytes[None, :] - kept_bytes[rows, None]  # bytes saved by each further layer under the first plan
        with np.errstate(divide="ignore", invalid="ignore"):
            number = np.where(over > 0, np.where(saved > 0, np.ceil(over / saved), count), 0)
        number = np.clip(number, 0, count)
        last_number = count - number
        residuals = number * kept_bytes[rows, None] + last_number * kept_bytes[None, :]
        last_work = np.where(last_number > 0, last_work, 0.0)
        last_hosted = np.where(last_number > 0, hosted[None, :], hosted[rows, None])
        first_peak = np.where(number > 0, number * kept_bytes[rows, None] + work[rows, None], 0.0)
        last_forward = np.where(last_number > 0, forward[None, :], forward[rows, None])
        last_forward += np.where(last_number > 1, leaving[None, :], leaving[rows, None])  # of the second last layer
        last_moments = np.maximum(np.maximum(loss + last_hosted, last_forward), last_work)
        peak = np.maximum(residuals + last_moments, first_peak)
        time = number * seconds[rows, None] + last_number * seconds[None, :]
        allowed = number * hosted[rows, None] + last_number * hosted[None, :] <= device.host_bytes
        feasible = (peak <= budget) & allowed
        if relatives is not None:
            feasible &= ~relatives.among(rows, number, count)
        any_fits = bool(feasible.any())
        order = (
            np.where(feasible, np.round(time, 6) + 1e-18 * peak, np.inf)
            if any_fits
            else np.where(allowed, peak, np.inf)
        )
        first, last = np.unravel_index(int(np.argmin(order)), order.shape)
        return not any_fits, float(order[first, last]), int(number[first, last]), int(first) + rows.start, int(last)

    rows = max(1, _PAIRS // len(plans))
    best_by_rows = (best_of(slice(start, start + rows)) for start in range(0, len(plans), rows))
    _, _, number, first, last = min(best_by_rows, key=lambda best: best[:2])
    layers = (plans[first],) * number + (plans[last],) * (count - number)
    residuals = ResidualPlan(layers, tile, resident=resident)
    best = forecast(costs, StepPlan(residuals, micro, chunk_tokens, *costs.places), device)
    alone = best.peak_bytes - costs.shared
    if alone <= room < best.peak_bytes:  # only a plan that keeps everything has shared bytes; the others need less
        return _best_pair(costs, table, micro, chunk_tokens, device, alone - 1, tile, resident, relatives)
    return best


def _best_layers(costs, tokens, device, tile) -> tuple[LayerPlans, LayerForecast]:
    """(layer plans, forecasts) that no other beats in kept bytes, backward work bytes, time and host bytes at once. Few
    remain, so that pairing is quick.
    """
    plans = layer_plans(costs, device.link > 0)
    forecasts = layer_forecasts(costs, plans.placed, tokens, device, tile)
    # Of plans with equal costs only the first is considered, which halves their number.
    different = np.sort(np.unique(np.stack(list(vars(forecasts).values()), 1), axis=0, return_index=True)[1])
    figures = np.stack([forecasts.kept, forecasts.work, forecasts.forward + forecasts.backward, forecasts.hosted], 1)[
        different
    ]
    best = different[_unbeaten(figures)]
    return LayerPlans(costs.all_residuals, plans.placed[best]), forecasts.at(best)


def _unbeaten(figures: np.ndarray) -> list[int]:
    """Ascending indices of the Pareto front of `figures` [rows, figures], smaller is better; equal rows all stay."""
    remaining = np.lexsort(figures.T)  # a row comes after every row that beats it, and equal rows are neighbours
    columns, front = figures.T[:, remaining], []
    while remaining.size:
        first, alike = columns[:, 0], 1
        while alike < remaining.size and (columns[:, alike] == first).all():
            alike += 1
        front += remaining[:alike].tolist()
        stay = np.logical_or.reduce([column < least for column, least in zip(columns, first, strict=True)])
        remaining, columns = remaining[stay], columns.compress(stay, axis=1)
    return sorted(front)


class PlanError(ValueError):
    """No plan fits. The message has `fixes` (changes of the config that would) and the smallest plan's three largest
    parts.

      compiled: the smallest plan was compiled or run; False: its forecast was too large.
      need_bytes: what the compiler says that it needs; None: memory ran out, or it was not compiled.
    """

    def __init__(
        self,
        smallest: Forecast,
        budget_bytes: float,
        fixes: Sequence[str] = (),
        compiled: bool = False,
        need_bytes: float | None = None,
    ):
        self.smallest, self.budget_bytes, self.compiled, self.need_bytes = smallest, budget_bytes, compiled, need_bytes
        largest = sorted(smallest.parts.items(), key=lambda entry: -entry[1])[:3]
        text = f"no plan fits: the smallest needs {smallest.peak_bytes / 1e9:.2f} GB of {budget_bytes / 1e9:.2f} GB"
        if compiled:
            outcome = "and memory ran out" if need_bytes is None else f"and compiled it needs {need_bytes / 1e9:.2f} GB"
            text = f"no plan fits in {budget_bytes / 1e9:.2f} GB: the smallest was predicted to need "
            text += f"{smallest.peak_bytes / 1e9:.2f} GB, {outcome}"
        text += ". Its largest parts: " + "; ".join(f"{name} {value / 1e9:.2f} GB" for name, value in largest) + "."
        if fixes:
            text += " What would fit: " + "; ".join(fixes) + "."
        super().__init__(text)
