"""Gemma 2: norms around both halves, soft caps, windows in every other layer, a scaled embedding."""

from __future__ import annotations

from jaxtune.models.config import DecoderConfig, LayerSpec
from jaxtune.models.families import common

NORMS = common.GEMMA_NORMS
_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


def from_hf(hf: dict) -> DecoderConfig:
    hf = _DEFAULTS | hf
    alternating = [(common.SLIDING, common.FULL)[i % 2] for i in range(common.require(hf, "num_hidden_layers"))]
    windows = common.layer_windows(hf, common.layer_kinds(hf, alternating))
    return common.decoder_config(
        hf,
        layers=tuple(LayerSpec(window) for window in windows),
        attention_soft_cap=hf["attn_logit_softcapping"],
        **common.gemma_features(hf),
    )


def to_hf(config: DecoderConfig) -> dict:
    return common.hf_config(
        config,
        "Gemma2ForCausalLM",
        attn_logit_softcapping=config.attention_soft_cap,
        **common.gemma_to_hf(config),
        **common.windows_to_hf(config, always=True),
    )
