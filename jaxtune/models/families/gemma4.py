"""Gemma 4, the text model: every sixth layer sees all tokens, with wider heads (31B), and layers may have experts
beside the MLP (26B-A4B).

Configs whose layers share keys and values, or have embeddings of their own (E2B, E4B), are refused.
"""

from jaxtune.models.config import PRE_AND_POST_NORM
from jaxtune.models.families.common import Family, gemma4

FAMILY = Family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    gemma4.KEYS,
    defaults=gemma4.DEFAULTS | {"max_position_embeddings": 131_072, "sliding_window": 512},
    fields=gemma4.FIELDS,
    prepare=gemma4.prepared,
    stages=PRE_AND_POST_NORM,
    norms=gemma4.NORMS,
    text_of=("gemma4",),
    passthrough_tensors=("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
)
