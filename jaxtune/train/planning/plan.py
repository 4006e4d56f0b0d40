"""The plan of a step as a value (`StepPlan`), and as the text used in configs, checkpoints and reports:
`residuals_text` writes the text of a plan's placements, and `parse_residuals` reads it.

Examples of the text:

- `keep`: every residual stays in device memory;
- `recompute`: only each layer's input stays, and what else cannot be recomputed, such as a router's choice;
- `offload`: everything is copied to the host;
- `gate=offload, up=offload`: these two are offloaded, and residuals that are not named are kept;
- `gate=fp8, up=fp8`: these two are kept, rounded to e4m3, which needs model.compute=fp8;
- `recompute, layer_input=offload`: a placement for all residuals, then exceptions;
- `0-11: recompute; 12-31: gate=recompute, up=recompute`: placements by layer; all layers must be named;
- `recompute; tile=8192`: MLPs that recompute gate and up run over tiles of 8,192 tokens of each row;
- `keep; whole=8`: if weights are divided over devices, those of the last 8 layers stay gathered from forward to
  backward;
- `keep; resident=8`: if weights are divided over devices, the frozen weights of the first 8 layers are whole on each
  device for the whole run; with all layers, also those of embedding and head.

The model's layers declare which residuals exist (models/layers).
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from typing import cast

from jaxtune.models.layers.segment import Residual
from jaxtune.models.residual_plan import (
    PLACEMENTS,
    LayerPlan,
    Placement,
    ResidualPlan,
    unknown_residual,
)


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """How a step is run, as a planner chooses it. Forecasts are made of it, and Engine compiles its programs for it: a
    plan is static, so that another plan needs other programs. Of a ForwardPlanner's plan, `residuals` do not count."""

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
        """The last three fields, as StepCost.places has them; the search compares all."""
        return self.table_on_host, self.states_on_host, self.transposed_codes

    def to_record(self) -> dict[str, object]:
        """The plan as JSON values, which `from_record` reads: {"residuals": its text, "micro_batches", "chunk_tokens":
        the two numbers}, with "embeddings": "host" if the tables of embeddings are on the host, "optimizer_states":
        "host" if the plan has these there, and "transposed_codes": "device" if it keeps these. Checkpoints and the
        record of failed plans (known.py) store it, and processes exchange it."""
        text = residuals_text(self.residuals)
        hosted = {"embeddings": self.table_on_host, "optimizer_states": self.states_on_host}
        places = {what: "host" for what, on_host in hosted.items() if on_host}
        places |= {"transposed_codes": "device"} if self.transposed_codes else {}
        return {"residuals": text, "micro_batches": self.micro_batches, "chunk_tokens": self.chunk_tokens, **places}

    @classmethod
    def from_record(cls, record: dict, num_layers: int, residuals: Sequence[Residual]) -> StepPlan:
        """The plan in a `record` that to_record made, in a checkpoint or another process, for a model of `num_layers`
        layers that have these residuals; further entries of the record are ignored. Older versions
        wrote "per_layer_embeddings" for "embeddings". Raises ValueError, as parse_residuals does, if the plan is not
        possible for these layers and residuals. Planner reads records by it; those of failed plans (known.py) are only
        compared."""
        plan = parse_residuals(record["residuals"], num_layers, residuals)
        tables = "host" in (record.get("embeddings"), record.get("per_layer_embeddings"))
        places = tables, record.get("optimizer_states") == "host", record.get("transposed_codes") == "device"
        return cls(plan, int(record["micro_batches"]), int(record["chunk_tokens"]), *places)


def residuals_text(plan: ResidualPlan) -> str:
    """The text of a residual plan, such as "recompute; tile=8192", for configs, checkpoints and reports;
    parse_residuals reads it. Consecutive layers with the same placements are written as one range, and no range is
    written if all layers have them."""
    groups: list[tuple[int, int, LayerPlan]] = []
    for index, layer in enumerate(plan.layers):
        if groups and groups[-1][2] == layer:
            groups[-1] = (groups[-1][0], index, layer)
        else:
            groups.append((index, index, layer))
    more = [] if plan.tile_tokens is None else [f"tile={plan.tile_tokens}"]
    more += [f"whole={plan.whole_weights}"] if plan.whole_weights else []
    more += [f"resident={plan.resident}"] if plan.resident else []
    if len(groups) == 1:
        return "; ".join([str(groups[0][2]), *more])
    return "; ".join([*(f"{first}-{last}: {layer}" for first, last, layer in groups), *more])


