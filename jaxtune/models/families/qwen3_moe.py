"""Qwen3-MoE: Qwen3 with experts in place of the MLP, in every layer."""

from __future__ import annotations

from jaxtune.models.config import DecoderConfig, LayerSpec, MoEConfig
from jaxtune.models.families import common

NORMS = common.LLAMA_NORMS | {"router": "gate"}
EXPERT_FILES = common.ExpertFiles("mlp", "gate_proj", "up_proj", "down_proj")
_DEFAULTS = common.ROUTER_DEFAULTS | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}


def from_hf(hf: dict) -> DecoderConfig:
    hf = _DEFAULTS | hf
    common.refuse(hf, "mlp_only_layers")
    if hf.get("decoder_sparse_step", 1) != 1:
        raise ValueError(f"config.json: decoder_sparse_step = {hf['decoder_sparse_step']}: only 1 is supported")
    bias = bool(hf.get("attention_bias", False))
    # Unlike in Qwen3 the window is in every layer.
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    kind = common.FULL if window is None else common.SLIDING
    windows = common.layer_windows({**hf, "sliding_window": window}, [kind] * common.require(hf, "num_hidden_layers"))
    experts = hf.get("num_experts") or hf.get("num_local_experts") or 128  # transformers 4 or 5
    moe = MoEConfig(
        experts,
        hf["num_experts_per_tok"],
        hf["moe_intermediate_size"],
        renormalize=hf["norm_topk_prob"],
        router_aux_loss_coef=hf["router_aux_loss_coef"],
        output_router_logits=hf["output_router_logits"],
    )
    layers = tuple(LayerSpec(window) for window in windows)
    return common.decoder_config(hf, layers=layers, qkv_bias=bias, out_bias=bias, qk_norm="head", moe=moe)


def to_hf(config: DecoderConfig) -> dict:
    assert config.moe is not None
    windows = {layer.window for layer in config.layers}
    if len(windows) > 1:
        raise ValueError("a Qwen3-MoE config holds one sliding_window for all layers; these layers differ")
    window = windows.pop()
    return common.hf_config(
        config,
        "Qwen3MoeForCausalLM",
        attention_bias=config.qkv_bias,
        use_sliding_window=window is not None,
        sliding_window=window,
        moe_intermediate_size=config.moe.expert_size,
        num_experts=config.moe.num_experts,
        num_experts_per_tok=config.moe.experts_per_token,
        norm_topk_prob=config.moe.renormalize,
        router_aux_loss_coef=config.moe.router_aux_loss_coef,
        output_router_logits=config.moe.output_router_logits,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
