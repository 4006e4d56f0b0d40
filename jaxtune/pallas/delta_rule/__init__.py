"""The gated delta rule (linear attention with a decaying state) over packed rows, and the short convolution before it,
each for whole rows in training and for the next tokens in generation."""

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
