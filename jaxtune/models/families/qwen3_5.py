"""Qwen3.5 and 3.6, the text model: gated delta nets, gated attention in every fourth layer by default, and MLPs."""

from jaxtune.models.families.common import Family, RotaryByAxis
from jaxtune.models.families.common.qwen_vision import qwen_tower
from jaxtune.models.families.common.table import DELTA_DEFAULTS, DELTA_FIELDS, QWEN_PASSTHROUGH, delta_net

FAMILY = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    (*delta_net(), RotaryByAxis()),
    defaults=DELTA_DEFAULTS | {"num_key_value_heads": 4},
    fields=DELTA_FIELDS,
    text_of=("qwen3_5",),
    passthrough_tensors=QWEN_PASSTHROUGH,
    tower=qwen_tower,
    text_alone=True,
)
