"""Granite 3 and 4 (dense): Llama with factors on the embedding, the scores, what a layer adds, and the logits."""

from __future__ import annotations

from jaxtune.models.config import DecoderConfig
from jaxtune.models.families import common

NORMS = common.LLAMA_NORMS
_MULTIPLIERS = {
    "attention_multiplier": "attention_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
}


def from_hf(hf: dict) -> DecoderConfig:
    attention_bias, mlp_bias = (bool(hf.get(key, False)) for key in ("attention_bias", "mlp_bias"))
    return common.decoder_config(
        hf,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=mlp_bias,
        logit_scale=1.0 / hf.get("logits_scaling", 1.0),
        **{ours: float(hf.get(theirs, 1.0)) for theirs, ours in _MULTIPLIERS.items()},
    )


def to_hf(config: DecoderConfig) -> dict:
    return common.hf_config(
        config,
        "GraniteForCausalLM",
        attention_bias=config.qkv_bias,
        mlp_bias=config.mlp_bias,
        logits_scaling=float(f"{1.0 / config.logit_scale:.14g}"),  # the divisor that was read, not one rounded twice
        **{theirs: getattr(config, ours) for theirs, ours in _MULTIPLIERS.items()},
    )
