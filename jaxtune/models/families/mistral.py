"""Mistral 7B and its kin: Llama with a sliding window in every layer."""

from __future__ import annotations

from jaxtune.models.config import DecoderConfig, LayerSpec
from jaxtune.models.families import common

NORMS = common.LLAMA_NORMS
_DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8}


def from_hf(hf: dict) -> DecoderConfig:
    hf = _DEFAULTS | hf
    kind = common.FULL if hf["sliding_window"] is None else common.SLIDING
    windows = common.layer_windows(hf, [kind] * common.require(hf, "num_hidden_layers"))
    return common.decoder_config(hf, layers=tuple(LayerSpec(window) for window in windows))


def to_hf(config: DecoderConfig) -> dict:
    windows = {layer.window for layer in config.layers}
    if len(windows) > 1:
        raise ValueError("a Mistral config holds one sliding_window for all layers; these layers differ")
    return common.hf_config(config, "MistralForCausalLM", sliding_window=windows.pop())
