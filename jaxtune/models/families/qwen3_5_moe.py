"""Qwen3.5 and 3.6 with experts, the text model: gated delta nets, gated attention in every fourth layer by default, and
experts with a shared expert.
"""

from jaxtune.models.families.common import Family, RotaryByAxis
from jaxtune.models.families.common.names import QWEN_EXPERTS, ROUTED_NORMS
from jaxtune.models.families.common.qwen_vision import qwen_tower
from jaxtune.models.families.common.table import (
    DELTA_DEFAULTS,
    DELTA_FIELDS,
    QWEN_PASSTHROUGH,
    delta_net,
    shared_experts,
)

FAMILY = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    (*delta_net(), RotaryByAxis(), shared_experts(renormalize=True)),
    defaults=DELTA_DEFAULTS
    | {
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    # No layer has an MLP alone, and config.json no width of one.
    fields=DELTA_FIELDS | {"intermediate_size": lambda hf: hf["moe_intermediate_size"]},
    norms=ROUTED_NORMS,
    expert_files=QWEN_EXPERTS,
    text_of=("qwen3_5_moe",),
    passthrough_tensors=QWEN_PASSTHROUGH,
    tower=qwen_tower,
    text_alone=True,
)
