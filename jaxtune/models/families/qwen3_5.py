"""Qwen3.5 and 3.6, the text model: gated delta nets, gated attention in every fourth layer, and MLPs."""

from __future__ import annotations

from jaxtune.models.config import DecoderConfig
from jaxtune.models.families import common

NORMS = common.LLAMA_NORMS
_DEFAULTS = common.DELTA_DEFAULTS | {"num_key_value_heads": 4}


def from_hf(hf: dict) -> DecoderConfig:
    # Positions of text are the same along all of its rotary axes: mrope_section changes nothing.
    return common.delta_config(_DEFAULTS | hf)


def to_hf(config: DecoderConfig) -> dict:
    return common.hf_config(config, "Qwen3_5ForCausalLM", **common.delta_to_hf(config))
