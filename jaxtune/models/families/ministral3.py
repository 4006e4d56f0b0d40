"""Ministral 3: Mistral with yarn and queries that grow with their position."""

from __future__ import annotations

import dataclasses

from jaxtune.models.config import DecoderConfig, LayerSpec
from jaxtune.models.families import common

NORMS = common.LLAMA_NORMS
_DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None}
_ORIGINAL = "original_max_position_embeddings"
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    _ORIGINAL: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def from_hf(hf: dict) -> DecoderConfig:
    hf = _DEFAULTS | hf
    if not hf.get("rope_parameters") and not hf.get("rope_scaling"):
        hf = hf | {"rope_parameters": _ROPE}
    kind = common.FULL if hf["sliding_window"] is None else common.SLIDING
    windows = common.layer_windows(hf, [kind] * common.require(hf, "num_hidden_layers"))
    given = common.rope_parameters(hf)
    for key in ("llama_4_scaling_beta", _ORIGINAL):
        if given.get(key) is None:
            raise ValueError(f"config.json: rope_parameters of a 'ministral3' model lack {key!r}")
    rope = common.rope_config(hf, given)
    grows = {"llama_4_scaling_beta": given["llama_4_scaling_beta"], _ORIGINAL: given[_ORIGINAL]}
    return common.decoder_config(
        hf,
        layers=tuple(LayerSpec(window) for window in windows),
        rotary=(dataclasses.replace(rope, **grows),),
    )


def to_hf(config: DecoderConfig) -> dict:
    windows = {layer.window for layer in config.layers}
    if len(windows) > 1:
        raise ValueError("a Ministral 3 config holds one sliding_window for all layers; these layers differ")
    rope = config.rotary[0]
    scaling = common.rope_to_hf(rope) or {"rope_type": "default"}
    grows = {"llama_4_scaling_beta": rope.llama_4_scaling_beta, _ORIGINAL: rope.original_max_position_embeddings}
    return common.hf_config(config, "Ministral3ForCausalLM", sliding_window=windows.pop(), rope_scaling=scaling | grows)