def parse_residuals(text: str, num_layers: int, residuals: Sequence[Residual]) -> ResidualPlan:
    """Reads a residual plan from its `text`, such as "gate=offload, up=offload" or "0-11: recompute; 12-31: keep", that
    of config.memory.plan or of a record (StepPlan.from_record), for a model of `num_layers` layers that have these
    residuals (intermediate values that the backward reads). Parts of the text are separated by ";". A part gives
    placements (keep, fp8, offload or recompute): one for all residuals (those that cannot have it are kept; keep if it
    is left out), then exceptions such as up=offload, after the layers that it is for (all if it names none). The last
    parts may be tile=, whole= and resident= with a number from 1 (see ResidualPlan); whether the tile divides the rows
    is not checked here. Layers are counted from 0, and a range includes its last one.

    Raises:
      ValueError: an unknown word, residual or placement; an exception for a placement that the residual cannot have;
        fp8 for all where no residual can have it; a layer that is named twice, not at all, or does not exist; `whole`
        or `resident` larger than the number of layers. The message begins with memory.plan.
    """
    layers: list[LayerPlan | None] = [None] * num_layers
    first_part, *parts = text.split(";")
    numbers: dict[str, int] = {}
    while parts and (match := re.fullmatch(r"\s*(tile|whole|resident)\s*=\s*([1-9]\d*)\s*", parts[-1])):
        numbers[match[1]] = int(match[2])
        parts.pop()
    try:
        for word in ("whole", "resident"):
            if numbers.get(word, 0) > num_layers:
                raise ValueError(f"{word}={numbers[word]} is more than the model's {num_layers} layers")
        for part in [first_part, *parts]:
            match = re.fullmatch(r"\s*(?:(\d+)(?:-(\d+))?\s*:)?(.*)", part, re.DOTALL)
            assert match is not None
            first = int(match[1]) if match[1] else 0
            last = int(match[2] or match[1]) if match[1] else num_layers - 1
            if not first <= last < num_layers:
                known = f"0-{num_layers - 1}"
                raise ValueError(f"layers {first}-{last} are not in a model of {num_layers} layers ({known})")
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
    known = tuple(layer for layer in layers if layer is not None)
    return ResidualPlan(known, numbers.get("tile"), numbers.get("whole", 0), numbers.get("resident", 0))


def _parse_layer(text: str, residuals: Sequence[Residual]) -> LayerPlan:
    """The plan of one layer from what the text says about it, such as "recompute, layer_input=offload", for a layer
    with these residuals: first a placement for all of them (keep if there is none), then exceptions. Raises ValueError
    for what cannot be read; its message does not name the config key, which parse_residuals adds."""
    rest: Placement = "keep"
    named: dict[str, Placement] = {}
    known = [residual.name for residual in residuals]
    for position, item in enumerate(text.split(",")):
        name, equals, placement = (piece.strip() for piece in item.partition("="))
        if not equals and position == 0 and name in PLACEMENTS:
            rest = cast(Placement, name)
        elif not equals:
            near = difflib.get_close_matches(name, [*known, *PLACEMENTS], 1)
            hint = f" (nearest: {near[0]})" if near else ""
            raise ValueError(
                f"cannot read {item.strip()!r}{hint}; write {', '.join(PLACEMENTS)}, or residual=placement"
            )
        elif name not in known:
            raise ValueError(f"cannot read {item.strip()!r}: {unknown_residual(name, known)}")
        else:
            named[name] = placement  # type: ignore[assignment]
    if rest == "fp8" and not any(residual.in_fp8 for residual in residuals):
        raise ValueError("no residual of this model is kept in FP8; those of an MLP are, where model.compute is fp8")
    return LayerPlan(rest, **named).resolved(residuals)
