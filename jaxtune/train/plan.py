"""The plan of a step as a value, and as the text that configs, checkpoints and reports hold.

- `keep`: every residual stays in device memory;
- `recompute`: only each layer's input stays;
- `gate=offload, up=offload`: what is not named is kept; where there are experts, gate_up goes as both do;
- `recompute, layer_input=offload`: a word for all, then exceptions;
- `0-11: recompute; 12-31: gate=recompute, up=recompute`: by layers, all of them named;
- `recompute; tile=8192`: MLPs that recompute gate and up run over tiles of 8,192 tokens of each row.
"""

from __future__ import annotations

import dataclasses
import difflib
import re

from jaxtune.models.stack import KEEP, RECOMPUTE, LayerPlan, ResidualPlan

RESIDUALS = tuple(field.name for field in dataclasses.fields(LayerPlan))
_WORDS = {"keep": KEEP, "recompute": RECOMPUTE}


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """How a step is run. Static: a program is compiled for one plan.

    residuals: fates, by layer. micro_batches: parts that the rows of a step are computed in.
    chunk_tokens: tokens whose logits exist at a time.
    """

    residuals: ResidualPlan
    micro_batches: int
    chunk_tokens: int

    def to_record(self) -> dict[str, object]:
        """What a checkpoint stores; `from_record` reads it."""
        text = residuals_text(self.residuals)
        return {"residuals": text, "micro_batches": self.micro_batches, "chunk_tokens": self.chunk_tokens}

    @classmethod
    def from_record(cls, record: dict, num_layers: int) -> StepPlan:
        residuals = parse_residuals(record["residuals"], num_layers)
        return cls(residuals, int(record["micro_batches"]), int(record["chunk_tokens"]))


def layer_text(plan: LayerPlan) -> str:
    """One layer's fates in the shortest words."""
    options = []
    for word, base in _WORDS.items():
        other = [f"{name}={getattr(plan, name)}" for name in RESIDUALS if getattr(plan, name) != getattr(base, name)]
        if plan.gate == plan.up == plan.gate_up:  # a layer has gate and up, or gate_up: said once
            other = [item for item in other if not item.startswith("gate_up=")]
        options.append(([word] if word == "recompute" or not other else []) + other)
    return ", ".join(min(options, key=len))


def residuals_text(plan: ResidualPlan) -> str:
    """The text of a plan, which `parse_residuals` reads."""
    groups: list[tuple[int, int, LayerPlan]] = []
    for index, layer in enumerate(plan.layers):
        if groups and groups[-1][2] == layer:
            groups[-1] = (groups[-1][0], index, layer)
        else:
            groups.append((index, index, layer))
    tile = [] if plan.tile_tokens is None else [f"tile={plan.tile_tokens}"]
    if len(groups) == 1:
        return "; ".join([layer_text(groups[0][2]), *tile])
    return "; ".join([*(f"{first}-{last}: {layer_text(layer)}" for first, last, layer in groups), *tile])


def parse_residuals(text: str, num_layers: int) -> ResidualPlan:
    """A plan from its text, for a model of `num_layers` layers.

    Raises:
      ValueError: an unknown word, residual or fate; layers that are named twice, not at all, or not there.
    """
    layers: list[LayerPlan | None] = [None] * num_layers
    *parts, last_part = text.split(";")
    tile = re.fullmatch(r"\s*tile\s*=\s*([1-9]\d*)\s*", last_part) if parts else None
    for part in parts if tile else [*parts, last_part]:
        match = re.fullmatch(r"\s*(?:(\d+)(?:-(\d+))?\s*:)?(.*)", part, re.DOTALL)
        assert match is not None
        first = int(match[1]) if match[1] else 0
        last = int(match[2] or match[1]) if match[1] else num_layers - 1
        if not first <= last < num_layers:
            raise _error(text, f"layers {first}-{last} are not in a model of {num_layers} layers (0-{num_layers - 1})")
        plan = _parse_layer(match[3], text)
        for index in range(first, last + 1):
            if layers[index] is not None:
                raise _error(text, f"layer {index} is named twice")
            layers[index] = plan
    if None in layers:
        raise _error(text, f"layer {layers.index(None)} is not named; the model has layers 0-{num_layers - 1}")
    return ResidualPlan(tuple(layer for layer in layers if layer is not None), int(tile[1]) if tile else None)


def _parse_layer(text: str, whole: str) -> LayerPlan:
    plan, fates = KEEP, {}
    for position, item in enumerate(text.split(",")):
        name, equals, fate = (piece.strip() for piece in item.partition("="))
        if not equals and position == 0 and name in _WORDS:
            plan = _WORDS[name]
        elif not equals or name not in RESIDUALS:
            near = difflib.get_close_matches(name, [*RESIDUALS, *_WORDS], 1)
            hint = f" (nearest: {near[0]})" if near else ""
            raise _error(whole, f"cannot read {item.strip()!r}{hint}; write keep, recompute, or residual=fate")
        else:
            fates[name] = fate
    if "gate" in fates and fates["gate"] == fates.get("up"):
        fates.setdefault("gate_up", fates["gate"])
    try:
        return dataclasses.replace(plan, **fates)
    except ValueError as error:
        raise _error(whole, str(error)) from None


def _error(text: str, fault: str) -> ValueError:
    names = ", ".join(RESIDUALS)
    return ValueError(
        f"memory.plan = {text!r}: {fault}. Residuals: {names}; fates: keep, offload, recompute; "
        "layers: 0-11: recompute; 12-31: keep"
    )
