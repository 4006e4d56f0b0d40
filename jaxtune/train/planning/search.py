"""The search for a plan that fits: forecasts choose, the compiler's figure decides, and what failed is learned from.

At most four plans are compiled. The first is the fastest by its forecast. The next ones are the fastest as well, if
every forecast were as wrong as the worst so far; plans that place nearly everything as one that failed did are left
out, as a forecast that is wrong of one is wrong of the other. The last one is the smallest plan there is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxtune.train.config import TrainConfig
from jaxtune.train.planning.choice import PlanError, choose, smallest_plan
from jaxtune.train.planning.cost import StepCost
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.forecasts import Forecast
from jaxtune.train.planning.plan import StepPlan

_BEFORE_SMALLEST = 3  # plans that may fail before the smallest is tried
_CLOSE = 0.99  # another plan's forecast is as wrong to within so much
_DIFFER = 1.03  # by how much more, at least, once two were wrong by different shares
# A step that ran out of memory needed more than was predicted; by how much nobody says.
_MORE = 1.15
# Of the budget, by which a compiled step may exceed it. Forecasts are up to 0.3 % low (Qwen3.5 on an H200), the budget
# leaves four times as much to fragments, and a second compilation takes minutes.
_EXCESS = 0.005


@dataclasses.dataclass(frozen=True)
class Failed:
    """A plan that was too large. peak_bytes: as predicted. need_bytes: as compiled, or None: memory ran out, and nobody
    says how much more it takes."""

    plan: StepPlan
    peak_bytes: float
    need_bytes: float | None

    def goal(self, budget_bytes: float | None) -> float:
        """Bytes that a plan may be predicted to need if its forecast is as wrong as this one's."""
        if self.need_bytes is None or budget_bytes is None:
            return self.peak_bytes / _MORE
        return min(_CLOSE * budget_bytes * self.peak_bytes / self.need_bytes, self.peak_bytes)

    @property
    def ratio(self) -> float:
        return (self.need_bytes or self.peak_bytes * _MORE) / self.peak_bytes


@dataclasses.dataclass(frozen=True)
class Room:
    """budget_bytes: that a plan may take beside what the allocator loses. limit_bytes: with that, which the smallest
    plan may try to get by with, as there is no other. None: nothing limits them."""

    budget_bytes: float | None
    limit_bytes: float | None

    def fits(self, need_bytes: float, smallest: bool) -> bool:
        """Whether a compiled step of so many bytes may run; smallest: there is no smaller one."""
        if self.budget_bytes is None or self.limit_bytes is None:
            return True
        within = self.budget_bytes * (1 + _EXCESS)
        return need_bytes <= (max(within, self.limit_bytes) if smallest else within)


def goal(budget_bytes: float | None, failed: Sequence[Failed]) -> float | None:
    """Bytes that the next plan may be predicted to need."""
    if not failed:
        return budget_bytes
    ratios = [one.ratio for one in failed]
    least = min(one.goal(budget_bytes) for one in failed)
    return least if len(failed) == 1 else least / max(max(ratios) / min(ratios), _DIFFER)


def next_plan(
    parts: StepCost, config: TrainConfig, device: Device, room: Room, failed: Sequence[Failed] = (), resident: int = 0
) -> tuple[Forecast, bool]:
    """(the plan to compile, whether it is the smallest there is), of a step of which these plans failed. resident: as
    in `choose`.

    Raises:
      PlanError: no plan is left: the smallest is among those that failed, or there is no use in compiling it.
    """
    if len(failed) < _BEFORE_SMALLEST:
        try:
            plans = [one.plan for one in failed]
            found = choose(parts, config, device, goal(room.budget_bytes, failed), resident=resident, unlike=plans)
            return found, False
        except PlanError:
            pass  # by forecasts, which may be high
    smallest = smallest_plan(parts, config, device, resident)
    budget = room.budget_bytes if room.budget_bytes is not None else smallest.peak_bytes / _MORE
    for one in failed:
        if one.plan == smallest.plan:
            raise PlanError(smallest, budget, compiled=True, need_bytes=one.need_bytes)
    if room.limit_bytes is not None and smallest.peak_bytes > room.limit_bytes:
        raise PlanError(smallest, budget)
    return smallest, True
