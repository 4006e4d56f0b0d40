"""The plan of a step, as a value and as text of configs, checkpoints and reports:

- `keep`: every residual stays in device memory;
- `recompute`: only each layer's input stays, and what cannot be recomputed;
- `offload`: all go to the host;
- `gate=fp8, up=fp8`: these are kept in e4m3 (needs model.compute=fp8), others as they are;
- `recompute, layer_input=offload`: one placement, then exceptions;
- `0-11: recompute; 12-31: gate=recompute, up=recompute`: by layer; all must be named;
- `recompute; tile=8192`: MLPs that recompute gate and up run over tiles of 8,192 tokens;
- `keep; whole=8`: divided weights of the last 8 layers stay gathered from forward to backward;
- `keep; resident=8`: divided frozen weights of the first 8 layers are whole for the run; with all layers, also
  embedding's and head's.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import cast

from jaxtune.models.layers.segment import Residual
from jaxtune.models.stack.residual_plan import (
    PLACEMENTS,
    LayerPlan,
    Placement,
    ResidualPlan,
    unknown_residual,
)
from jaxtune.train.planning.movables import MOVABLES


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """How a step runs. A plan is static: another plan needs other programs."""

    residuals: ResidualPlan  # the placements, by layer, with the tile
    micro_batches: int  # number of micro-batches into which the rows of a step are divided
    chunk_tokens: int  # number of tokens whose logits exist at a time
    # {word: level} of what else is moved (movables/), without those at level 0
    moved: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self):
        object.__setattr__(self, "moved", {word: int(level) for word, level in self.moved.items() if level})

    def level(self, word: str) -> int:
        return self.moved.get(word, 0)

    def at(self, **levels: int) -> StepPlan:
        """The plan with other levels of some movables."""
        return dataclasses.replace(self, moved={**self.moved, **levels})

    @property
    def places(self) -> dict[str, int]:
        """`moved`, without what counts layers."""
        return {word: level for word, level in self.moved.items() if not MOVABLES[word].counted}

    @property
    def text(self) -> str:
        """As configs and reports write it; `parse_plan` reads it."""
        counts = [f"{word}={self.level(word)}" for word in _counted() if self.level(word)]
        return "; ".join([residuals_text(self.residuals), *counts])

    def to_record(self) -> dict[str, object]:
        """JSON values of the plan, for checkpoints, other processes and the record of failed plans."""
        sides = {word: MOVABLES[word].side for word in self.places}
        return {"residuals": self.text, "micro_batches": self.micro_batches, "chunk_tokens": self.chunk_tokens, **sides}

    @classmethod
    def from_record(cls, record: dict, num_layers: int, residuals: Sequence[Residual]) -> StepPlan:
        """The plan of a `to_record`; unknown entries are ignored. Raises ValueError if it is not possible for these
        layers and residuals.

          record: JSON values. num_layers, residuals: of the model that the plan is for.
        """
        plan, moved = parse_plan(record["residuals"], num_layers, residuals)
        for word, movable in MOVABLES.items():
            if movable.side is not None and record.get(word) == movable.side:
                moved[word] = 1
        return cls(plan, int(record["micro_batches"]), int(record["chunk_tokens"]), moved)


def _counted() -> list[str]:
    return [word for word, movable in MOVABLES.items() if movable.counted]


def residuals_text(plan: ResidualPlan) -> str:
    """The text of a residual plan, which `parse_plan` reads; consecutive equal layers form one range."""
    groups: list[tuple[int, int, LayerPlan]] = []
    for index, layer in enumerate(plan.layers):
        if groups and groups[-1][2] == layer:
            groups[-1] = (groups[-1][0], index, layer)
        else:
            groups.append((index, index, layer))
    tile = [] if plan.tile_tokens is None else [f"tile={plan.tile_tokens}"]
    if len(groups) == 1:
        return "; ".join([str(groups[0][2]), *tile])
    return "; ".join([*(f"{first}-{last}: {layer}" for first, last, layer in groups), *tile])


def parse_plan(text: str, num_layers: int, residuals: Sequence[Residual]) -> tuple[ResidualPlan, dict[str, int]]:
    """(residual plan, {word: level} of what else counts layers) of a text (see the module). Layers count from 0, ranges
    include their last. "tile=" is not checked against the rows. Raises ValueError, which begins with memory.plan, for
    what is unknown or impossible and for layers named twice or not at all.

      residuals: those that a layer of the model has.
    """
    return _parsed(text, num_layers, residuals, _counted())


def _parsed(
    text: str, num_layers: int, residuals: Sequence[Residual], counted: Sequence[str]
) -> tuple[ResidualPlan, dict[str, int]]:
    layers: list[LayerPlan | None] = [None] * num_layers
    first_part, *sections = text.split(";")
    numbers: dict[str, int] = {}
    number = re.compile(rf"\s*({'|'.join(('tile', *counted))})\s*=\s*([1-9]\d*)\s*")
    while sections and (match := number.fullmatch(sections[-1])):
        numbers[match[1]] = int(match[2])
        sections.pop()
    try:
        for word in counted:
            if numbers.get(word, 0) > num_layers:
                raise ValueError(f"{word}={numbers[word]} is more than the model's {num_layers} layers")
        for section in [first_part, *sections]:
            match = re.fullmatch(r"\s*(?:(\d+)(?:-(\d+))?\s*:)?(.*)", section, re.DOTALL)
            assert match is not None
            first = int(match[1]) if match[1] else 0
            last = int(match[2] or match[1]) if match[1] else num_layers - 1
            if not first <= last < num_layers:
                layer_plans = f"0-{num_layers - 1}"
                raise ValueError(f"layers {first}-{last} are not in a model of {num_layers} layers ({layer_plans})")
            plan = _parse_layer(match[3], residuals)
            for index in range(first, last + 1):
                if layers[index] is not None:
                    raise ValueError(f"layer {index} is named twice")
                layers[index] = plan
        if None in layers:
            missing = layers.index(None)
            raise ValueError(f"layer {missing} is not named; the model has layers 0-{num_layers - 1}")
    except ValueError as error:
        names = ", ".join(residual.name for residual in residuals)
        raise ValueError(
            f"memory.plan = {text!r}: {error}. Residuals: {names}; placements: {', '.join(PLACEMENTS)}; "
            "layers: 0-11: recompute; 12-31: keep"
        ) from None
    tile = numbers.pop("tile", None)
    return ResidualPlan(tuple(layer for layer in layers if layer is not None), tile), numbers


def _parse_layer(text: str, residuals: Sequence[Residual]) -> LayerPlan:
    """The plan of one layer from text such as "recompute, layer_input=offload"."""
    default: Placement = "keep"
    named: dict[str, Placement] = {}
    names = [residual.name for residual in residuals]
    for position, item in enumerate(text.split(",")):
        name, equals, placement = (piece.strip() for piece in item.partition("="))
        if not equals and position == 0 and name in PLACEMENTS:
            default = cast(Placement, name)
        elif not equals:
            near = difflib.get_close_matches(name, [*names, *PLACEMENTS], 1)
            hint = f" (nearest: {near[0]})" if near else ""
            raise ValueError(
                f"cannot read {item.strip()!r}{hint}; write {', '.join(PLACEMENTS)}, or residual=placement"
            )
        elif name not in names:
            raise ValueError(f"cannot read {item.strip()!r}: {unknown_residual(name, names)}")
        else:
            named[name] = placement  # type: ignore[assignment]
    if default == "fp8" and not any(residual.in_fp8 for residual in residuals):
        raise ValueError("no residual of this model is kept in FP8; those of an MLP are, where model.compute is fp8")
    return LayerPlan(default, **named).resolved(residuals)
