"""The gated delta rule (linear attention with a decaying state, of Qwen3-Next and Qwen3.5) over packed rows, whose
documents do not see each other, and the short convolution before it, each for whole rows in training and of prompts
(gated_delta_rule, short_convolution) and for the next token in generation (delta_rule_step, short_convolution_step).
delta_rule_state computes the state after a prompt, and delta_rule_chunk takes a prompt chunk by chunk."""

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
