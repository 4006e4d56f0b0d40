"""gpt-oss: experts with biases and a clamped SwiGLU of interleaved columns, attention sinks, windows in every other
layer. Published in MXFP4; its expert weights are [E, in, out]."""

from __future__ import annotations

from jaxtune.models.config import DecoderConfig, LayerSpec, MoEConfig
from jaxtune.models.families import common

NORMS = common.LLAMA_NORMS
_DEFAULTS = common.ROUTER_DEFAULTS | {
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
    "rope_theta": 150000.0,
}
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def from_hf(hf: dict) -> DecoderConfig:
    hf = _DEFAULTS | hf
    if not hf.get("rope_parameters") and not hf.get("rope_scaling"):
        hf = hf | {"rope_scaling": _ROPE}
    alternating = [(common.SLIDING, common.FULL)[i % 2] for i in range(common.require(hf, "num_hidden_layers"))]
    windows = common.layer_windows(hf, common.layer_kinds(hf, alternating))
    moe = MoEConfig(
        hf["num_local_experts"],
        hf["num_experts_per_tok"],
        common.require(hf, "intermediate_size"),
        router_bias=True,
        expert_bias=True,
        transposed=True,
        interleaved=True,
        swiglu_limit=hf["swiglu_limit"],
        swiglu_alpha=hf["swiglu_alpha"],
        router_aux_loss_coef=hf["router_aux_loss_coef"],
        output_router_logits=hf["output_router_logits"],
    )
    return common.decoder_config(
        hf,
        layers=tuple(LayerSpec(window) for window in windows),
        qkv_bias=hf["attention_bias"],
        out_bias=hf["attention_bias"],
        attention_sinks=True,
        float32_norm=True,
        moe=moe,
    )


def to_hf(config: DecoderConfig) -> dict:
    assert config.moe is not None
    return common.hf_config(
        config,
        "GptOssForCausalLM",
        attention_bias=config.qkv_bias,
        num_local_experts=config.moe.num_experts,
        num_experts_per_tok=config.moe.experts_per_token,
        router_aux_loss_coef=config.moe.router_aux_loss_coef,
        output_router_logits=config.moe.output_router_logits,
        swiglu_limit=config.moe.swiglu_limit,
        swiglu_alpha=config.moe.swiglu_alpha,
        **common.windows_to_hf(config, always=True),
    )
