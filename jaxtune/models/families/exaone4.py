"""EXAONE 4: norms on the outputs of attention and MLP and of each head's queries and keys; where some layers have a
window, the others have no position encoding."""

from __future__ import annotations

from jaxtune.models.config import POST_NORM, DecoderConfig, LayerSpec
from jaxtune.models.families import common

NORMS = common.POST_NORMS
_DEFAULTS = {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4}


def from_hf(hf: dict) -> DecoderConfig:
    hf = _DEFAULTS | hf
    hybrid, count = hf["sliding_window"] is not None, common.require(hf, "num_hidden_layers")
    kinds = common.layer_kinds(hf, common.pattern_kinds(hf) if hybrid else [common.FULL] * count)
    if not hybrid:
        common.layer_windows(hf, kinds)  # refuses a sliding layer
    return common.decoder_config(
        hf,
        layers=common.global_nope_layers(hf, kinds) if hybrid else (LayerSpec(),) * count,
        stages=POST_NORM,
        qk_norm="head",
    )


def to_hf(config: DecoderConfig) -> dict:
    if set(config.layers) <= {LayerSpec()}:
        kinds = {"sliding_window": None, "layer_types": [common.FULL] * config.num_layers}
    else:
        kinds = common.global_nope_to_hf(config)
    return common.hf_config(config, "Exaone4ForCausalLM", **kinds)
