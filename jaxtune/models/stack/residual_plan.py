"""Plans that say where each residual (a value of the forward that the backward reads) is until then: in device memory,
there in FP8, copied to the host and back, or dropped and recomputed.
"""

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
    """The placement of each residual of a layer by name, as in LayerPlan(gate="offload", up="offload"). Immutable and
    hashable, because programs are compiled for it.

    Residuals that are not named have the placement `rest`, or "keep" if they cannot have that. As a mapping it contains
    the named ones; `of` gives the placement of any.

    Raises ValueError for an unknown placement. Names are not checked here (run_stack does).
    """

    __slots__ = ("_named", "rest")

    def __init__(self, rest: Placement = "keep", /, **placements: Placement):
        for name, placement in (("rest", rest), *placements.items()):
            if placement not in PLACEMENTS:
                raise ValueError(f"residual {name}: placement {placement!r} is not one of {', '.join(PLACEMENTS)}")
        self.rest: Placement = rest
        self._named: dict[str, Placement] = placements

    def __getitem__(self, name: str) -> Placement:
        return self._named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerPlan) and (self.rest, self._named) == (other.rest, other._named)

    def __hash__(self) -> int:
        return hash((self.rest, frozenset(self._named.items())))

    def __repr__(self) -> str:
        words = [repr(self.rest)] if self.rest != "keep" else []
        return f"LayerPlan({', '.join([*words, *(f'{name}={value!r}' for name, value in self._named.items())])})"

    def of(self, residual: Residual) -> Placement:
        """The placement of a residual. Raises ValueError if the plan names it for one that it cannot have."""
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
        """The names of the residuals that have this placement, in the order of `residuals`."""
        return tuple(residual.name for residual in residuals if self.of(residual) == placement)

    def resolved(self, residuals: Iterable[Residual]) -> LayerPlan:
        """The shortest plan, with the `rest` keep, fp8 or recompute, that places these residuals alike, so that a
        program is compiled once for equal placements. `residuals` may be all of the model, also those that the layer
        lacks.
        """
        forms, residuals = [], tuple(residuals)
        for word in (KEEP, IN_FP8, RECOMPUTE):
            named: dict[str, Placement] = {r.name: self.of(r) for r in residuals if self.of(r) != word.of(r)}
            forms.append(LayerPlan(word.rest, **named))
        return min(forms, key=lambda form: str(form).count(","))

    def __str__(self) -> str:
        """As configs and reports write it, such as "recompute, layer_input=offload"."""
        words = [self.rest] if self.rest != "keep" or not self._named else []
        return ", ".join([*words, *(f"{name}={value}" for name, value in self._named.items())])


# Plans with one placement for all residuals that can have it.
KEEP = LayerPlan()
IN_FP8 = LayerPlan("fp8")
RECOMPUTE = LayerPlan("recompute")


@dataclasses.dataclass(frozen=True)
class ResidualPlan:
    """One LayerPlan for each layer, and how tiles and divided weights are treated. Static: a program is compiled for
    one plan.
    """

    layers: tuple[LayerPlan, ...]  # the plan of each layer
    # the number of tokens of a tile; None: there are no tiles. Layers that recompute everything inside their tokenwise
    # segments (gate and up of an MLP) run these over tiles of this many tokens of each row; it must divide the row. The
    # gradients of weights are then summed tile by tile.
    tile_tokens: int | None = None
    # where weights are divided over devices: the number of last layers whose weights stay gathered from forward to
    # backward. Those of the very last layer always do.
    whole_weights: int = 0

    @classmethod
    def uniform(cls, layer: LayerPlan, num_layers: int, tile_tokens: int | None = None) -> ResidualPlan:
        """The same plan for every layer; whole_weights is 0.

        layer: the plan.
        num_layers: of the model.
        tile_tokens: tokens of each row in a tile of tokenwise segments; None: no tiles.
        """
        return cls((layer,) * num_layers, tile_tokens)


def residuals_of(layers: Iterable) -> tuple[Residual, ...]:
    """All residuals of these layers (Blocks), each name once, in the order in which layers compute them."""
    residuals: dict[str, Residual] = {}
    for layer in layers:
        for residual in layer.residuals():
            residuals.setdefault(residual.name, residual)
    return tuple(residuals.values())


def unknown_residual(name: str, names: Iterable[str]) -> str:
    """The text of the error for a residual that a plan names and no layer has."""
    names = list(names)
    near = difflib.get_close_matches(name, names, 1)
    hint = f" (nearest: {near[0]})" if near else ""
    return f"no layer has a residual {name!r}{hint}; there are: {', '.join(names)}"
