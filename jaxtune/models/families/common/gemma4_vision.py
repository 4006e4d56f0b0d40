"""vision_config of Gemma 4: with a tower (E2B, E4B, 26B and 31B), and without (12B)."""

from __future__ import annotations

from jaxtune.models.config import PRE_AND_POST_NORM, LayerSpec
from jaxtune.models.families.common.key import Config, Fields
from jaxtune.models.families.common.names import GEMMA_NORMS
from jaxtune.models.families.common.vision import tower_of, vision_fields
from jaxtune.models.vision.gemma4 import Gemma4TowerConfig
from jaxtune.models.vision.gemma4_unified import Gemma4EmbedderConfig


def gemma4_tower(hf: Config) -> Gemma4TowerConfig:
    """The tower of a config.json with vision_config. Raises ValueError for a value that is not supported."""
    fields = vision_fields(
        hf,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=16,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
        hidden_activation="gelu_pytorch_tanh",
        rms_norm_eps=1e-6,
        attention_bias=False,
        rope_parameters={},
        pooling_kernel_size=3,
        patch_size=16,
        position_embedding_size=10_240,
        use_clipped_linears=False,
        standardize=False,
        initializer_range=0.02,
    )
    fields |= _of_text(hf["text_config"]) | {"words": tuple((GEMMA_NORMS | {"mixer": "self_attn"}).items())}
    blocks = {
        "family": "gemma4_vision",
        "attention_scale": 1.0,
        "float32_norm": True,
        "qk_norm": "head",
        "value_norm": True,
        "rotary_parts": 2,
    }
    return tower_of(Gemma4TowerConfig, fields, blocks, LayerSpec(stages=PRE_AND_POST_NORM), theta=100.0)


def _of_text(text: Config) -> Fields:
    """transformers' forward of Gemma 4 12B has runs in full layers, too; the 26B's and 31B's have not."""
    both_ways = "windows" if text.get("use_bidirectional_attention") == "vision" else None
    return {"placeholder": text.get("pad_token_id") or 0, "both_ways": both_ways}


def gemma4_embedder(hf: Config) -> Gemma4EmbedderConfig:
    """What takes the tower's place in Gemma 4 12B. Raises ValueError for a value that is not supported."""
    fields = vision_fields(
        hf,
        patch_size=16,
        pooling_kernel_size=3,
        mm_embed_dim=3840,
        mm_posemb_size=1120,
        output_proj_dims=3840,
        rms_norm_eps=1e-6,
        initializer_range=0.02,
    )
    if fields["out_size"] != fields["hidden_size"]:
        raise ValueError(
            f"config.json: vision_config.output_proj_dims = {fields['out_size']}: must be {fields['hidden_size']}, "
            "mm_embed_dim"
        )
    fields["patch_size"] *= fields["merge_size"]
    fields |= _of_text(hf["text_config"]) | {"merge_size": 1, "out_size": hf["text_config"]["hidden_size"]}
    blocks = {"family": "gemma4_unified_vision", "num_heads": 1, "attention_scale": 1.0}
    return tower_of(Gemma4EmbedderConfig, fields, blocks)
