"""GLM-4.5 and 4.6: attention with partly rotated heads, and experts beside a shared one, chosen by sigmoids."""

from __future__ import annotations

from jaxtune.models import values
from jaxtune.models.families.common import Conversion, Family, Key, MLPFirst
from jaxtune.models.families.common.layers import any_count
from jaxtune.models.families.common.names import QWEN_EXPERTS, ROUTED_NORMS
from jaxtune.models.families.common.rope import PARTIAL_ROTARY
from jaxtune.models.families.common.table import EXPERT_SIZE, NORM_TOPK_PROB, experts


def _prepared(hf):
    """n_shared_experts as the width of one expert, which is the same."""
    return {**hf, "n_shared_experts": hf["n_shared_experts"] * hf["moe_intermediate_size"]}


FAMILY = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    (
        Key("attention_bias", "qkv_bias", values.boolean, False),
        Key(
            "use_qk_norm",
            "qk_norm",
            values.boolean,
            False,
            conversion=Conversion({True: "head", False: None}.get, bool),
        ),
        PARTIAL_ROTARY,
        experts(
            Key("n_routed_experts", "num_experts", values.whole, 128),
            EXPERT_SIZE,
            NORM_TOPK_PROB,
            Key(
                "n_shared_experts",
                "shared_size",
                any_count,
                1,
                conversion=Conversion(lambda size: size or None, lambda size: size),
                written=lambda moe: (moe.shared_size or 0) // moe.expert_size,
            ),
            Key("routed_scaling_factor", "weight_scale", values.positive, 1.0),
            Key("n_group", "groups", values.whole, 1),
            Key("topk_group", "best_groups", values.whole, 1),
            sigmoid=True,
            selection_bias=True,
            shared_gate=False,
        ),
        MLPFirst("first_k_dense_replace", 1),
    ),
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    fields={
        "module_names": (("shared_expert", "shared_experts"), ("selection_bias", "gate.e_score_correction_bias")),
    },
    prepare=_prepared,
    norms=ROUTED_NORMS,
    expert_files=QWEN_EXPERTS,
    unused_tensors=lambda config: (f"model.layers.{config.num_layers}.",),  # predicts further tokens
)
