"""The section `qat`: quantisation-aware training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict

from jaxtune.pallas.format_names import QAT_GROUPS, qat_group_size
from jaxtune.train.config.checks import not_negative, require

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class QatConfig:
    """Layers compute with weights rounded to a low-bit format, so that the model can be stored in it afterwards. A
    group_size of None becomes the format's default, which may be None: a scale for each row, or the format's own
    groups.
    """

    __pydantic_config__ = _STRICT

    format: Annotated[
        Literal[
            "int4",
            "int8-int4",
            "int8-int4-asymmetric",
            "int8",
            "fp8",
            "nvfp4",
            "nvfp4-nvfp4",
            "mxfp4",
            "mxfp4-mxfp4",
            "q4_0",
            "q8_0",
        ],
        "What weights are rounded to; int8-int4, int8-int4-asymmetric, fp8, nvfp4-nvfp4 and mxfp4-mxfp4 round "
        "activations too. q4_0 and q8_0 are GGUF's.",
    ] = "int4"
    group_size: Annotated[
        int | None,
        "Weights of a row that share a scale: 32, 64 or 128 (default) for int4, int8-int4 and int8-int4-asymmetric, "
        "32 or null for int8, 32 for q4_0 and q8_0.",
    ] = None
    start: Annotated[int, "Steps to train without rounding first."] = 0
    gradients: Annotated[
        Literal["straight_through", "clipped"],
        "Rounding passes every gradient, or (clipped) none to numbers outside the range of their scale.",
    ] = "straight_through"

    def __post_init__(self) -> None:
        if self.group_size is None:
            object.__setattr__(self, "group_size", QAT_GROUPS[self.format][-1])
        problem = qat_group_size(self.format, self.group_size)
        require(problem is None, "qat.group_size", self.group_size, problem or "")
        not_negative("qat.start", self.start)
