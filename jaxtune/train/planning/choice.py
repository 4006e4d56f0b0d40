"""The choice of the fastest plan that fits, by forecast. A plan is a pair of layer plans, one for the first layers,
whose residuals live longest, and one for the rest. Pairs are formed of layer plans that no other beats in every figure,
without those that resemble failed plans.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence

import numpy as np

from jaxtune.models.stack.residual_plan import PLACEMENTS, LayerPlan, ResidualPlan
from jaxtune.train.planning.cost import StepCost
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.forecasts import Forecast, forecast, head_forecast, streamed_bytes
from jaxtune.train.planning.host_room import HostError, beside_moved, lacking_pinned, places
from jaxtune.train.planning.layer_forecasts import LayerForecast, bytes_with_gaps
from jaxtune.train.planning.movables import MOVABLES
from jaxtune.train.planning.movables.movable import Movable
from jaxtune.train.planning.movables.residuals import LayerPlans, best_layers
from jaxtune.train.planning.plan import StepPlan, parse_plan
from jaxtune.train.planning.step_spec import StepSpec

_TILE_TOKENS = 16384  # the MLPs of a long row run over at most this many tokens at a time
# This many pairs of layer plans are computed at a time. Their arrays of 128 KB stay in a core's cache; arrays of 2 MB
# took three times as long, because each one was new memory from the operating system.
_PAIRS = 2**14
CHUNK_LOGITS = (2**28, 2**27, 2**26, 2**25, 2**24)


def splits(rows: int, devices: int, configured: int | None) -> list[int]:
    """Numbers of micro-batches, ascending, with which devices share the rows equally; or the config's number alone,
    unchecked. rows: of a step. configured: None: not configured.
    """
    if configured is not None:
        return [configured]
    return [count for count in range(1, rows + 1) if rows % count == 0 and (rows // count) % devices == 0]


def choose(
    costs: StepCost,
    spec: StepSpec,
    device: Device,
    budget_bytes: float | None,
    chunk_logits: Sequence[int] = CHUNK_LOGITS,
    unlike: Sequence[StepPlan] = (),
    alike_bytes: float = math.inf,
) -> Forecast:
    """The forecast of the fastest plan whose predicted peak is within `budget_bytes`.

    Of equally fast plans (to 0.1 ms) the one that moves least wins, then the lowest peak. What is moved must gain
    `Movable.worth`, unless only such plans fit.

      budget_bytes: None: no limit.
      chunk_logits: candidates for the most logits (tokens x vocabulary) at a time in the loss.
      unlike: failed plans; what resembles them (`_related`) is left out.
      alike_bytes: device memory for plans that run like these (`_runs`).
      costs: of a step on one device.

    PlanError if nothing else fits; HostError if the host has no room for memory.plan; ValueError if a movable refuses,
    or memory.plan is not for this model.
    """
    for movable in costs.movables.values():
        if (refusal := movable.refusal(costs, device)) is not None:
            raise ValueError(refusal)
    fixed = None
    if spec.memory.plan is not None:
        fixed, moved = parse_plan(spec.memory.plan, costs.shape.num_layers, costs.layers.all_residuals)
        levels = {word: moved.get(word, 0) for word, movable in costs.movables.items() if movable.counted}
        for word, level in levels.items():
            if level and not costs.movables[word].able:
                raise ValueError(f"memory.plan: {word}={level} needs {costs.movables[word].needs}; leave it out")
        costs = costs.limited({word: (level, level) for word, level in levels.items()})
    budget = math.inf if budget_bytes is None else budget_bytes
    candidates: list[Forecast] = []

    @functools.cache
    def layers_of(micro: int, tile: int | None, link_bytes: float) -> tuple[LayerPlans, LayerForecast]:
        moved = dataclasses.replace(costs.moved, link_bytes=link_bytes)
        return best_layers(dataclasses.replace(costs, moved=moved), costs.shape.tokens(micro), device, tile)

    def limit(plan: StepPlan) -> float:
        return min(budget, alike_bytes) if any(_runs(failed) == _runs(plan) for failed in unlike) else budget

    def fits(candidate: Forecast) -> bool:
        return candidate.peak_bytes <= limit(candidate.plan) and not _related(costs, candidate.plan, unlike)

    last = {word: (0, 0) for word, m in costs.movables.items() if m.last_resort and m.able and costs.may(word, 0)}
    fitting: list[Forecast] = []
    for limited in (costs.limited(last), costs) if last else (costs,):
        for placed in places(limited, device):
            beside = beside_moved(placed, device)
            candidates += _candidates(placed, spec, fixed, beside, budget, chunk_logits, unlike, layers_of, alike_bytes)
        if spec.memory.plan is not None:
            candidates = _on_host(costs, candidates, spec.memory.plan, device)
        if fitting := [candidate for candidate in candidates if fits(candidate)]:
            break
    else:
        raise PlanError(min(candidates, key=lambda candidate: candidate.peak_bytes), budget)

    def order(candidate: Forecast) -> tuple[float, int, float]:
        worth = [movable.worth for word, movable in costs.movables.items() if candidate.plan.level(word)]
        seconds = round(math.prod([candidate.device_seconds, *worth]), 4)
        return seconds, sum(each > 1 for each in worth), candidate.peak_bytes

    best = min(fitting, key=order)
    for movable in costs.movables.values():
        if movable.at_last and fits(further := _further(costs, movable, best, device, budget)):
            best = further
    return best


def _on_host(costs: StepCost, candidates: Sequence[Forecast], text: str, device: Device) -> list[Forecast]:
    """Those of memory.plan for which the host has room; HostError if there are none."""
    rooms = [lacking_pinned(costs, each.plan, each.host_bytes, device) for each in candidates]
    if None in rooms:
        return [each for each, room in zip(candidates, rooms, strict=True) if room is None]
    least = min(range(len(rooms)), key=lambda index: candidates[index].host_bytes)
    fix = "have fewer layers streamed, or less offload, more micro_batches, or a host with more memory"
    raise HostError.of(text, candidates[least].host_bytes, rooms[least] or 0.0, device, fix)


def _candidates(
    costs: StepCost,
    spec: StepSpec,
    fixed: ResidualPlan | None,
    device: Device,
    budget: float,
    chunk_logits: Sequence[int],
    unlike: Sequence[StepPlan],
    layers_of: Callable[[int, int | None, float], tuple[LayerPlans, LayerForecast]],
    alike_bytes: float,
) -> list[Forecast]:
    """Forecasts of the plans to choose from; some may not fit.

    fixed: memory.plan's residuals.
    device: with the host memory that residuals may take.
    unlike: what resembles these is left out if something else fits, but never memory.plan.
    layers_of: `best_layers` of (micro-batches, tokens of a tile, bytes on the link).
    """
    shape, moved = costs.shape, costs.moved
    candidates: list[Forecast] = []
    for micro in splits(shape.rows, shape.devices, spec.micro_batches):
        # A chunk has at most the tokens of a micro-batch, and equal sizes are tried once.
        chunks = sorted({max(1, min(int(shape.tokens(micro)), count // shape.vocab_size)) for count in chunk_logits})
        if fixed is not None:
            plans = (StepPlan(fixed, micro, chunk, moved.levels) for chunk in chunks)
            candidates += [forecast(costs, plan, device) for plan in plans]
        else:
            for tile in dict.fromkeys((None, tile_tokens_of(costs, spec))):
                table = layers_of(micro, tile, moved.link_bytes)
                like = StepPlan(ResidualPlan((), tile), micro, 0, moved.levels)
                alike = [failed for failed in unlike if _runs(failed) == _runs(like)]
                relatives = _Relatives(costs, [failed for failed in alike if failed.places == like.places], table[0])
                limit = min(budget, alike_bytes) if alike else budget
                for pair in _best_pairs(costs, table, micro, chunks, device, limit, tile, relatives):
                    for movable in costs.movables.values():
                        pair = pair if movable.at_last else _further(costs, movable, pair, device, limit)
                    candidates.append(pair)
    return candidates


def _further(costs: StepCost, movable: Movable, base: Forecast, device: Device, budget: float) -> Forecast:
    """The plan with a movable at another level, if the device has room and it is faster."""
    level, room = base.plan.level(movable.word), budget - base.peak_bytes
    for other in movable.with_room(costs, level, room, device) if movable.able else ():
        if costs.may(movable.word, other):
            further = forecast(costs, base.plan.at(**{movable.word: other}), device)
            gain = movable.worth if other > level else 1.0
            if further.peak_bytes <= budget and further.device_seconds * gain <= base.device_seconds:
                return further
    return base


def tile_tokens_of(costs: StepCost, spec: StepSpec) -> int | None:
    """Tokens of a tile of MLPs: the largest divisor of the row up to 16,384. None for rows below 32,768 tokens, without
    a divisor of at least 2,048, if no layer can be tiled, and with adapter dropout.
    """
    length = costs.shape.length
    if length < 2 * _TILE_TOKENS or not costs.layers.tiled or spec.model.dropout:
        return None
    tile = next(size for size in range(_TILE_TOKENS, 0, -1) if length % size == 0)
    return tile if tile >= _TILE_TOKENS // 8 else None


# Two plans for a layer are near if they place at most this share of its residual bytes differently.
_NEAR = 0.1


def _near(costs: StepCost, placed: np.ndarray, plan: LayerPlan) -> np.ndarray:
    """bool[plans]: which layer plans place at most a tenth of the residuals' bytes otherwise than `plan`."""
    residuals = costs.layers.all_residuals
    sizes = np.array([costs.layers.residuals[residual.name] for residual in residuals])
    plan_placements = np.array([PLACEMENTS.index(plan.of(residual)) for residual in residuals])
    return (placed != plan_placements) @ sizes <= _NEAR * sizes.sum()


