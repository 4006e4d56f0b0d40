"""Gemma 1: Llama with a scaled embedding, norms around zero and heads of their own width."""

from __future__ import annotations

from jaxtune.models.config import DecoderConfig
from jaxtune.models.families import common

NORMS = common.LLAMA_NORMS
_DEFAULTS = {"num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}


def from_hf(hf: dict) -> DecoderConfig:
    hf = _DEFAULTS | hf
    name = "hidden_activation" if hf.get("hidden_activation") else "hidden_act"
    # The first releases say gelu and mean its tanh form.
    hf[name] = {"gelu": "gelu_pytorch_tanh"}.get(hf[name], hf[name])
    bias = bool(hf.get("attention_bias", False))
    return common.decoder_config(
        hf,
        activation=common.activation(hf, name),
        embedding_scale=common.require(hf, "hidden_size") ** 0.5,
        norm_offset=1.0,
        qkv_bias=bias,
        out_bias=bias,
    )


def to_hf(config: DecoderConfig) -> dict:
    return common.hf_config(config, "GemmaForCausalLM", attention_bias=config.qkv_bias)
