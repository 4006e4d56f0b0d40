"""The search for a plan that fits: forecasts propose plans, the compiler's figure decides, failures correct the
forecasts.

At most four plans are compiled. The first is the fastest by forecast. The second takes forecasts of plans that run like
the first (`choice._runs`) to be as wrong as it was, the third all to be as wrong as the worst so far. Plans that
resemble a failed one are left out, as they are wrong in the same way; but after one that fitted as compiled and ran out
of memory, the next is smaller by what was short, and may resemble it. The last is the smallest plan.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jaxtune.system import timing
from jaxtune.train.planning.choice import PlanError, choose, smallest_plan
from jaxtune.train.planning.cost import StepCost
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.forecasts import Forecast
from jaxtune.train.planning.plan import StepPlan
from jaxtune.train.planning.step_spec import StepSpec

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
    """A plan that needed more device memory than there was, in this run or an earlier one."""

    plan: StepPlan  # the plan that was too large
    peak_bytes: float  # as predicted
    need_bytes: float | None  # as compiled; None: memory ran out while it was compiled or ran; its need is unknown
    # the bytes that it lacked when it ran although it fits as compiled (`short_bytes`); None: it failed otherwise
    short_bytes: float | None = None

    def goal(self, budget_bytes: float | None) -> float:
        """The largest predicted peak for the next plan, at most this one's. The next forecast is taken to be wrong by
        the same ratio; 1 % of the budget or a quarter of this error is spared. With an unknown need or no budget: the
        peak / 1.15; if a step lacked known bytes when it ran: the peak without these.
        """
        if self.short_bytes is not None:
            return self.peak_bytes - self.short_bytes
        if self.need_bytes is None or budget_bytes is None:
            return self.peak_bytes / _MORE
        spare = min(_CLOSE * budget_bytes, _CLOSE_TO_ERROR * max(self.need_bytes - self.peak_bytes, 0.0))
        return min(budget_bytes * self.peak_bytes / self.need_bytes - spare, self.peak_bytes)

    @property
    def ratio(self) -> float:
        """Needed over predicted bytes; 1.15 if unknown, 1 if the plan fits as compiled."""
        if self.short_bytes is not None:
            return 1.0
        return (self.need_bytes or self.peak_bytes * _MORE) / self.peak_bytes


@dataclasses.dataclass(frozen=True)
class Room:
    """Device bytes for a step; None: no limit."""

    budget_bytes: float | None  # what a plan may take: limit_bytes without what fragmentation loses (devices.budget)
    limit_bytes: float | None  # all that the allocator may give out, at most memory.budget_gb (devices.limit)

    def fits(self, need_bytes: float, smallest: bool) -> bool:
        """Whether a compiled step may run: within the budget and half a percent; the `smallest` plan within
        `limit_bytes`.
        """
        if self.budget_bytes is None or self.limit_bytes is None:
            return True
        allowed_bytes = self.budget_bytes * (1 + _EXCESS)
        return need_bytes <= (max(allowed_bytes, self.limit_bytes) if smallest else allowed_bytes)


def short_bytes(room: Room, refused: float | None, free: float | None) -> float | None:
    """Bytes by which the next step must be smaller after one that compiled to fit ran out: at least half of what
    fragmentation was expected to lose, because the `refused` block may be smaller than what is `free` in all. None if
    `room` has no limit.

      refused, free: bytes; None: unknown.
    """
    if room.budget_bytes is None or room.limit_bytes is None:
        return None
    lacked = 0.0 if refused is None or free is None else refused - free
    return max(lacked, (room.limit_bytes - room.budget_bytes) / 2)


def goal(budget_bytes: float | None, failed: Sequence[Failed]) -> float | None:
    """The largest predicted peak for the next plan: the budget, or the least `Failed.goal`, after several failures
    divided by 1.03 or by the largest over the smallest `Failed.ratio`.
    """
    if not failed:
        return budget_bytes
    ratios = [failure.ratio for failure in failed]
    least = min(failure.goal(budget_bytes) for failure in failed)
    return least if len(failed) == 1 else least / max(max(ratios) / min(ratios), _DIFFER)


@timing.during("plan", "search", "planning: what is kept and what is computed again")
def next_plan(
    costs: StepCost, spec: StepSpec, device: Device, room: Room, failed: Sequence[Failed] = ()
) -> tuple[Forecast, bool]:
    """(forecast, whether it is the smallest) of the plan to compile next: up to two failures the fastest within `goal`
    that resembles none, else the smallest. After one failure of known need, `goal` binds only plans that run like it.

      failed: plans that were too large.
      room: bytes that plans may take (`goal`), and the allocator's limit.

    PlanError if the smallest failed or is forecast above room.limit_bytes; ValueError as `choose`.
    """
    if len(failed) < _BEFORE_SMALLEST:
        try:
            plans = [failure.plan for failure in failed if failure.short_bytes is None]
            budget = least = goal(room.budget_bytes, failed)
            if len(failed) == 1 and failed[0].need_bytes is not None:
                budget = room.budget_bytes
            alike = math.inf if least is None else least
            fastest = choose(costs, spec, device, budget, unlike=plans, alike_bytes=alike)
            return fastest, False
        except PlanError:
            pass  # forecasts may be too high, so the smallest plan is still tried
    smallest = smallest_plan(costs, spec, device)
    budget = room.budget_bytes if room.budget_bytes is not None else smallest.peak_bytes / _MORE
    for failure in failed:
        if failure.plan == smallest.plan:
            raise PlanError(smallest, budget, compiled=True, need_bytes=failure.need_bytes)
    if room.limit_bytes is not None and smallest.peak_bytes > room.limit_bytes:
        raise PlanError(smallest, budget)
    return smallest, True
