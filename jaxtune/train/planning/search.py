"""The search for a plan that fits. Forecasts propose plans, the compiler's figure decides whether one fits, and
failures correct the forecasts.

At most four plans are compiled. The first plan is the fastest by forecast. The second is the fastest that fits under
two assumptions: the forecasts of plans that run like the first one (`choice._run_alike`) are as wrong as its own
forecast, and all other forecasts are right. The third is the fastest that fits if every forecast is as wrong as the
worst one so far, with some memory to spare. Plans that resemble a failed one (`choice._related` says which) are left
out, because their forecasts are wrong in the same way. But after a plan that fits as compiled and ran out of memory in
the first step, the next one is smaller by the bytes that the step lacked, and may resemble it. The last is the smallest
plan there is; it is taken earlier if no other is left. `next_plan` chooses each; before the last one, a plan's
predicted peak may be at most `goal`, which failures (`Failed`) lower. `Room` is the device memory, and decides whether
a compiled step fits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jaxtune.train.config import TrainConfig
from jaxtune.train.planning.choice import PlanError, choose, smallest_plan
from jaxtune.train.planning.cost import StepCost
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.forecasts import Forecast
from jaxtune.train.planning.plan import StepPlan

_BEFORE_SMALLEST = 3  # this many plans may fail before the smallest is tried
# The next forecast is assumed to be as wrong as the worst one, to within this share of the budget, or of the bytes by
# which that one was wrong if these are fewer: beside large weights a small error is a large part of a micro-batch.
_CLOSE, _CLOSE_TO_ERROR = 0.01, 0.25
_DIFFER = 1.03  # after two forecasts were wrong by different shares, the next may be worse by this factor
# A step that ran out of memory is assumed to need this many times the forecast; the true figure is unknown.
_MORE = 1.15
# The share of the budget by which a compiled step may exceed it. Forecasts are up to 0.3 % low (Qwen3.5 on an H200),
# the budget leaves four times as much for fragmentation, and a second compilation takes minutes.
_EXCESS = 0.005


@dataclasses.dataclass(frozen=True)
class Failed:
    """A plan that was compiled or run, in this run or an earlier one, and needed more device memory than there was. The
    next plan is chosen by what it shows of the forecasts."""

    plan: StepPlan  # the plan that was too large
    peak_bytes: float  # as predicted
    need_bytes: float | None  # as compiled; None: memory ran out while it was compiled or ran; its need is unknown
    # the bytes that it lacked when it ran although it fits as compiled (`short_bytes`); None: it failed otherwise
    short_bytes: float | None = None

    def goal(self, budget_bytes: float | None) -> float:
        """The largest predicted peak, in bytes, that the next plan may have. It assumes that the next forecast is wrong
        by the same ratio as this one, so that the next plan's need stays within budget_bytes. It leaves spare 1 % of
        the budget or a quarter of this forecast's error, whichever is less. If there is no budget (None), or if this
        plan's need is unknown, the result is this plan's peak divided by 1.15, or, if it is known how much it lacked
        when it ran, its peak without these bytes. It is never more than this plan's peak. The function `goal` takes the
        least result of all failures."""
        if self.short_bytes is not None:
            return self.peak_bytes - self.short_bytes
        if self.need_bytes is None or budget_bytes is None:
            return self.peak_bytes / _MORE
        spare = min(_CLOSE * budget_bytes, _CLOSE_TO_ERROR * max(self.need_bytes - self.peak_bytes, 0.0))
        return min(budget_bytes * self.peak_bytes / self.need_bytes - spare, self.peak_bytes)

    @property
    def ratio(self) -> float:
        """The bytes that the plan needs over those that were predicted; an assumed 1.15 if its need is unknown, and 1
        if it fits as compiled. The function `goal` compares those of several failures: the more they differ, the less
        the next plan may need."""
        if self.short_bytes is not None:
            return 1.0
        return (self.need_bytes or self.peak_bytes * _MORE) / self.peak_bytes


@dataclasses.dataclass(frozen=True)
class Room:
    """The device memory for a step, in bytes: what a plan should take, and what the smallest plan may try to use. Both
    are None if nothing limits them. `fits` compares the need of a compiled step with them."""

    budget_bytes: float | None  # what a plan may take: limit_bytes without what fragmentation loses (devices.budget)
    limit_bytes: float | None  # all that the allocator may give out, at most memory.budget_gb (devices.limit)

    def fits(self, need_bytes: float, smallest: bool) -> bool:
        """Whether a compiled step that needs `need_bytes` of device memory may run: within the budget, which it may
        exceed by half a percent. smallest: True: its plan is the smallest there is, and may use `limit_bytes`, but no
        more; False: it is not. Planner.fits asks it of the compiler's figure; forecasts are compared with the two
        fields."""
        if self.budget_bytes is None or self.limit_bytes is None:
            return True
        within = self.budget_bytes * (1 + _EXCESS)
        return need_bytes <= (max(within, self.limit_bytes) if smallest else within)


def short_bytes(room: Room, refused: float | None, free: float | None) -> float | None:
    """The device bytes by which the next step must need less after one that fits as compiled ran out of memory when it
    ran, for `Failed`: those that it lacked, but at least half of what fragmentation was expected to lose (the limit of
    `room` without its budget), because a refused block may be smaller than what is free in all. None if nothing limits
    the memory. refused: bytes of the allocation that was refused. free: bytes that the allocator still had then. Both
    are None if they are unknown. Planner.short_bytes calls it."""
    if room.budget_bytes is None or room.limit_bytes is None:
        return None
    lacked = 0.0 if refused is None or free is None else refused - free
    return max(lacked, (room.limit_bytes - room.budget_bytes) / 2)


def goal(budget_bytes: float | None, failed: Sequence[Failed]) -> float | None:
    """The largest predicted peak, in bytes, that the next plan may have, if a step may take budget_bytes (None: no
    limit). Without failures it is budget_bytes; with failures it is a number, also without a limit. The failures
    `failed` lower it, because they show by how much forecasts are too low: it is the least of their goals
    (`Failed.goal`). If there are several, that is divided by the largest of their ratios of need to forecast
    (`Failed.ratio`) over the smallest, or by 1.03 if this is more. `next_plan` keeps to it before it takes the smallest
    plan, and if no plan is left, the settings that Planner's error names keep to it."""
    if not failed:
        return budget_bytes
    ratios = [one.ratio for one in failed]
    least = min(one.goal(budget_bytes) for one in failed)
    return least if len(failed) == 1 else least / max(max(ratios) / min(ratios), _DIFFER)