def _runs(plan: StepPlan) -> tuple[int, int | None, dict[str, int]]:
    """Forecasts of plans with the same are wrong alike."""
    apart = {word: level for word, level in plan.moved.items() if MOVABLES[word].errs_apart}
    return plan.micro_batches, plan.residuals.tile_tokens, apart


def _related(costs: StepCost, plan: StepPlan, failed_plans: Sequence[StepPlan]) -> bool:
    """Whether `plan` resembles a failed one."""
    layers, residuals = plan.residuals.layers, costs.layers.all_residuals
    placed = np.array([[PLACEMENTS.index(layers[index].of(r)) for r in residuals] for index in (0, -1)])
    return any(
        plan.places == failed.places
        and _runs(failed) == _runs(plan)
        and all(_near(costs, placed[[index]], failed.residuals.layers[index])[0] for index in (0, -1))
        for failed in failed_plans
    )


class _Relatives:
    """Which pairs of layer plans of `table` resemble failed plans that run alike (`failed_plans`)."""

    def __init__(self, costs: StepCost, failed_plans: Sequence[StepPlan], table: LayerPlans):
        ends = [(plan.residuals.layers[0], plan.residuals.layers[-1]) for plan in failed_plans]
        self._near = [[_near(costs, table.placed, layer) for layer in layers] for layers in ends]

    def among(self, rows: slice, number: np.ndarray, count: int) -> np.ndarray:
        """bool[rows, plans]: which pairs resemble a failed plan; number: [rows, plans], layers under the first."""
        resembling = np.zeros(number.shape, bool)
        for first, last in self._near:
            uniform = np.where(number > 0, (first & last)[rows, None], (first & last)[None, :])
            mixed = first[rows, None] & last[None, :]
            resembling |= np.where((number > 0) & (number < count), mixed, uniform)
        return resembling


