"""OLMo 2: norms only on the outputs of attention and MLP; queries and keys normed over the whole projection."""

from __future__ import annotations

from jaxtune.models.config import DecoderConfig
from jaxtune.models.families import common

NORMS = common.POST_NORMS
_DEFAULTS = {"rms_norm_eps": 1e-5}


def from_hf(hf: dict) -> DecoderConfig:
    hf = _DEFAULTS | hf
    return common.decoder_config(hf, **common.olmo_features(hf))


def to_hf(config: DecoderConfig) -> dict:
    return common.hf_config(config, "Olmo2ForCausalLM", attention_bias=config.qkv_bias)
