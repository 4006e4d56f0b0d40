"""vision_config of Gemma 4: with a tower (E2B, E4B, 26B and 31B), and without (12B)."""

from __future__ import annotations

from jaxtune.models import values
from jaxtune.models.config import PRE_AND_POST_NORM, DecoderConfig, LayerSpec, RopeConfig
from jaxtune.models.families.common.key import Config, Fields, Key, of_section
from jaxtune.models.families.common.names import GEMMA_NORMS
from jaxtune.models.families.common.rope import above_one, check_parameters
from jaxtune.models.families.common.table import ACTIVATIONS, check_activation
from jaxtune.models.vision.gemma4 import Gemma4TowerConfig
from jaxtune.models.vision.gemma4_unified import Gemma4EmbedderConfig


def _no_bias(key: str, value: object) -> None:
    if value is not False:
        raise ValueError(f"{key} = {value!r} is not supported: only false is")


def _key(name: str, check, default: object) -> Key:
    return Key(f"vision_config.{name}", name, check, default)


_KEYS = (
    _key("hidden_size", values.whole, 768),
    _key("intermediate_size", values.whole, 3072),
    _key("num_hidden_layers", values.whole, 16),
    _key("num_attention_heads", values.whole, 12),
    _key("num_key_value_heads", values.whole, 12),
    _key("head_dim", values.whole, 64),
    _key("hidden_activation", check_activation, "gelu_pytorch_tanh"),
    _key("rms_norm_eps", values.positive, 1e-6),
    _key("attention_bias", _no_bias, False),
    _key("rope_parameters", check_parameters, {}),
    _key("pooling_kernel_size", values.whole, 3),
    _key("patch_size", values.whole, 16),
    _key("position_embedding_size", values.whole, 10_240),
    _key("use_clipped_linears", values.boolean, False),
    _key("standardize", values.boolean, False),
    _key("initializer_range", values.not_negative, 0.02),
)


def gemma4_tower(hf: Config) -> Gemma4TowerConfig:
    """The tower of a config.json with vision_config. Raises ValueError for a value that is not supported."""
    text, vision = hf["text_config"], of_section(hf, "vision_config", _KEYS)
    theta = vision["rope_parameters"].get("rope_theta", 100.0)
    above_one("config.json: vision_config.rope_parameters.rope_theta", theta)
    blocks = DecoderConfig(
        family="gemma4_vision",
        vocab_size=1,
        hidden_size=vision["hidden_size"],
        intermediate_size=vision["intermediate_size"],
        num_heads=vision["num_attention_heads"],
        num_kv_heads=vision["num_key_value_heads"],
        head_dim=vision["head_dim"],
        layers=(LayerSpec(stages=PRE_AND_POST_NORM),) * vision["num_hidden_layers"],
        max_position_embeddings=vision["position_embedding_size"],
        attention_scale=1.0,
        rotary=(RopeConfig(theta=float(theta)),),
        norm_eps=vision["rms_norm_eps"],
        float32_norm=True,
        qk_norm="head",
        value_norm=True,
        rotary_parts=2,
        activation=ACTIVATIONS[vision["hidden_activation"]],
        initializer_range=vision["initializer_range"],
    )
    return Gemma4TowerConfig(
        blocks=blocks,
        patch_size=vision["patch_size"],
        merge_size=vision["pooling_kernel_size"],
        out_size=text["hidden_size"],
        positions=vision["position_embedding_size"],
        clipped=vision["use_clipped_linears"],
        standardised=vision["standardize"],
        names=tuple((GEMMA_NORMS | {"mixer": "self_attn"}).items()),
        **_of_text(text),
    )


def _of_text(text: Config) -> Fields:
    """transformers' forward of Gemma 4 12B has runs in full layers, too; its generation and the 26B's and 31B's forward
    have not.
    """
    looks = "windows" if text.get("use_bidirectional_attention") == "vision" else None
    return {"pad_token": text.get("pad_token_id") or 0, "looks": looks}


_UNIFIED_KEYS = (
    _key("patch_size", values.whole, 16),
    _key("pooling_kernel_size", values.whole, 3),
    _key("mm_embed_dim", values.whole, 3840),
    _key("mm_posemb_size", values.whole, 1120),
    _key("output_proj_dims", values.whole, 3840),
    _key("rms_norm_eps", values.positive, 1e-6),
    _key("initializer_range", values.not_negative, 0.02),
)


def gemma4_embedder(hf: Config) -> Gemma4EmbedderConfig:
    """What takes the tower's place in Gemma 4 12B. Raises ValueError for a value that is not supported."""
    text, vision = hf["text_config"], of_section(hf, "vision_config", _UNIFIED_KEYS)
    size = vision["mm_embed_dim"]
    if vision["output_proj_dims"] != size:
        raise ValueError(
            f"config.json: vision_config.output_proj_dims = {vision['output_proj_dims']}: must be {size}, mm_embed_dim"
        )
    blocks = DecoderConfig(
        family="gemma4_unified_vision",
        vocab_size=1,
        hidden_size=size,
        intermediate_size=size,
        num_heads=1,
        num_kv_heads=1,
        head_dim=size,
        layers=(),
        max_position_embeddings=vision["mm_posemb_size"],
        attention_scale=1.0,
        norm_eps=vision["rms_norm_eps"],
        initializer_range=vision["initializer_range"],
    )
    return Gemma4EmbedderConfig(
        blocks=blocks,
        patch_size=vision["patch_size"] * vision["pooling_kernel_size"],
        merge_size=1,
        out_size=text["hidden_size"],
        positions=vision["mm_posemb_size"],
        **_of_text(text),
    )
