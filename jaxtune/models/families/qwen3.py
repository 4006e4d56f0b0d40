"""Qwen3: each head's queries and keys are normed; optionally a sliding window in the upper layers."""

from jaxtune.models.families.common import Family
from jaxtune.models.families.common.layers import UPPER_WINDOWS, switched_window
from jaxtune.models.families.common.table import ATTENTION_BIAS

FAMILY = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    (ATTENTION_BIAS, *UPPER_WINDOWS),
    defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
    fields={"qk_norm": "head"},
    prepare=switched_window,
)
