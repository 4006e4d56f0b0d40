"""The choice of a plan: the placement of every residual by layer, the number of micro-batches (`splits`), how many
logits exist at a time, the tokens of a tile (`tile_tokens_of`), the layers whose weights stay gathered or whole
(`_residents`, `_with_whole_weights`), and what is on the host beside residuals (`places`, in host_room.py).

`choose` takes the fastest plan that fits a budget, by forecast, and raises PlanError if none does; `smallest_plan`
takes the one with the lowest peak. Only the plan that is taken is compiled, and the compiler's own figure is then
compared with the budget (planner.py). Layer plans are sought as pairs, one for the first layers and one for the rest
(`_best_pair`), among those that no other layer plan beats (`_best_layers`, `_unbeaten`), and plans that resemble failed
ones are left out (`_related`, `_Relatives`). `tokens_of` are a micro-batch's tokens."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxtune.models.residual_plan import PLACEMENTS, LayerPlan, ResidualPlan
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


def splits(rows: int, devices: int, wanted: int | None) -> list[int]:
    """The numbers of micro-batches into which the `rows` rows of a step can be divided, ascending, so that each of
    `devices` devices has equally many rows of each micro-batch; [] if they cannot share the rows equally. The planners
    of steps and of forward passes try plans with each of them. wanted: the number that the config sets, which is then
    the only one and is not checked here; None: there is none."""
    if wanted is not None:
        return [wanted]
    return [count for count in range(1, rows + 1) if rows % count == 0 and (rows // count) % devices == 0]


def choose(
    parts: StepCost,
    config: TrainConfig,
    device: Device,
    budget_bytes: float | None,
    chunk_logits: Sequence[int] = CHUNK_LOGITS,
    resident: int = 0,
    unlike: Sequence[StepPlan] = (),
    alike_bytes: float = math.inf,
) -> Forecast:
    """The forecast of the fastest plan whose predicted peak is within `budget_bytes`; of equally fast plans (to 0.1 ms)
    one with the tables of embeddings on the device, and of these the one with the lowest peak. A plan with the
    optimizer's states on the host must be faster than all others by 1 %, and one with the tables there by 0.2 %, unless
    such plans alone fit. If there is room beside it, it keeps the transposed codes of frozen FP8 weights (with_codes).

    What config.memory.plan and config.micro_batches set is not changed. Plans that are searched for also respect the
    host memory that the device may pin; that of config.memory.plan is not checked against it. `next_plan` calls it
    for the planner and --plan; the choice of a mesh (meshes.py) and advice (fitting.py) call it as well.

    Args:
      parts: the step's costs.
      config: the run's.
      device: the device.
      budget_bytes: device memory; None: no limit.
      chunk_logits: the candidates for the most logits (tokens times vocabulary size) that exist at a time in the loss.
      resident: the least number of layers whose frozen weights are whole on each device, because they already are. It
        has no effect on config.memory.plan.
      unlike: plans that failed; plans that resemble them (`_related`) are left out.
      alike_bytes: device memory, at most budget_bytes, for plans that run like one of these (`_run_alike`).
    Raises:
      PlanError: nothing fits, or all that fits resembles `unlike`.
      ValueError: the host's memory is too small for the optimizer's states; or config.memory.plan is not for this
        model.
    """
    if device.link and parts.hosted_bytes > device.host_bytes:
        raise ValueError(
            f"optim.offload: the states of {config.optim.name} take {parts.hosted_bytes / 1e9:.1f} GB of host memory "
            f"for each device, which may pin {device.host_bytes / 1e9:.1f} GB; use an optimizer in 8 bits, or unset it"
        )
    budget = math.inf if budget_bytes is None else budget_bytes
    found: list[Forecast] = []

    @functools.cache
    def layers_of(micro: int, tile: int | None) -> tuple[LayerPlans, LayerForecast]:
        """The layer plans, which are the same wherever the tables and the states are."""
        return _best_layers(parts, tokens_of(parts, micro), device, tile)

    for placed in places(parts, device):
        beside = beside_states(placed, device)
        found += _candidates(placed, config, beside, budget, chunk_logits, resident, unlike, layers_of, alike_bytes)

    def limit(plan: StepPlan) -> float:
        """The device memory that a plan may take."""
        run = plan.micro_batches, plan.residuals.tile_tokens, plan.states_on_host
        return min(budget, alike_bytes) if any(_run_alike(one, *run) for one in unlike) else budget

    def fits(one: Forecast) -> bool:
        return one.peak_bytes <= limit(one.plan) and not _related(parts, one.plan, unlike)

    fitting = [one for one in found if fits(one)]
    if not fitting:
        raise PlanError(min(found, key=lambda one: one.peak_bytes), budget)

    def order(one: Forecast) -> tuple[float, bool, float]:
        """What is compared: seconds, longer where something must be worth moving, the tables' place, and bytes."""
        seconds = one.step_seconds * (_WORTH_MOVING if one.plan.states_on_host else 1.0)
        seconds *= _TABLES_WORTH_MOVING if one.plan.table_on_host else 1.0
        return round(seconds, 4), one.plan.table_on_host, one.peak_bytes

    best = min(fitting, key=order)
    return more if fits(more := with_codes(parts, best, device)) else best


