"""Gemma 4, the text model: by default every sixth layer is full with wider heads, the others have a window (31B);
layers may have experts beside the MLP (26B-A4B), or embeddings of their own and shared keys and values (E2B, E4B).
"""

from jaxtune.models.config import PRE_AND_POST_NORM
from jaxtune.models.families.common import ExpertFiles, Family, gemma4
from jaxtune.models.families.common.gemma4_vision import gemma4_tower

FAMILY = Family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    (*gemma4.KEYS, gemma4.EXPERTS, gemma4.SHARING, gemma4.PER_LAYER),
    defaults=gemma4.DEFAULTS | {"max_position_embeddings": 131_072, "sliding_window": 512},
    fields=gemma4.FIELDS,
    prepare=gemma4.prepared,
    stages=PRE_AND_POST_NORM,
    norms=gemma4.NORMS,
    text_of=("gemma4",),
    unused_tensors=gemma4.unused_tensors,
    expert_files=ExpertFiles("", "gate_proj", "up_proj", "down_proj", quantised_only=True),
    passthrough_tensors=("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
    tower=gemma4_tower,
)
