"""GLM-4-0414: norms around both halves, one matrix of gate and up, half of each head rotated, neighbours together."""

from __future__ import annotations

from jaxtune.models.config import PRE_AND_POST_NORM, DecoderConfig
from jaxtune.models.families import common

NORMS = {
    "mixer_norm": "input_layernorm",
    "mixer_post_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}
_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
}


def from_hf(hf: dict) -> DecoderConfig:
    hf = _DEFAULTS | hf
    return common.decoder_config(
        hf, stages=PRE_AND_POST_NORM, fused_gate_up=True, interleaved_rotary=True, qkv_bias=hf["attention_bias"]
    )


def to_hf(config: DecoderConfig) -> dict:
    partial = config.rotary[0].partial_rotary_factor
    return common.hf_config(config, "Glm4ForCausalLM", attention_bias=config.qkv_bias, partial_rotary_factor=partial)
