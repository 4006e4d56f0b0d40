"""Qwen3-Next: gated delta nets, gated attention in every fourth layer by default, and experts with a shared expert,
except in layers that config.json gives an MLP.
"""

from jaxtune.models.families.common import Family, MLPLayers
from jaxtune.models.families.common.names import QWEN_EXPERTS, ROUTED_NORMS
from jaxtune.models.families.common.table import (
    DELTA_DEFAULTS,
    DELTA_FIELDS,
    NORM_TOPK_PROB,
    QWEN_PASSTHROUGH,
    delta_net,
    shared_experts,
)

FAMILY = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    (*delta_net(fused=True), MLPLayers(), shared_experts(NORM_TOPK_PROB)),
    defaults=DELTA_DEFAULTS
    | {
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    fields=DELTA_FIELDS,
    norms=ROUTED_NORMS,
    expert_files=QWEN_EXPERTS,
    passthrough_tensors=QWEN_PASSTHROUGH,
)
