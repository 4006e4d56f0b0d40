"""Qwen3-MoE: Qwen3 with experts instead of the MLP in every layer, and with the window, if it is used, in every layer.
Files in which some layers have an MLP are refused.
"""

from __future__ import annotations

from typing import Any

from jaxtune.models import values
from jaxtune.models.families.common import Family, Key, OneWindow
from jaxtune.models.families.common.layers import WINDOW_SWITCH, any_count, switched_window
from jaxtune.models.families.common.names import QWEN_EXPERTS, ROUTED_NORMS
from jaxtune.models.families.common.table import ATTENTION_BIAS, EXPERT_SIZE, NORM_TOPK_PROB, experts


def _check_step(key: str, value: Any) -> None:
    values.whole(key, value)
    if value != 1:
        raise ValueError(f"{key} = {value}: only 1 is supported")


_EXPERTS = experts(
    # transformers 4's name; transformers 5 writes num_local_experts.
    Key("num_experts", "num_experts", any_count, lambda hf: hf["num_local_experts"]),
    EXPERT_SIZE,
    NORM_TOPK_PROB,
)
FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    (
        ATTENTION_BIAS,
        WINDOW_SWITCH,
        OneWindow(),  # unlike in Qwen3 it is in every layer
        Key("num_local_experts", (), any_count, 128),
        Key("decoder_sparse_step", (), _check_step, 1, written=lambda config: 1),
        _EXPERTS,
    ),
    defaults={
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "sliding_window": 4096,
    },
    fields={"qk_norm": "head"},
    written={"mlp_only_layers": []},
    refused=("mlp_only_layers",),
    prepare=switched_window,
    norms=ROUTED_NORMS,
    expert_files=QWEN_EXPERTS,
)