def smallest_plan(costs: StepCost, spec: StepSpec, device: Device) -> Forecast:
    """The forecast of the plan with the lowest predicted peak, fitting or not; of equal peaks the fastest. ValueError
    as `choose`.
    """
    try:
        return choose(costs, spec, device, 0.0)
    except PlanError as error:
        smallest = error.smallest
    try:
        return choose(costs, spec, device, smallest.peak_bytes)
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
    relatives: _Relatives | None = None,
) -> list[Forecast]:
    """`_best_pair` for each number of tokens in `chunks` (ascending) whose logits exist at a time."""
    pairs: list[Forecast] = []
    for chunk in chunks:
        if pairs:
            larger_chunk = forecast(costs, dataclasses.replace(pairs[-1].plan, chunk_tokens=chunk), device)
            if larger_chunk.peak_bytes <= budget:
                pairs.append(larger_chunk)
                continue
        pairs.append(_best_pair(costs, table, micro, chunk, device, budget, tile, relatives))
        if pairs[-1].peak_bytes > budget:
            break
    return pairs


def _best_pair(
    costs,
    table,
    micro: int,
    chunk_tokens: int,
    device,
    budget: float,
    tile: int | None,
    relatives: _Relatives | None = None,
) -> Forecast:
    """The fastest pair of layer plans within `budget`, with as few layers under the first as fit; else the smallest."""
    count, tokens = costs.shape.num_layers, costs.shape.tokens(micro)
    plans, forecasts = table
    head = head_forecast(costs, chunk_tokens, tokens, device)
    kept_bytes, hosted, leaving, arriving = (
        forecasts.kept,
        forecasts.hosted,
        bytes_with_gaps(forecasts.leaving, device),
        forecasts.arriving,
    )
    seconds = forecasts.forward + forecasts.backward
    streamed = streamed_bytes(costs, forecasts.kept, forecasts.row_backward, device)
    at_loss, at_forward, at_backward = map(operator.add, costs.gathered_bytes, streamed)
    loss = head[0] + at_loss
    work, forward = (
        forecasts.work + costs.head.gradient_bytes + at_backward,
        hosted + forecasts.work_forward + at_forward,
    )
    room = budget
    budget -= costs.fixed_bytes(micro) + costs.layers.cast_bytes + costs.layers.given_bytes * tokens

    def best_of(rows: slice) -> tuple[bool, float, int, int, int]:
        """The best pair whose first plan is one of `rows`: (none fits; seconds, or peak bytes; layers;
        index of each).
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
    best = forecast(costs, StepPlan(ResidualPlan(layers, tile), micro, chunk_tokens, costs.moved.levels), device)
    alone = best.peak_bytes - costs.layers.shared
    if alone <= room < best.peak_bytes:  # only a plan that keeps everything has shared bytes; the others need less
        return _best_pair(costs, table, micro, chunk_tokens, device, alone - 1, tile, relatives)
    return best


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
