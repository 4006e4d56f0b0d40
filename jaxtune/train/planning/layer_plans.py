"""The plans for one layer from which a step's plan is made."""

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
    """Thousands of plans for one layer as an array, converted when they are indexed. placed: int[plans, known], indices
    into PLACEMENTS.
    """

    def __init__(self, known: tuple[Residual, ...], placed: np.ndarray):
        self._known, self.placed = known, placed

    def __len__(self) -> int:
        return len(self.placed)

    def __getitem__(self, index: Any) -> LayerPlan:
        hows = (PLACEMENTS[placement] for placement in self.placed[index])
        return LayerPlan(**{r.name: how for r, how in zip(self._known, hows, strict=True)}).resolved(self._known)


def layer_plans(parts: StepCost, offload: bool) -> LayerPlans:
    """Every combination of placements; residuals decided jointly (Residual.decided_with) share one, `small` ones are
    kept.

    Of more than seven recomputable groups the seven largest are placed freely and the rest alike: each group triples
    the number of plans, and small ones have few bytes. offload: whether plans may copy residuals to the host.
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
        possible: dict[Placement, bool] = {
            "keep": True,
            "fp8": all(r.in_fp8 for r in group),
            "offload": offload,
            "recompute": all(r.recomputable for r in group),
        }
        return [PLACEMENTS.index(how) for how, can in possible.items() if can]

    combinations = np.array(list(itertools.product(*map(placements, groups))))
    placed = np.full((len(combinations), len(parts.known)), PLACEMENTS.index("keep"))
    for index, group in enumerate(groups):
        for residual in group:
            placed[:, parts.known.index(residual)] = combinations[:, index]
    return LayerPlans(parts.known, placed)
