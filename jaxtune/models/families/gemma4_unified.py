"""Gemma 4 12B, the text model: images and audio enter through embedders, without towers; layers are Gemma 4's, without
experts and per-layer embeddings.
"""

from jaxtune.models.config import PRE_AND_POST_NORM
from jaxtune.models.families.common import Family, gemma4
from jaxtune.models.families.common.gemma4_vision import gemma4_embedder

FAMILY = Family(
    "gemma4_unified_text",
    "Gemma4UnifiedForCausalLM",
    (*gemma4.KEYS, gemma4.SHARING),
    defaults=gemma4.DEFAULTS | {"max_position_embeddings": 262_144, "sliding_window": 1024},
    refused=("enable_moe_block", "hidden_size_per_layer_input"),  # which transformers' class does not have
    fields=gemma4.FIELDS,
    prepare=gemma4.prepared,
    stages=PRE_AND_POST_NORM,
    norms=gemma4.NORMS,
    text_of=("gemma4_unified",),
    unused_tensors=gemma4.unused_tensors,
    passthrough_tensors=("model.vision_embedder.", "model.embed_vision.", "model.embed_audio."),
    tower=gemma4_embedder,
)
