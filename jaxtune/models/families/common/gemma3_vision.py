"""vision_config of Gemma 3: SigLIP's."""

from __future__ import annotations

import math

from jaxtune.models import values
from jaxtune.models.config import DecoderConfig, LayerSpec, Part, in_sequence
from jaxtune.models.families.common.key import Config, Key, of_section
from jaxtune.models.families.common.table import ACTIVATIONS, check_activation
from jaxtune.models.layers.plain_mlp import PlainMLPShape
from jaxtune.models.vision.gemma3 import Gemma3TowerConfig

_STAGES = in_sequence(Part("mixer"), Part("mlp", PlainMLPShape()))


def _key(name: str, check, default: object) -> Key:
    return Key(f"vision_config.{name}", name, check, default)


_KEYS = (
    _key("hidden_size", values.whole, 768),
    _key("intermediate_size", values.whole, 3072),
    _key("num_hidden_layers", values.whole, 12),
    _key("num_attention_heads", values.whole, 12),
    _key("num_channels", values.whole, 3),
    _key("image_size", values.whole, 224),
    _key("patch_size", values.whole, 16),
    _key("hidden_act", check_activation, "gelu_pytorch_tanh"),
    _key("layer_norm_eps", values.positive, 1e-6),
    _key("vision_use_head", values.boolean, True),
    _key("initializer_range", values.not_negative, 0.02),
)


def gemma3_tower(hf: Config) -> Gemma3TowerConfig:
    """The tower of a config.json with vision_config. Raises ValueError for a value that is not supported."""
    vision = of_section(hf, "vision_config", _KEYS)
    if vision["vision_use_head"]:
        raise ValueError("config.json: vision_config.vision_use_head = true is not supported: only false is")
    hidden, heads = vision["hidden_size"], vision["num_attention_heads"]
    if hidden % heads:
        raise ValueError(
            f"config.json: vision_config.hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
        )
    tokens = hf.get("mm_tokens_per_image", 256)
    values.whole("config.json: mm_tokens_per_image", tokens)
    side, features = vision["image_size"] // vision["patch_size"], math.isqrt(tokens)
    if features**2 != tokens or side % features or vision["image_size"] % vision["patch_size"]:
        raise ValueError(
            f"config.json: mm_tokens_per_image = {tokens}: must be a square that divides a picture of {side} x {side} "
            f"patches (vision_config.image_size {vision['image_size']}, patch_size {vision['patch_size']})"
        )
    blocks = DecoderConfig(
        family="gemma3_vision",
        vocab_size=1,
        hidden_size=hidden,
        intermediate_size=vision["intermediate_size"],
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        layers=(LayerSpec(rotary=None, stages=_STAGES),) * vision["num_hidden_layers"],
        max_position_embeddings=side**2,
        attention_scale=(hidden // heads) ** -0.5,
        norm_eps=vision["layer_norm_eps"],
        centred_norm=True,
        norm_bias=True,
        activation=ACTIVATIONS[vision["hidden_act"]],
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        initializer_range=vision["initializer_range"],
    )
    return Gemma3TowerConfig(
        blocks=blocks,
        patch_size=vision["patch_size"],
        merge_size=side // features,
        out_size=hf["text_config"]["hidden_size"],
        channels=vision["num_channels"],
        side=side,
    )
