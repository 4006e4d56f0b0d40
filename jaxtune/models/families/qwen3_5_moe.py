"""Qwen3.5 and 3.6 with experts, the text model: gated delta nets, gated attention in every fourth layer, and in all
layers experts beside a shared one."""

from __future__ import annotations

from jaxtune.models.config import DecoderConfig
from jaxtune.models.families import common

NORMS = common.LLAMA_NORMS | {"router": "gate"}
EXPERT_FILES = common.ExpertFiles("mlp", "gate_proj", "up_proj", "down_proj")
_DEFAULTS = (
    common.DELTA_DEFAULTS
    | common.ROUTER_DEFAULTS
    | {
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }
)


def from_hf(hf: dict) -> DecoderConfig:
    hf = _DEFAULTS | hf
    hf["intermediate_size"] = hf["moe_intermediate_size"]  # no layer has an MLP alone
    return common.delta_config(hf, moe=common.shared_experts(hf, renormalize=True))


def to_hf(config: DecoderConfig) -> dict:
    assert config.moe is not None
    features = common.delta_to_hf(config) | common.shared_experts_to_hf(config.moe)
    hf = common.hf_config(config, "Qwen3_5MoeForCausalLM", **features)
    del hf["intermediate_size"]
    return hf
