"""LFM2 with experts, chosen by sigmoids, in all layers but the first."""

from __future__ import annotations

from jaxtune.models import values
from jaxtune.models.families.common import ExpertFiles, Family, Key, MLPFirst
from jaxtune.models.families.common.lfm2 import DEFAULTS, KEYS, MODULES, NORMS, tied
from jaxtune.models.families.common.table import EXPERT_SIZE, NORM_TOPK_PROB, experts

FAMILY = Family(
    "lfm2_moe",
    "Lfm2MoeForCausalLM",
    (
        *KEYS,
        experts(
            Key("num_experts", "num_experts", values.whole, 32),
            EXPERT_SIZE,
            NORM_TOPK_PROB,
            Key("use_expert_bias", "selection_bias", values.boolean, True),
            Key("routed_scaling_factor", "weight_scale", values.positive, 1.0),
            sigmoid=True,
            sum_eps=1e-6,
        ),
        MLPFirst("num_dense_layers", 2),
    ),
    defaults=DEFAULTS
    | {
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
    fields={
        "qk_norm": "head",
        "activation": "silu",
        "module_names": (*MODULES, ("selection_bias", "expert_bias")),
    },
    prepare=tied,
    norms=NORMS | {"router": "gate"},
    expert_files=ExpertFiles("mlp", "w1", "w3", "w2"),
)
