"""The section `qat` of a configuration: quantisation-aware training, in which weights are rounded to a low-bit
format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict

from jaxtune.pallas.format_names import QAT_GROUPS, qat_group_size
from jaxtune.train.config.checks import not_negative, require

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class QatConfig:
    """The section `qat` of a configuration: quantisation-aware training, in which the layers compute with weights
    rounded to a low-bit format, so that the model can be stored in that format afterwards. A group_size of None becomes
    the default of the format, which is None for int8 (a scale for each row) and for formats whose scales have groups of
    their own (fp8, nvfp4, mxfp4). One that the format does not have, and a negative start, raise ConfigError."""

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
        """Replaces a group_size of None by the default of the format, which may be None as well. Raises ConfigError if
        the format has no groups of this size, or `start` is negative."""
        if self.group_size is None:
            object.__setattr__(self, "group_size", QAT_GROUPS[self.format][-1])
        problem = qat_group_size(self.format, self.group_size)
        require(problem is None, "qat.group_size", self.group_size, problem or "")
        not_negative("qat.start", self.start)
