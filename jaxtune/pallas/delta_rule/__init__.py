"""The gated delta rule (linear attention of Qwen3-Next and Qwen3.5) over packed rows, and the short convolution before
it.
"""

from jaxtune.pallas.delta_rule.api import (
    delta_rule_chunk,
    delta_rule_state,
    delta_rule_step,
    gated_delta_rule,
    short_convolution,
    short_convolution_parts,
    short_convolution_step,
)

__all__ = [
    "delta_rule_chunk",
    "delta_rule_state",
    "delta_rule_step",
    "gated_delta_rule",
    "short_convolution",
    "short_convolution_parts",
    "short_convolution_step",
]
