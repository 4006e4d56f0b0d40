"""Plans that say for every residual (a value of the forward that the backward reads) where it is until then: kept in
device memory, kept there in FP8, copied to the host and back, or dropped and recomputed. LayerPlan has this for one
layer, ResidualPlan for all. The planner or a config makes plans, and the stack (stack.py) runs a model by one.
`residuals_of` lists the residuals that a plan may name, and `unknown_residual` is the error for another name."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, get_args

from jaxtune.models.layers.segment import Residual

# keep: in device memory. offload: copied to pinned host memory and back. recompute: dropped, and computed again by
# running segments again. fp8: in device memory, rounded to e4m3.
Placement = Literal["keep", "offload", "recompute", "fp8"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)


class LayerPlan(Mapping[str, Placement]):
    """The placement of each residual of a layer by name (`placements`), for example LayerPlan(gate="offload",
    up="offload"). A placement is "keep" (in device memory), "offload" (copied to the host and back), "recompute"
    (dropped and computed again) or "fp8" (kept, rounded to e4m3).

    Residuals that are not named have the placement `rest`. If that is recompute, residuals that cannot be recomputed
    are kept; if it is fp8, residuals that may not be rounded are kept. As a mapping {name: placement} it contains the
    residuals that are named; `of` gives the placement of any residual. It is immutable and hashable, because programs
    are compiled for it.

    Raises:
      ValueError: a placement that does not exist. Names are not checked: run_stack refuses those that no layer has.
    """

    __slots__ = ("_named", "rest")

    def __init__(self, rest: Placement = "keep", /, **placements: Placement):
        for name, placement in (("rest", rest), *placements.items()):
            if placement not in PLACEMENTS:
                raise ValueError(f"residual {name}: placement {placement!r} is not one of {', '.join(PLACEMENTS)}")
        self.rest: Placement = rest
        self._named: dict[str, Placement] = placements

    def __getitem__(self, name: str) -> Placement:
        """The placement of the residual `name`; raises KeyError if the plan does not name it."""
        return self._named[name]

    def __iter__(self) -> Iterator[str]:
        """Iterates over the names of the residuals that the plan names."""
        return iter(self._named)

    def __len__(self) -> int:
        """The number of residuals that the plan names."""
        return len(self._named)

    def __eq__(self, other: object) -> bool:
        """Whether `other` is a LayerPlan with the same `rest` and the same named placements."""
        return isinstance(other, LayerPlan) and (self.rest, self._named) == (other.rest, other._named)

    def __hash__(self) -> int:
        """A hash of `rest` and the named placements, because programs are compiled for each plan."""
        return hash((self.rest, frozenset(self._named.items())))

    def __repr__(self) -> str:
        """The plan as the call that makes it, such as "LayerPlan('recompute', gate='offload')"."""
        words = [repr(self.rest)] if self.rest != "keep" else []
        return f"LayerPlan({', '.join([*words, *(f'{name}={value!r}' for name, value in self._named.items())])})"

    def of(self, residual: Residual) -> Placement:
        """The placement that the plan gives to a residual, by which the stack's programs and the planner's forecasts
        go: the one by its name, otherwise `rest`, or "keep" where the residual cannot have the placement `rest`.

        Raises:
          ValueError: the plan names the residual as recompute or fp8, which it cannot be.
        """
        placement = self._named.get(residual.name, self.rest)
        cannot = None
        if placement == "recompute" and not residual.recomputable:
            cannot = "it can be kept or offloaded, but nothing can recompute it"
        if placement == "fp8" and not residual.in_fp8:
            cannot = "it is not kept in FP8; gate and up of an MLP are, where model.compute is fp8"
        if cannot is None:
            return placement
        if residual.name in self._named:
            raise ValueError(f"residual {residual.name}: {cannot}")
        return "keep"

    def named(self, placement: Placement, residuals: Iterable[Residual]) -> tuple[str, ...]:
        """Returns the names of the residuals to which the plan gives this placement (`of`), in the order of
        `residuals`. `described` sorts a layer's residuals by it for the stack, and the report of a plan counts them.
        residuals: all residuals of the layer; the report gives all of the model, and the result then also has names
        that the layer lacks. Raises ValueError as `of` does."""
        return tuple(residual.name for residual in residuals if self.of(residual) == placement)

    def resolved(self, residuals: Iterable[Residual]) -> LayerPlan:
        """Of the three plans with the `rest` keep, fp8 and recompute that give these residuals the same placements as
        this one, the plan that is written with the fewest entries (str), the first of several. So plans with equal
        placements become equal values, for which a program is compiled only once. The planner and the reading of
        configs return such plans.

        residuals: all residuals that the result may name; other names are left out. Both callers give all residuals of
        the model, so the result may name some that its layer lacks. Raises ValueError as `of` does.
        """
        forms, residuals = [], tuple(residuals)
        for word in (KEEP, IN_FP8, RECOMPUTE):
            other: dict[str, Placement] = {r.name: self.of(r) for r in residuals if self.of(r) != word.of(r)}
            forms.append(LayerPlan(word.rest, **other))
        return min(forms, key=lambda form: str(form).count(","))

    def __str__(self) -> str:
        """The plan as configs and reports write it, such as "recompute, layer_input=offload"."""
        words = [self.rest] if self.rest != "keep" or not self._named else []
        return ", ".join([*words, *(f"{name}={value}" for name, value in self._named.items())])


# Plans with one placement for all residuals that can have it.
KEEP = LayerPlan()
IN_FP8 = LayerPlan("fp8")
RECOMPUTE = LayerPlan("recompute")


@dataclasses.dataclass(frozen=True)
class ResidualPlan:
    """The plan of a whole model: one LayerPlan for each layer, and how tiles and divided weights are treated. It is a
    static argument: a program is compiled for one plan. `uniform` makes one with the same plan for every layer."""

    layers: tuple[LayerPlan, ...]  # the plan of each layer
    # the number of tokens of a tile; None: there are no tiles. Layers that recompute everything inside their tokenwise
    # segments (gate and up of an MLP) run these over tiles of this many tokens of each row; it must divide the row. The
    # gradients of weights are then summed tile by tile.
    tile_tokens: int | None = None
    # where weights are divided over devices: the number of last layers whose weights stay gathered from forward to
    # backward. Those of the very last layer always do.
    whole_weights: int = 0
    # where weights are divided over devices: the number of first layers whose frozen weights are whole on each device
    # all the time, and are never gathered. If it is all layers, embedding and head are too. The planner counts with it
    # and training places the weights by it; the stack does not read it.
    resident: int = 0

    @classmethod
    def uniform(cls, layer: LayerPlan, num_layers: int, tile_tokens: int | None = None) -> ResidualPlan:
        """The plan in which each of num_layers layers has the plan `layer`; whole_weights and resident are 0. run_stack
        makes its default by it, in which all residuals are kept, and the planner makes the plan of passes without a
        backward, and one by which it finds out quickly whether any plan fits. A plan in a config is not made by it, but
        by parse_residuals. tile_tokens: the field of that name, tokens of each row in a tile; None: no tiles."""
        return cls((layer,) * num_layers, tile_tokens)


def residuals_of(layers: Iterable) -> tuple[Residual, ...]:
    """All residuals that these `layers` (Blocks) have, each name once, as the first layer that has it declares it, in
    the order in which layers compute them. run_stack checks the names in a plan by it, and the planner lists by it what
    it can place."""
    found: dict[str, Residual] = {}
    for layer in layers:
        for residual in layer.residuals():
            found.setdefault(residual.name, residual)
    return tuple(found.values())


def unknown_residual(name: str, known: Iterable[str]) -> str:
    """Returns the text of the error for `name`, a residual that a plan names and no layer has; the caller raises it.
    The text mentions the most similar of the `known` names, if one is similar, and all of them."""
    known = list(known)
    near = difflib.get_close_matches(name, known, 1)
    hint = f" (nearest: {near[0]})" if near else ""
    return f"no layer has a residual {name!r}{hint}; there are: {', '.join(known)}"
