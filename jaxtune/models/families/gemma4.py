"""Gemma 4, the text model: dense layers, of which every sixth sees all tokens with wider heads (31B).

Configs whose layers share keys and values (E2B, E4B), have embeddings of their own or experts (26B) are refused.
"""

from jaxtune.models.config import PRE_AND_POST_NORM
from jaxtune.models.families.common import Family, gemma4
from jaxtune.models.families.common.names import GEMMA_NORMS

FAMILY = Family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    gemma4.KEYS,
    defaults=gemma4.DEFAULTS | {"max_position_embeddings": 131_072, "sliding_window": 512},
    fields=gemma4.FIELDS,
    prepare=gemma4.prepared,
    stages=PRE_AND_POST_NORM,
    norms=GEMMA_NORMS,
    text_of=("gemma4",),
    passthrough_tensors=("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
)
