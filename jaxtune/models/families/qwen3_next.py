"""Qwen3-Next: gated delta nets, gated attention in every fourth layer, and experts beside a shared one."""

from __future__ import annotations

from jaxtune.models.config import DecoderConfig
from jaxtune.models.families import common

NORMS = common.LLAMA_NORMS | {"router": "gate"}
EXPERT_FILES = common.ExpertFiles("mlp", "gate_proj", "up_proj", "down_proj")
_DEFAULTS = (
    common.DELTA_DEFAULTS
    | common.ROUTER_DEFAULTS
    | {
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    }
)


def from_hf(hf: dict) -> DecoderConfig:
    hf = _DEFAULTS | hf
    moe = common.shared_experts(hf, hf["norm_topk_prob"])
    return common.delta_config(hf, common.mlp_layers(hf), together=True, moe=moe)


def to_hf(config: DecoderConfig) -> dict:
    assert config.moe is not None
    return common.hf_config(
        config,
        "Qwen3NextForCausalLM",
        norm_topk_prob=config.moe.renormalize,
        **common.delta_to_hf(config),
        **common.shared_experts_to_hf(config.moe),
        **common.mlp_layers_to_hf(config),
    )