def next_plan(
    parts: StepCost, config: TrainConfig, device: Device, room: Room, failed: Sequence[Failed] = (), resident: int = 0
) -> tuple[Forecast, bool]:
    """The plan to compile next for a step of which the plans `failed` were too large: after fewer than three failures
    the fastest one within `goal` that resembles none of them (`choice._related`), if there is one, else the smallest.
    After one failure whose need is known, `goal` holds only for plans that run like it (`choice._run_alike`).
    Planner calls it for the first plan and after each failure; show_plan, the --plan without rows, which compiles
    nothing, calls it once.

    Args:
      parts: the step's costs.
      config: the run's; what its memory.plan and micro_batches set is not changed.
      device: the device.
      room: its memory.
      failed: the plans that were compiled, or run, and were too large.
      resident: the least number of layers whose frozen weights are whole on each device, because they already are.
    Returns:
      (its forecast, whether it is the smallest plan there is)
    Raises:
      PlanError: no plan is left: the smallest one failed, or its forecast exceeds `room.limit_bytes`.
      ValueError: config.memory.plan cannot be read, or the host's memory is too small for the optimizer's states.
    """
    if len(failed) < _BEFORE_SMALLEST:
        try:
            plans = [one.plan for one in failed if one.short_bytes is None]
            budget = least = goal(room.budget_bytes, failed)
            if len(failed) == 1 and failed[0].need_bytes is not None:
                budget = room.budget_bytes
            alike = math.inf if least is None else least
            found = choose(parts, config, device, budget, resident=resident, unlike=plans, alike_bytes=alike)
            return found, False
        except PlanError:
            pass  # forecasts may be too high, so the smallest plan is still tried
    smallest = smallest_plan(parts, config, device, resident)
    budget = room.budget_bytes if room.budget_bytes is not None else smallest.peak_bytes / _MORE
    for one in failed:
        if one.plan == smallest.plan:
            raise PlanError(smallest, budget, compiled=True, need_bytes=one.need_bytes)
    if room.limit_bytes is not None and smallest.peak_bytes > room.limit_bytes:
        raise PlanError(smallest, budget)
    return smallest, True
