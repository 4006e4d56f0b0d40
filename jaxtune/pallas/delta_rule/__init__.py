"""The gated delta rule over packed rows, and the short convolution before it."""

from jaxtune.pallas.delta_rule.api import (
    delta_rule_chunk,
    delta_rule_state,
    delta_rule_step,
    gated_delta_rule,
    short_convolution,
    short_convolution_step,
)

__all__ = [
    "delta_rule_chunk",
    "delta_rule_state",
    "delta_rule_step",
    "gated_delta_rule",
    "short_convolution",
    "short_convolution_step",
]
