"""Mixtral: Mistral with eight experts in place of the MLP."""

from __future__ import annotations

from jaxtune.models.config import DecoderConfig, LayerSpec, MoEConfig
from jaxtune.models.families import common

NORMS = common.LLAMA_NORMS | {"router": "gate"}
EXPERT_FILES = common.ExpertFiles("block_sparse_moe", "w1", "w3", "w2")
_DEFAULTS = common.ROUTER_DEFAULTS | {
    "num_key_value_heads": 8,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}


def from_hf(hf: dict) -> DecoderConfig:
    hf = _DEFAULTS | hf
    common.refuse(hf, "router_jitter_noise")
    kind = common.FULL if hf.get("sliding_window") is None else common.SLIDING
    windows = common.layer_windows(hf, [kind] * common.require(hf, "num_hidden_layers"))
    moe = MoEConfig(
        hf["num_local_experts"],
        hf["num_experts_per_tok"],
        common.require(hf, "intermediate_size"),
        router_aux_loss_coef=hf["router_aux_loss_coef"],
        output_router_logits=hf["output_router_logits"],
    )
    return common.decoder_config(hf, layers=tuple(LayerSpec(window) for window in windows), moe=moe)


def to_hf(config: DecoderConfig) -> dict:
    assert config.moe is not None
    windows = {layer.window for layer in config.layers}
    if len(windows) > 1:
        raise ValueError("a Mixtral config holds one sliding_window for all layers; these layers differ")
    return common.hf_config(
        config,
        "MixtralForCausalLM",
        sliding_window=windows.pop(),
        num_local_experts=config.moe.num_experts,
        num_experts_per_tok=config.moe.experts_per_token,
        router_aux_loss_coef=config.moe.router_aux_loss_coef,
        output_router_logits=config.moe.output_router_logits,
    )
