"""Qwen3: each head's queries and keys are normed; optionally a sliding window in the upper layers. As in Llama,
attention_bias in config.json says whether attention has biases, by default not.

FAMILY, which models/registry.py lists by its model_type, declares how their config.json is checked, read and written,
and how checkpoints name their tensors.
"""

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
