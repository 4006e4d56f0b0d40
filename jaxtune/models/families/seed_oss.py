"""Seed-OSS: Llama with biases on q, k and v."""

from __future__ import annotations

from jaxtune.models.config import DecoderConfig
from jaxtune.models.families import common

NORMS = common.LLAMA_NORMS
_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "attention_out_bias": False,
    "mlp_bias": False,
}


def from_hf(hf: dict) -> DecoderConfig:
    hf = _DEFAULTS | hf
    return common.decoder_config(
        hf, qkv_bias=hf["attention_bias"], out_bias=hf["attention_out_bias"], mlp_bias=hf["mlp_bias"]
    )


def to_hf(config: DecoderConfig) -> dict:
    return common.hf_config(
        config,
        "SeedOssForCausalLM",
        attention_bias=config.qkv_bias,
        attention_out_bias=config.out_bias,
        mlp_bias=config.mlp_bias,
        residual_dropout=0.0,
    )
