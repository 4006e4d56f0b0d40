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
from collections.abc import Sequence
from typing import cast

from jaxtune.models.layers.segment import Residual
from jaxtune.models.stack.residual_plan import (
    PLACEMENTS,
    LayerPlan,
    Placement,
    ResidualPlan,
    unknown_residual,
)


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """How a step runs. A plan is static: another plan needs other programs."""

    residuals: ResidualPlan  # the placements, by layer, with the tile and the layers whose divided weights are whole
    micro_batches: int  # number of micro-batches into which the rows of a step are divided
    chunk_tokens: int  # number of tokens whose logits exist at a time
    # whether the tables of embeddings (host_table.py) are on the host, and the device gets the rows of a batch's tokens
    table_on_host: bool = False
    # whether the optimizer's states are on the host between updates, as the plan decides for an adapter's
    states_on_host: bool = False
    # whether the layers' frozen FP8 weights have their codes transposed beside them (kept_codes.py)
    transposed_codes: bool = False

    @property
    def places(self) -> tuple[bool, bool, bool]:
        return self.table_on_host, self.states_on_host, self.transposed_codes

    def to_record(self) -> dict[str, object]:
        """JSON values of the plan, for checkpoints, other processes and the record of failed plans."""
        text = residuals_text(self.residuals)
        hosted = {"embeddings": self.table_on_host, "optimizer_states": self.states_on_host}
        placements = {name: "host" for name, on_host in hosted.items() if on_host}
        placements |= {"transposed_codes": "device"} if self.transposed_codes else {}
        return {"residuals": text, "micro_batches": self.micro_batches, "chunk_tokens": self.chunk_tokens, **placements}

    @classmethod
    def from_record(cls, record: dict, num_layers: int, residuals: Sequence[Residual]) -> StepPlan:
        """The plan of a `to_record`; unknown entries are ignored. Raises ValueError if it is not possible for these
        layers and residuals.

          record: JSON values. num_layers, residuals: of the model that the plan is for.
        """
        plan = parse_residuals(record["residuals"], num_layers, residuals)
        hosted = record.get("embeddings") == "host", record.get("optimizer_states") == "host"
        placements = *hosted, record.get("transposed_codes") == "device"
        return cls(plan, int(record["micro_batches"]), int(record["chunk_tokens"]), *placements)


def residuals_text(plan: ResidualPlan) -> str:
    """The text of a residual plan, which `parse_residuals` reads; consecutive equal layers form one range."""
    groups: list[tuple[int, int, LayerPlan]] = []
    for index, layer in enumerate(plan.layers):
        if groups and groups[-1][2] == layer:
            groups[-1] = (groups[-1][0], index, layer)
        else:
            groups.append((index, index, layer))
    suffixes = [] if plan.tile_tokens is None else [f"tile={plan.tile_tokens}"]
    suffixes += [f"whole={plan.whole_weights}"] if plan.whole_weights else []
    suffixes += [f"resident={plan.resident}"] if plan.resident else []
    if len(groups) == 1:
        return "; ".join([str(groups[0][2]), *suffixes])
    return "; ".join([*(f"{first}-{last}: {layer}" for first, last, layer in groups), *suffixes])


def parse_residuals(text: str, num_layers: int, residuals: Sequence[Residual]) -> ResidualPlan:
    """The residual plan of a text (see the module). Layers count from 0, ranges include their last. "tile=" is not
    checked against the rows. Raises ValueError, which begins with memory.plan, for what is unknown or impossible and
    for layers named twice or not at all.

      residuals: those that a layer of the model has.
    """
    layers: list[LayerPlan | None] = [None] * num_layers
    first_part, *sections = text.split(";")
    numbers: dict[str, int] = {}
    while sections and (match := re.fullmatch(r"\s*(tile|whole|resident)\s*=\s*([1-9]\d*)\s*", sections[-1])):
        numbers[match[1]] = int(match[2])
        sections.pop()
    try:
        for word in ("whole", "resident"):
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
    layer_plans = tuple(layer for layer in layers if layer is not None)
    return ResidualPlan(layer_plans, numbers.get("tile"), numbers.get("whole", 0), numbers.get("resident", 0))


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
