"""vision_config of Gemma 3: SigLIP's."""

from __future__ import annotations

import math

from jaxtune.models import values
from jaxtune.models.config import LayerSpec, Part, in_sequence
from jaxtune.models.families.common.key import Config
from jaxtune.models.families.common.vision import PLAIN, tower_of, vision_fields
from jaxtune.models.layers.plain_mlp import PlainMLPShape
from jaxtune.models.vision.gemma3 import Gemma3TowerConfig

_LAYER = LayerSpec(rotary=None, stages=in_sequence(Part("mixer"), Part("mlp", PlainMLPShape())))


def gemma3_tower(hf: Config) -> Gemma3TowerConfig:
    """The tower of a config.json with vision_config. Raises ValueError for a value that is not supported."""
    fields = vision_fields(
        hf,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_channels=3,
        image_size=224,
        patch_size=16,
        hidden_act="gelu_pytorch_tanh",
        layer_norm_eps=1e-6,
        vision_use_head=True,
        initializer_range=0.02,
    )
    tokens = hf.get("mm_tokens_per_image", 256)
    values.whole("config.json: mm_tokens_per_image", tokens)
    size, patch = fields.pop("image_size"), fields["patch_size"]
    side, features = size // patch, math.isqrt(tokens)
    if features**2 != tokens or side % features or size % patch:
        raise ValueError(
            f"config.json: mm_tokens_per_image = {tokens}: must be a square that divides a picture of {side} x {side} "
            f"patches (vision_config.image_size {size}, patch_size {patch})"
        )
    fields |= {"side": side, "merge_size": side // features, "both_ways": "all"}
    blocks = PLAIN | {"family": "gemma3_vision", "max_position_embeddings": side**2}
    return tower_of(Gemma3TowerConfig, fields, blocks, _LAYER)
