"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts beside a shared one."""

from __future__ import annotations

from jaxtune.models.config import DecoderConfig, LayerSpec
from jaxtune.models.families import common

NORMS = common.LLAMA_NORMS | {"router": "gate"}
EXPERT_FILES = common.ExpertFiles("mlp", "gate_proj", "up_proj", "down_proj")
_DEFAULTS = common.ROUTER_DEFAULTS | {
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "norm_topk_prob": False,
    "max_window_layers": 28,
    "qkv_bias": True,
}


def from_hf(hf: dict) -> DecoderConfig:
    hf = _DEFAULTS | hf
    hf["sliding_window"] = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    # Unlike in Qwen2, every second layer of the lower ones slides.
    slides = hf["max_window_layers"] if hf["sliding_window"] is not None else 0
    count = common.require(hf, "num_hidden_layers")
    default = [common.SLIDING if index < slides and index % 2 == 0 else common.FULL for index in range(count)]
    windows, mlps = common.layer_windows(hf, common.layer_kinds(hf, default)), common.mlp_layers(hf)
    return common.decoder_config(
        hf,
        layers=tuple(LayerSpec(window).replaced(mlp=mlps.get(index)) for index, window in enumerate(windows)),
        qkv_bias=hf["qkv_bias"],
        moe=common.shared_experts(hf, hf["norm_topk_prob"]),
    )


def to_hf(config: DecoderConfig) -> dict:
    assert config.moe is not None
    windows = common.windows_to_hf(config)
    return common.hf_config(
        config,
        "Qwen2MoeForCausalLM",
        qkv_bias=config.qkv_bias,
        norm_topk_prob=config.moe.renormalize,
        use_sliding_window=windows["sliding_window"] is not None,
        **windows,
        **common.shared_experts_to_hf(config.moe),
        **common.mlp_layers_to_hf(config),
    )
