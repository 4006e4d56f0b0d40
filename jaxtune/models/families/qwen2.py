"""Qwen2 and Qwen2.5: biases on q, k and v; optionally a sliding window in the upper layers."""

from __future__ import annotations

from jaxtune.models.config import DecoderConfig, LayerSpec
from jaxtune.models.families import common

NORMS = common.LLAMA_NORMS
_DEFAULTS = {"num_key_value_heads": 32}


def from_hf(hf: dict) -> DecoderConfig:
    hf = _DEFAULTS | hf
    windows = common.upper_windows(hf)
    return common.decoder_config(hf, layers=tuple(LayerSpec(window) for window in windows), qkv_bias=True)


def to_hf(config: DecoderConfig) -> dict:
    return common.hf_config(config, "Qwen2ForCausalLM", **common.upper_windows_to_hf(config))
