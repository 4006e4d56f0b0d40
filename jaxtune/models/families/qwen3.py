"""Qwen3: each head's queries and keys are normed; optionally a sliding window in the upper layers."""

from __future__ import annotations

from jaxtune.models.config import DecoderConfig, LayerSpec
from jaxtune.models.families import common

NORMS = common.LLAMA_NORMS
_DEFAULTS = {"num_key_value_heads": 32, "head_dim": 128}


def from_hf(hf: dict) -> DecoderConfig:
    hf = _DEFAULTS | hf
    bias = bool(hf.get("attention_bias", False))
    layers = tuple(LayerSpec(window) for window in common.upper_windows(hf))
    return common.decoder_config(hf, layers=layers, qkv_bias=bias, out_bias=bias, qk_norm="head")


def to_hf(config: DecoderConfig) -> dict:
    windows = common.upper_windows_to_hf(config)
    return common.hf_config(config, "Qwen3ForCausalLM", attention_bias=config.qkv_bias, **windows)
