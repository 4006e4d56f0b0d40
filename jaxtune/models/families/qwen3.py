"""Qwen3: each head's queries and keys are normed; optionally a sliding window in the upper layers. The text part of
Qwen3-VL, whose tower gives features to the first layers, too, is a Qwen3.
"""

from jaxtune.models.families.common import Family, RotaryByAxis
from jaxtune.models.families.common.layers import UPPER_WINDOWS, switched_window
from jaxtune.models.families.common.qwen_vision import qwen_tower
from jaxtune.models.families.common.table import ATTENTION_BIAS, QWEN_TOWER

FAMILY = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    (ATTENTION_BIAS, RotaryByAxis(sections=()), *UPPER_WINDOWS),
    defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
    fields={"qk_norm": "head"},
    prepare=switched_window,
    text_of=("qwen3_vl",),
    passthrough_tensors=QWEN_TOWER,
    tower=lambda hf: qwen_tower(hf, deep=(8, 16, 24)),
)
