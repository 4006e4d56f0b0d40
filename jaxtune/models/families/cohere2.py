"""Command R7B and Command A: parallel blocks, LayerNorm without bias, scaled logits; three of four layers have a window
and rotary positions, interleaved, and the others neither."""

from __future__ import annotations

from jaxtune.models.config import PARALLEL, DecoderConfig
from jaxtune.models.families import common

NORMS = {"mixer_norm": "input_layernorm"}
_DEFAULTS = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "tie_word_embeddings": True,
}


def from_hf(hf: dict) -> DecoderConfig:
    hf = _DEFAULTS | hf
    common.refuse(hf, "use_qk_norm")
    hf["head_dim"] = common.require(hf, "hidden_size") // common.require(hf, "num_attention_heads")
    bias = bool(hf.get("attention_bias", False))
    return common.decoder_config(
        hf,
        layers=common.global_nope_layers(hf, common.layer_kinds(hf, common.pattern_kinds(hf))),
        norm_eps=hf["layer_norm_eps"],
        logit_scale=float(hf["logit_scale"]),
        centred_norm=True,
        stages=PARALLEL,
        interleaved_rotary=True,
        qkv_bias=bias,
        out_bias=bias,
    )


def to_hf(config: DecoderConfig) -> dict:
    if config.query_size != config.hidden_size:
        raise ValueError(f"Cohere2: head_dim = {config.head_dim} is not hidden_size / num_attention_heads")
    hf = common.hf_config(
        config,
        "Cohere2ForCausalLM",
        attention_bias=config.qkv_bias,
        layer_norm_eps=config.norm_eps,
        logit_scale=config.logit_scale,
        **common.global_nope_to_hf(config),
    )
    del hf["rms_norm_eps"]
    return hf
