"""Qwen2 and Qwen2.5: biases on q, k and v; optionally a sliding window in the upper layers."""

from jaxtune.models.families.common import Family
from jaxtune.models.families.common.layers import UPPER_WINDOWS, switched_window

FAMILY = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    UPPER_WINDOWS,
    defaults={"num_key_value_heads": 32, "sliding_window": 4096},
    fields={"qkv_bias": True},
    prepare=switched_window,
)
