"""Llama 2, 3, 3.1, 3.2, and the many models with its architecture."""

from __future__ import annotations

from jaxtune.models.config import DecoderConfig
from jaxtune.models.families import common

NORMS = common.LLAMA_NORMS


def from_hf(hf: dict) -> DecoderConfig:
    attention_bias, mlp_bias = (bool(hf.get(key, False)) for key in ("attention_bias", "mlp_bias"))
    return common.decoder_config(hf, qkv_bias=attention_bias, out_bias=attention_bias, mlp_bias=mlp_bias)


def to_hf(config: DecoderConfig) -> dict:
    return common.hf_config(
        config, "LlamaForCausalLM", attention_bias=config.qkv_bias, mlp_bias=config.mlp_bias, pretraining_tp=1
    )