def _candidates(
    parts: StepCost,
    config: TrainConfig,
    device: Device,
    budget: float,
    chunk_logits: Sequence[int],
    resident: int,
    unlike: Sequence[StepPlan],
    layers_of: Callable[[int, int | None], tuple[LayerPlans, LayerForecast]],
    alike_bytes: float,
) -> list[Forecast]:
    """The forecasts of the plans among which `choose` chooses; some may not fit.

    Args:
      parts: the step's costs, with the tables of embeddings and the optimizer's states in one place.
      config: the run's; what its memory.plan and micro_batches set is not changed.
      device: the device, with the host memory that residuals may take.
      budget: bytes of its memory, infinite if nothing limits them.
      chunk_logits: the candidates for the most logits (tokens times vocabulary size) that exist at a time.
      resident: the least number of layers whose frozen weights are whole on each device.
      unlike: plans that failed. The search leaves out plans that resemble them, but only if another fits, and never a
        plan that config.memory.plan sets; `choose` takes none of these.
      layers_of: returns what _best_layers does, for a number of micro-batches and the tokens of a tile.
      alike_bytes: of memory, for plans that run like one of `unlike`.
    """
    fixed = None if config.memory.plan is None else parse_residuals(config.memory.plan, parts.num_layers, parts.known)
    found: list[Forecast] = []
    for micro in splits(parts.rows, parts.devices, config.micro_batches):
        # A chunk has at most the tokens of a micro-batch, and equal sizes are tried once.
        chunks = sorted(
            {max(1, min(int(tokens_of(parts, micro)), count // parts.vocab_size)) for count in chunk_logits}
        )
        if fixed is not None:
            plans = (StepPlan(fixed, micro, chunk, *parts.places) for chunk in chunks)
            found += [forecast(parts, plan, device) for plan in plans]
        else:
            for tile in dict.fromkeys((None, tile_tokens_of(parts, config))):
                table = layers_of(micro, tile)
                for whole in _residents(parts, resident):
                    alike = [one for one in unlike if _run_alike(one, micro, tile, parts.states_on_host)]
                    relatives = _Relatives(parts, [one for one in alike if one.places == parts.places], table[0])
                    limit = min(budget, alike_bytes) if alike else budget
                    pairs = _best_pairs(parts, table, micro, chunks, device, limit, tile, whole, relatives)
                    found += [_with_whole_weights(parts, pair, device, limit) for pair in pairs]
    return found


def _residents(parts: StepCost, least: int) -> list[int]:
    """The candidates for a plan's `resident`: of how many layers each device keeps the whole frozen weights for the
    whole run, though weights are divided over devices: `least`, half of the layers (if more), or all, ascending. Only
    `least` if no frozen weights of layers are divided. `_candidates` seeks plans with each. parts: the step's costs."""
    if not parts.frozen_layer_bytes:
        return [least]
    return sorted({least, max(least, parts.num_layers // 2), parts.num_layers})


def _with_whole_weights(parts: StepCost, found: Forecast, device: Device, budget: float) -> Forecast:
    """The forecast of the plan of `found` with as many more whole layers, each taken to be as large as the largest, as
    the budget has room for; `found` itself if there is no room or weights are not divided over devices. The weights of
    a whole layer stay gathered on each device, which saves exchanges. `_candidates` so extends each plan it found.
    parts: the step's costs. budget: bytes of memory of `device`, or infinite.

    If all weights of the layers are trained, a whole layer keeps its gathered weights from its forward to its backward
    (ResidualPlan.whole_weights). If some are frozen, each device has a whole layer's frozen weights whole for the whole
    run, and no share beside them unless the caller keeps its model (ResidualPlan.resident). Gathering them anew in each
    step would take time, and at the loss, where the most memory is in use, a device would have both its share and the
    whole weights."""

    def with_(**changes: int) -> Forecast:
        """The forecast of the plan of `found` with these fields (`changes`) of its residual plan."""
        residuals = dataclasses.replace(found.plan.residuals, **changes)
        return forecast(parts, dataclasses.replace(found.plan, residuals=residuals), device)

    size, layers, room = parts.whole_layer_bytes, parts.num_layers, budget - found.peak_bytes
    if not size or room <= 0:
        return found
    if not parts.frozen_layer_bytes:
        return with_(whole_weights=layers if math.isinf(room) else min(layers, 1 + int(room / size)))
    if (all_of_them := with_(resident=layers)).peak_bytes <= budget:
        return all_of_them
    more = int(room / parts.resident_layer_bytes)
    return with_(resident=min(found.plan.residuals.resident + more, layers - 1))


def tile_tokens_of(parts: StepCost, config: TrainConfig) -> int | None:
    """The number of tokens of a tile: the MLPs of a long row may run tile by tile, so that their values exist for one
    at a time. It is the largest number up to 16,384 that divides the row. None, for no tiles, for rows of less than
    32,768 tokens, if only tiles below 2,048 divide the row, if no layer can run over tiles, and with an adapter's
    dropout. Plans are tried with such tiles and without. parts: the step's costs. config: the run's."""
    dropout = config.adapter is not None and config.adapter.lora_dropout > 0
    if parts.length < 2 * _TILE_TOKENS or not parts.tiled or dropout:
        return None
    tile = next(size for size in range(_TILE_TOKENS, 0, -1) if parts.length % size == 0)
    return tile if tile >= _TILE_TOKENS // 8 else None


# Two plans for a layer are near if they place at most this share of its residual bytes differently.
_NEAR = 0.1


def _near(parts: StepCost, placed: np.ndarray, plan: LayerPlan) -> np.ndarray:
    """bool[plans]: which plans for one layer are near `plan`, that is, place at most a tenth of the residuals' bytes
    differently. If one of two near plans was too large, the forecast of the other is taken to be as wrong, so
    `_related` and `_Relatives` ask this. placed: the plans, int[plans, known residuals], indices into PLACEMENTS.
    parts: the step's costs."""
    sizes = np.array([parts.residuals[residual.name] for residual in parts.known])
    there = np.array([PLACEMENTS.index(plan.of(residual)) for residual in parts.known])
    return (placed != there) @ sizes <= _NEAR * sizes.sum()


def _run_alike(plan: StepPlan, micro: int, tile: int | None, states_on_host: bool) -> bool:
    """Whether `plan`, one that failed, has `micro` micro-batches, `tile` tokens in a tile (None: no tiles), and the
    optimizer's states on the host or not, as `states_on_host` says, so that the forecast of a plan with these may be
    wrong in the same way. Where tables of embeddings are changes nothing in what a step needs beside them."""
    return (plan.micro_batches, plan.residuals.tile_tokens, plan.states_on_host) == (micro, tile, states_on_host)


def _related(parts: StepCost, plan: StepPlan, others: Sequence[StepPlan]) -> bool:
    """Whether `plan` resembles one of `others`, plans that failed: it has the same micro-batches and tile, its tables
    of embeddings and states are in the same places, and in its first layer and in its last the placements differ in at
    most a tenth of the residuals' bytes. `choose` takes no such plan, as its forecast may be wrong too. parts: the
    step's costs."""
    layers = plan.residuals.layers
    placed = np.array([[PLACEMENTS.index(layers[at].of(r)) for r in parts.known] for at in (0, -1)])
    return any(
        plan.places == other.places
        and _run_alike(other, plan.micro_batches, plan.residuals.tile_tokens, plan.states_on_host)
        and all(_near(parts, placed[[at]], other.residuals.layers[at])[0] for at in (0, -1))
        for other in others
    )


class _Relatives:
    """A test of which pairs of layer plans resemble plans that failed, by which `_best_pair` leaves such pairs out. A
    layer plan places the residuals of a layer; a pair is one for the first layers and one for the rest.

    Args:
      parts: the step's costs.
      others: the plans that failed, of which the caller gives those that `_run_alike` says run alike.
      table: the layer plans that are paired.
    """

    def __init__(self, parts: StepCost, others: Sequence[StepPlan], table: LayerPlans):
        ends = [(plan.residuals.layers[0], plan.residuals.layers[-1]) for plan in others]
        self._near = [[_near(parts, table.placed, layer) for layer in layers] for layers in ends]

    def among(self, rows: slice, number: np.ndarray, count: int) -> np.ndarray:
        """bool[rows, plans]: which pairs of layer plans resemble a failed plan. The first plan of a pair is one of the
        plans `rows` in the table; the second can be every plan of the table.

        Args:
          rows: the range of the first plans' indices in the table.
          number: [rows, plans], whole numbers in any dtype: how many layers each pair has under its first plan; the
            others are under its second.
          count: the number of layers.
        """
        found = np.zeros(number.shape, bool)
        for first, last in self._near:
            whole = np.where(number > 0, (first & last)[rows, None], (first & last)[None, :])
            mixed = first[rows, None] & last[None, :]
            found |= np.where((number > 0) & (number < count), mixed, whole)
        return found


def smallest_plan(parts: StepCost, config: TrainConfig, device: Device, resident: int = 0) -> Forecast:
    """The forecast of the plan with the lowest predicted peak, whether it fits or not, and of plans with that peak the
    fastest, which may have more logits at a time; it is tried last and shown if nothing fits, and advice names a card
    that has room for it. parts: the step's costs. config: the run's, whose memory.plan and micro_batches are kept.
    resident: the least number of layers whose frozen weights are whole on each device. Raises ValueError as `choose`
    does."""
    try:
        return choose(parts, config, device, 0.0, resident=resident)
    except PlanError as error:
        smallest = error.smallest
    try:
        return choose(parts, config, device, smallest.peak_bytes, resident=resident)
    except PlanError:  # the search adds bytes in another order than the forecast, and may miss by less than a byte
        return smallest


def _best_pairs(
    parts,
    table,
    micro: int,
    chunks: Sequence[int],
    device,
    budget: float,
    tile,
    resident: int,
    relatives: _Relatives | None = None,
) -> list[Forecast]:
    """The best pair of layer plans for each number of tokens in `chunks` (ascending) whose logits exist at a time, for
    `_candidates`. The other arguments are passed to _best_pair: the step's costs (`parts`), the layer plans and their
    forecasts that _best_layers returned (`table`), the number of micro-batches, the device and its memory in bytes
    (`budget`), tokens of a tile or None, the number of layers whose frozen weights are whole on each device
    (`resident`), and pairs to leave out (`relatives`, or None).

    More tokens make the head faster and take more memory, and change nothing in the layers. So the best pair for fewer
    tokens stays the best as long as it fits, and if no pair fits, none fits with more tokens.

    Returns:
      the forecasts of the pairs; if one does not fit, it is the last.
    """
    found: list[Forecast] = []
    for chunk in chunks:
        if found:
            same = forecast(parts, dataclasses.replace(found[-1].plan, chunk_tokens=chunk), device)
            if same.peak_bytes <= budget:
                found.append(same)
                continue
        found.append(_best_pair(parts, table, micro, chunk, device, budget, tile, resident, relatives))
        if found[-1].peak_bytes > budget:
            break
    return found


def tokens_of(parts: StepCost, micro: int) -> float:
    """Tokens of a micro-batch on one device, padding included, if a step has `micro` micro-batches, as the forecasts of
    layers and of the head take them; a quotient, so not always a whole number. parts: the step's costs."""
    return parts.rows / micro / parts.devices * parts.length


def _best_pair(
    parts,
    table,
    micro: int,
    chunk_tokens: int,
    device,
    budget: float,
    tile: int | None,
    resident: int,
    relatives: _Relatives | None = None,
) -> Forecast:
    """The forecast of the fastest pair of layer plans that fits `budget`: one plan for the first layers, whose
    residuals live longest, and one for the rest, with as few layers under the first as fit. If no pair fits, the
    smallest. `_best_pairs` calls it.

    Args:
      parts: the step's costs.
      table: what _best_layers returned: the layer plans, and their forecasts.
      micro: number of micro-batches.
      chunk_tokens: tokens whose logits exist at a time.
      device: the device.
      budget: bytes of its memory.
      tile: tokens of a tile in which MLPs run; None: they run whole.
      resident: number of layers whose frozen weights are whole on each device.
      relatives: pairs that are left out, unless no other fits; None: none are.
    """
    count = parts.num_layers
    plans, of = table
    head = head_forecast(parts, chunk_tokens, tokens_of(parts, micro), device)
    kept, hosted, leaving, arriving = of.kept, of.hosted, bytes_with_gaps(of.leaving, device), of.arriving
    seconds = of.forward + of.backward
    at_loss, at_forward, at_backward = gathered_bytes(parts, 0, resident)
    loss = head[0] + at_loss
    work, forward = of.work + parts.head_gradient_bytes + at_backward, hosted + of.work_forward + at_forward
    room = budget
    budget -= parts.fixed_bytes(micro, resident) + parts.cast_bytes + parts.given_bytes * tokens_of(parts, micro)

    def best_of(rows: slice) -> tuple[bool, float, int, int, int]:
        """The best pair whose first plan is one of `rows`, with as many layers under it as the last moments of the step
        need.

        Returns:
          (whether no pair fits; its seconds, or its peak bytes if none fits; layers under the first plan; the index of
            the first plan; that of the other)
        """
        last_work = work + np.maximum(arriving[rows, None] - arriving[None, :], 0.0)
        over = count * kept + np.maximum(np.maximum(loss + hosted, forward + leaving), last_work) - budget
        saved = kept[None, :] - kept[rows, None]  # bytes saved by each further layer under the first plan
        with np.errstate(divide="ignore", invalid="ignore"):
            number = np.where(over > 0, np.where(saved > 0, np.ceil(over / saved), count), 0)
        number = np.clip(number, 0, count)
        rest = count - number
        residuals = number * kept[rows, None] + rest * kept[None, :]
        last_work = np.where(rest > 0, last_work, 0.0)
        last_hosted = np.where(rest > 0, hosted[None, :], hosted[rows, None])
        first_peak = np.where(number > 0, number * kept[rows, None] + work[rows, None], 0.0)
        last_forward = np.where(rest > 0, forward[None, :], forward[rows, None])
        last_forward += np.where(rest > 1, leaving[None, :], leaving[rows, None])  # of the second last layer
        last_moments = np.maximum(np.maximum(loss + last_hosted, last_forward), last_work)
        peak = np.maximum(residuals + last_moments, first_peak)
        time = number * seconds[rows, None] + rest * seconds[None, :]
        allowed = number * hosted[rows, None] + rest * hosted[None, :] <= device.host_bytes
        fits = (peak <= budget) & allowed
        if relatives is not None:
            fits &= ~relatives.among(rows, number, count)
        found = bool(fits.any())
        order = np.where(fits, np.round(time, 6) + 1e-18 * peak, np.inf) if found else np.where(allowed, peak, np.inf)
        first, last = np.unravel_index(int(np.argmin(order)), order.shape)
        return not found, float(order[first, last]), int(number[first, last]), int(first) + rows.start, int(last)

    rows = max(1, _PAIRS // len(plans))
    found = (best_of(slice(start, start + rows)) for start in range(0, len(plans), rows))
    _, _, number, first, last = min(found, key=lambda best: best[:2])
    layers = (plans[first],) * number + (plans[last],) * (count - number)
    residuals = ResidualPlan(layers, tile, resident=resident)
    best = forecast(parts, StepPlan(residuals, micro, chunk_tokens, *parts.places), device)
    alone = best.peak_bytes - parts.shared
    if alone <= room < best.peak_bytes:  # only a plan that keeps everything has shared bytes; the others need less
        return _best_pair(parts, table, micro, chunk_tokens, device, alone - 1, tile, resident, relatives)
    return best


def _best_layers(parts, tokens, device, tile) -> tuple[LayerPlans, LayerForecast]:
    """The layer plans from which pairs are formed: those of `layer_plans` that no other plan beats in kept bytes, work
    bytes of the backward, time and bytes on the host at once; of plans with equal forecasts only the first. If the
    device has no host link, no plan offloads. The search is short because only these are paired.

    Args:
      parts: the step's costs.
      tokens: tokens of a micro-batch on one device.
      device: the device.
      tile: tokens of a tile in which MLPs run; None: they run whole.
    Returns:
      (the plans, their forecasts as one LayerForecast of arrays)
    """
    plans = layer_plans(parts, device.link > 0)
    of = layer_forecasts(parts, plans.placed, tokens, device, tile)
    # Of plans with equal costs only the first is considered, which halves their number.
    different = np.sort(np.unique(np.stack(list(vars(of).values()), 1), axis=0, return_index=True)[1])
    figures = np.stack([of.kept, of.work, of.forward + of.backward, of.hosted], 1)[different]
    best = different[_unbeaten(figures)]
    return LayerPlans(parts.known, plans.placed[best]), of.at(best)


def _unbeaten(figures: np.ndarray) -> list[int]:
    """Indices, ascending, of the rows of `figures` [rows, figures] that no other row beats: the Pareto front. A row
    beats another if it is smaller in at least one figure and larger in none; the smaller a figure, the better. Equal
    rows all stay. `_best_layers` leaves out by it the layer plans that another one beats."""
    left = np.lexsort(figures.T)  # a row comes after every row that beats it, and equal rows are neighbours
    columns, found = figures.T[:, left], []
    while left.size:
        first, alike = columns[:, 0], 1
        while alike < left.size and (columns[:, alike] == first).all():
            alike += 1
        found += left[:alike].tolist()
        stay = np.logical_or.reduce([column < least for column, least in zip(columns, first, strict=True)])
        left, columns = left[stay], columns.compress(stay, axis=1)
    return sorted(found)


class PlanError(ValueError):
    """No plan fits the device. `choose` and `next_plan` raise it; Planner and --plan (shown_plan.py) raise it anew with
    `fixes`. Its message has them and the smallest plan's three largest parts; the other arguments become attributes.

    Args:
      smallest: the forecast with the lowest peak, of the plans that were considered.
      budget_bytes: the device memory that a step may take.
      fixes: changes of the config with which a plan would fit, for the message.
      compiled: True: the smallest plan was compiled or run, and was too large. False: only its forecast was too large.
      need_bytes: bytes that the compiler says the smallest plan needs; None: memory ran out while it ran, or `compiled`
        is False.
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
        largest = sorted(smallest.parts.items(), key=lambda part: -part[1])[:3]
        text = f"no plan fits: the smallest needs {smallest.peak_bytes / 1e9:.2f} GB of {budget_bytes / 1e9:.2f} GB"
        if compiled:
            found = "and memory ran out" if need_bytes is None else f"and compiled it needs {need_bytes / 1e9:.2f} GB"
            text = f"no plan fits in {budget_bytes / 1e9:.2f} GB: the smallest was predicted to need "
            text += f"{smallest.peak_bytes / 1e9:.2f} GB, {found}"
        text += ". Its largest parts: " + "; ".join(f"{name} {value / 1e9:.2f} GB" for name, value in largest) + "."
        if fixes:
            text += " What would fit: " + "; ".join(fixes) + "."
        super().__init__(text)
