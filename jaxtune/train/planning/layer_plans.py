"""The plans for one layer among which the choice of a plan is made: every combination of placements that the layer's
residuals allow, as long as there are few groups of residuals that are placed independently. `layer_plans` makes them,
as `LayerPlans`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtune.models.layers.segment import Residual
from jaxtune.models.residual_plan import PLACEMENTS, LayerPlan, Placement
from jaxtune.train.planning.cost import StepCost

_PLACED_ALONE = 7  # at most this many groups of residuals have a placement of their own


class LayerPlans(Sequence[LayerPlan]):
    """Plans for one layer, stored as an array, because there are thousands whose forecasts are computed at once, and
    converted to LayerPlan when they are indexed. A plan gives each residual a placement: keep, keep in fp8, offload to
    the host, or recompute.

    Args:
      known: the residuals of all layers of the model (StepCost.known).
      placed: int[plans, known], indices into PLACEMENTS, the tuple of the four placements; also an attribute.
    """

    def __init__(self, known: tuple[Residual, ...], placed: np.ndarray):
        self._known, self.placed = known, placed

    def __len__(self) -> int:
        """The number of plans."""
        return len(self.placed)

    def __getitem__(self, index: Any) -> LayerPlan:
        """The plan at `index`, an int, in its shortest form (LayerPlan.resolved)."""
        hows = (PLACEMENTS[at] for at in self.placed[index])
        return LayerPlan(**{r.name: how for r, how in zip(self._known, hows, strict=True)}).resolved(self._known)


def layer_plans(parts: StepCost, offload: bool) -> LayerPlans:
    """The plans to choose from, each for one layer: every combination of placements that its residuals allow. Residuals
    that are decided jointly (Residual.decided_with) have the same placement, and residuals that are declared `small`
    are kept. All are forecast (`layer_forecasts`), and the choice of a plan combines the best of them.

    If there are more than seven groups that may be recomputed, the seven largest of them are placed independently and
    the others of them alike: each further group triples the number of plans, and small groups have too few bytes to
    justify that. Groups that cannot be recomputed are always placed independently.

    Args:
      parts: the step's costs.
      offload: whether plans may copy residuals to the host; False: no plan does.
    """
    by_decision: dict[str, list[Residual]] = {}
    for residual in parts.known:
        if not residual.small:
            by_decision.setdefault(residual.decided_with or residual.name, []).append(residual)
    groups = list(by_decision.values())
    free = [group for group in groups if all(residual.recomputable for residual in group)]
    if len(free) > _PLACED_ALONE:
        free.sort(key=lambda group: sum(parts.residuals[r.name] for r in group), reverse=True)
        bound = [group for group in groups if group not in free]
        groups = [*bound, *free[:_PLACED_ALONE], [r for group in free[_PLACED_ALONE:] for r in group]]

    def placements(group: list[Residual]) -> list[int]:
        """The placements that all residuals of `group` can have, as indices into PLACEMENTS."""
        possible: dict[Placement, bool] = {
            "keep": True,
            "fp8": all(r.in_fp8 for r in group),
            "offload": offload,
            "recompute": all(r.recomputable for r in group),
        }
        return [PLACEMENTS.index(how) for how, can in possible.items() if can]

    chosen = np.array(list(itertools.product(*map(placements, groups))))
    placed = np.full((len(chosen), len(parts.known)), PLACEMENTS.index("keep"))
    for at, group in enumerate(groups):
        for residual in group:
            placed[:, parts.known.index(residual)] = chosen[:, at]
    return LayerPlans(parts.known, placed)
