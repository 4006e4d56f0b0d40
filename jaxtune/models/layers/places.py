"""How the parts of a layer are connected to its residual stream, computed from the layer's stages."""

from __future__ import annotations

import dataclasses
import functools

from jaxtune.models.config import Stage

LAYER_INPUT, MID, LAYER_OUTPUT = "layer_input", "mid", "layer_output"


@dataclasses.dataclass(frozen=True)
class Connection:
    """How one part is connected to the residual stream, as names of values and of norms."""

    reads: str  # name of the value of the residual stream that the part reads, the same for all parts of its stage
    norm: str | None  # the block's attribute with the norm of the part's INPUT; None: INPUT is the stream as it is
    post_norm: str | None  # the block's attribute with the norm of the part's output; None: there is none
    adds_to: str | None  # name of the value that the part's output is added to; None for the first part of a normed sum
    makes: str  # name of the result of that addition, or of the output itself where adds_to is None
    # True: `makes` is the sum of its stage's outputs so far, which is normed later; False: it is the residual stream
    in_sum: bool


@dataclasses.dataclass(frozen=True)
class SumNorm:
    """The norm of the sum of a stage's outputs (Stage.post_norm), and how it is connected to the residual stream."""

    name: str  # the block's attribute that has the norm
    total: str  # name of the sum that it norms
    adds_to: str  # name of the value of the residual stream that the normed sum is added to
    makes: str  # name of the result of that addition


@functools.lru_cache(64)
def connections_of(stages: tuple[Stage, ...]) -> tuple[dict[str, Connection], dict[str, SumNorm]]:
    """({part's name: its Connection}, {name of the last part of a stage whose sum is normed: the SumNorm of that
    sum}).
    """
    places, norms = {}, {}
    count, part_number, stream = sum(len(stage.parts) for stage in stages), 0, LAYER_INPUT
    for stage in stages:
        stage_input, total = stream, None
        first = stage.parts[0].name
        for part in stage.parts:
            part_number += 1
            after = LAYER_OUTPUT if part_number == count else MID if part_number == 1 else f"{MID}_{part_number}"
            adds_to, makes = (total, f"{part.name}_sum") if stage.post_norm else (stream, after)
            norm = f"{part.name if part.norm is True else part.norm}_norm" if part.norm else None
            post_norm = f"{part.name}_post_norm" if part.post_norm else None
            places[part.name] = Connection(stage_input, norm, post_norm, adds_to, makes, stage.post_norm)
            total, stream = makes, makes
        if stage.post_norm:
            norms[stage.parts[-1].name] = SumNorm(f"{first}_sum_norm", stream, stage_input, after)
            stream = after
    return places, norms
