"""What becomes of every residual between forward and backward, as a value."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, get_args

from jaxtune.models.layers.segment import Residual

# Kept in device memory; copied to pinned host memory and back; dropped, and made again by running segments anew; kept
# in device memory rounded to e4m3.
Placement = Literal["keep", "offload", "recompute", "fp8"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)


class LayerPlan(Mapping[str, Placement]):
    """The placement of each residual of a layer, by name: LayerPlan(gate="offload", up="offload").

    Residuals that are not named have the placement `rest`; where that is recompute, those that nothing can recompute
    are kept, and where it is fp8, those that may not be. As a mapping it holds what is named. Immutable and hashable:
    programs are compiled for it.

    Raises:
      ValueError: a placement that does not exist.
    """

    __slots__ = ("_named", "rest")

    def __init__(self, rest: Placement = "keep", /, **placements: Placement):
        for name, placement in (("rest", rest), *placements.items()):
            if placement not in PLACEMENTS:
                raise ValueError(f"residual {name}: placement {placement!r} is not one of {', '.join(PLACEMENTS)}")
        self.rest: Placement = rest
        self._named: dict[str, Placement] = {
            name: placement for name, placement in placements.items() if placement != rest
        }

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
        """The placement of a residual.

        Raises:
          ValueError: it should be recomputed, and nothing can; or kept in FP8, and may not be.
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
        """Names of those of `residuals` that have this placement, in their order."""
        return tuple(residual.name for residual in residuals if self.of(residual) == placement)

    def resolved(self, residuals: Iterable[Residual]) -> LayerPlan:
        """The same plan of these residuals in its shortest words: equal plans are then equal values."""
        forms = []
        for word in (KEEP, IN_FP8, RECOMPUTE):
            other: dict[str, Placement] = {r.name: self.of(r) for r in residuals if self.of(r) != word.of(r)}
            forms.append(LayerPlan(word.rest, **other))
        return min(forms, key=lambda form: str(form).count(","))

    def __str__(self) -> str:
        """As configs and reports write it: "recompute, layer_input=offload"."""
        words = [self.rest] if self.rest != "keep" or not self._named else []
        return ", ".join([*words, *(f"{name}={value}" for name, value in self._named.items())])


KEEP = LayerPlan()
IN_FP8 = LayerPlan("fp8")
RECOMPUTE = LayerPlan("recompute")


@dataclasses.dataclass(frozen=True)
class ResidualPlan:
    """One LayerPlan a layer. Static: a program is compiled for one plan.

    tile_tokens: where set, layers that recompute all that is inside their tokenwise segments (gate and up of an MLP)
      run these over tiles of this many tokens of each row, which it must divide. Sums of the weights' gradients are
      then over tiles.
    whole_weights: where weights are divided over devices, those of the last so many layers stay whole from forward to
      backward, and are not gathered again. Those of the last layer do anyway.
    resident: where weights are divided over devices, those of the first so many layers that do not train are whole on
      each device all the time, and are never gathered; of all layers: those of embedding and head too.
    """

    layers: tuple[LayerPlan, ...]
    tile_tokens: int | None = None
    whole_weights: int = 0
    resident: int = 0

    @classmethod
    def uniform(cls, layer: LayerPlan, num_layers: int, tile_tokens: int | None = None) -> ResidualPlan:
        return cls((layer,) * num_layers, tile_tokens)


def residuals_of(layers: Iterable) -> tuple[Residual, ...]:
    """All residuals that any of the blocks has, each name once, in the order in which they are made."""
    found: dict[str, Residual] = {}
    for layer in layers:
        for residual in layer.residuals():
            found.setdefault(residual.name, residual)
    return tuple(found.values())


def unknown_residual(name: str, known: Iterable[str]) -> str:
    """What to say of a name that no residual has."""
    known = list(known)
    near = difflib.get_close_matches(name, known, 1)
    hint = f" (nearest: {near[0]})" if near else ""
    return f"no layer has a residual {name!r}{hint}; there are: {', '.join(known)}"
