"""Residuals of a layer: kept, kept in FP8, on the host, or computed again. A step's plan is made of plans for one layer
that no other beats.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtune.models.layers.segment import Residual
from jaxtune.models.stack.residual_plan import PLACEMENTS, LayerPlan, Placement
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.layer_forecasts import LayerForecast, layer_forecasts
from jaxtune.train.planning.movables.movable import Movable, Outcome
from jaxtune.train.planning.parts import StepParts

_PLACED_ALONE = 7  # at most this many groups of residuals have a placement of their own
# Placements in the order in which a plan is printed.
_PLACEMENTS: dict[Placement, str] = {
    "keep": "kept",
    "fp8": "kept in FP8",
    "offload": "on the host",
    "recompute": "computed again",
}


class Residuals(Movable):
    """By layer and name (ResidualPlan.layers), not by level."""

    word = "residuals"

    def lines(self, costs: StepParts, outcome: Outcome, device: Device) -> list[str]:
        """Each placement with its bytes on a device in a micro-batch, and its cost."""
        lines, layers = [], costs.layers
        tokens = costs.shape.tokens(outcome.micro_batches)
        cost: dict[Placement, str] = {
            "fp8": " before",
            "offload": f", {outcome.wait_seconds:.2f} s a step of waiting for the link",
            "recompute": f", {outcome.recompute_seconds:.2f} s a step",
        }
        for placement, words in _PLACEMENTS.items():
            placed_names = (
                name for layer in outcome.residuals.layers for name in layer.named(placement, layers.all_residuals)
            )
            counts = collections.Counter(name for name in placed_names if layers.residuals[name])
            if not counts or device.name == "cpu":
                continue
            size = sum(layers.residual_bytes(name, tokens) * count for name, count in counts.items())
            names = ", ".join(
                name if count == costs.shape.num_layers else f"{name} ({count} layers)"
                for name, count in counts.items()
            )
            lines.append(f"  {words} ({size / 1e9:.2f} GB{cost.get(placement, '')}): {names}")
        return lines


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


def layer_plans(costs: StepParts, offload: bool) -> LayerPlans:
    """Every combination of placements; residuals decided jointly (Residual.decided_with) share one, `small` ones are
    kept.

    Of more than seven recomputable groups the seven largest are placed freely and the rest alike: each group triples
    the number of plans, and small ones have few bytes. offload: whether plans may copy residuals to the host.
    """
    layers = costs.layers
    by_decision: dict[str, list[Residual]] = {}
    for residual in layers.all_residuals:
        if not residual.small:
            by_decision.setdefault(residual.decided_with or residual.name, []).append(residual)
    groups = list(by_decision.values())
    free = [group for group in groups if all(residual.recomputable for residual in group)]
    if len(free) > _PLACED_ALONE:
        free.sort(key=lambda group: sum(layers.residuals[r.name] for r in group), reverse=True)
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
    placed = np.full((len(combinations), len(layers.all_residuals)), PLACEMENTS.index("keep"))
    for index, group in enumerate(groups):
        for residual in group:
            placed[:, layers.all_residuals.index(residual)] = combinations[:, index]
    return LayerPlans(layers.all_residuals, placed)


def best_layers(costs: StepParts, tokens: float, device: Device, tile: int | None) -> tuple[LayerPlans, LayerForecast]:
    """(layer plans, forecasts) that no other beats in kept bytes, backward work bytes, time and host bytes at once. Few
    remain, so that pairing is quick. tokens, tile: as for `layer_forecasts`.
    """
    plans = layer_plans(costs, device.link > 0)
    forecasts = layer_forecasts(costs, plans.placed, tokens, device, tile)
    # Of plans with equal costs only the first is considered, which halves their number.
    different = np.sort(np.unique(np.stack(list(vars(forecasts).values()), 1), axis=0, return_index=True)[1])
    figures = np.stack([forecasts.kept, forecasts.work, forecasts.forward + forecasts.backward, forecasts.hosted], 1)[
        different
    ]
    best = different[_unbeaten(figures)]
    return LayerPlans(costs.layers.all_residuals, plans.placed[best]), forecasts.at(best)


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
