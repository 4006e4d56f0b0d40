"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts and a shared expert, except in layers that config.json gives an MLP."""

from __future__ import annotations

from jaxtune.models import values
from jaxtune.models.families.common import Config, Family, Key, LayerTypes, MLPLayers
from jaxtune.models.families.common.layers import MAX_WINDOW_LAYERS, WINDOW_SWITCH, switched_window
from jaxtune.models.families.common.names import QWEN_EXPERTS, ROUTED_NORMS
from jaxtune.models.families.common.rope import FULL, SLIDING
from jaxtune.models.families.common.table import NORM_TOPK_PROB, shared_experts


def _default_types(hf: Config) -> list[str]:
    """Unlike in Qwen2, every second layer below max_window_layers slides, if there is a window."""
    slides = hf["max_window_layers"] if hf["sliding_window"] is not None else 0
    return [SLIDING if i < slides and i % 2 == 0 else FULL for i in range(hf["num_hidden_layers"])]


FAMILY = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    (
        Key("qkv_bias", "qkv_bias", values.boolean, True),
        WINDOW_SWITCH,
        MAX_WINDOW_LAYERS,
        LayerTypes(_default_types, needs_window=False),
        MLPLayers(),
        shared_experts(NORM_TOPK_PROB),
    ),
    defaults={
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 4096,
    },
    prepare=switched_window,
    norms=ROUTED_NORMS,
    expert_files=QWEN_EXPERTS,
)
