"""vision_config of Qwen3.5 and 3.6, and of Qwen3-VL."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from jaxtune.models import values
from jaxtune.models.config import DecoderConfig, LayerSpec, Part, RopeConfig, in_sequence
from jaxtune.models.families.common.key import Config, Key, of_section
from jaxtune.models.families.common.rope import check_parameters
from jaxtune.models.families.common.table import ACTIVATIONS, check_activation
from jaxtune.models.layers.attention import AttentionShape
from jaxtune.models.layers.plain_mlp import PlainMLPShape
from jaxtune.models.vision.qwen import QwenTowerConfig

_STAGES = in_sequence(Part("mixer", AttentionShape(hf_name="attn")), Part("mlp", PlainMLPShape()))
# {attribute of the Tower and its modules: its name in checkpoints}
_NAMES = {
    "projection": "patch_embed.proj",
    "positions": "pos_embed",
    "layers": "blocks",
    "mixer": "attn",
    "mixer_norm": "norm1",
    "mlp_norm": "norm2",
    "qkv_proj": "qkv",
    "o_proj": "proj",
    "up_proj": "linear_fc1",
    "down_proj": "linear_fc2",
    "deep_mergers": "deepstack_merger_list",
}


def _check_indices(key: str, value: object) -> None:
    values.items(key, value, functools.partial(values.whole, least=0))


def _key(name: str, check, default: object) -> Key:
    return Key(f"vision_config.{name}", name, check, default)


_KEYS = (
    _key("depth", values.whole, 27),
    _key("hidden_size", values.whole, 1152),
    _key("hidden_act", check_activation, "gelu_pytorch_tanh"),
    _key("intermediate_size", values.whole, 4304),
    _key("num_heads", values.whole, 16),
    _key("in_channels", values.whole, 3),
    _key("patch_size", values.whole, 16),
    _key("spatial_merge_size", values.whole, 2),
    _key("temporal_patch_size", values.whole, 2),
    _key("out_hidden_size", values.whole, 3584),
    _key("num_position_embeddings", values.whole, 2304),
    _key("initializer_range", values.not_negative, 0.02),
    _key("deepstack_visual_indexes", _check_indices, None),
    _key("rope_parameters", check_parameters, {}),
)


def qwen_tower(hf: Config, deep: Sequence[int] = ()) -> QwenTowerConfig:
    """The tower of a config.json with vision_config. deep: deepstack_visual_indexes of a file that has none; (): the
    family has none. Raises ValueError for a value that is not supported.
    """
    vision = of_section(hf, "vision_config", _KEYS)
    hidden, heads = vision["hidden_size"], vision["num_heads"]
    if hidden % heads:
        raise ValueError(f"config.json: vision_config.hidden_size {hidden} is not a multiple of num_heads {heads}")
    text_hidden = hf["text_config"]["hidden_size"]
    if vision["out_hidden_size"] != text_hidden:
        raise ValueError(
            f"config.json: vision_config.out_hidden_size = {vision['out_hidden_size']}: must be {text_hidden}, "
            "text_config.hidden_size, as a feature stands in place of a token's embedding"
        )
    indices = vision["deepstack_visual_indexes"]
    if indices and not deep:
        raise ValueError(
            f"config.json: vision_config.deepstack_visual_indexes = {indices!r} is not supported: only [] is, as "
            f"transformers reads the last layer alone in a {hf.get('model_type')!r} model"
        )
    indices = tuple(deep if indices is None else indices)
    if len(indices) > (layers := hf["text_config"].get("num_hidden_layers", len(indices))):
        raise ValueError(
            f"config.json: vision_config.deepstack_visual_indexes = {list(indices)}: text_config has {layers} layers"
        )
    theta = float(vision["rope_parameters"].get("rope_theta", 10_000.0))
    blocks = DecoderConfig(
        family="qwen3_5_vision",
        vocab_size=1,
        hidden_size=hidden,
        intermediate_size=vision["intermediate_size"],
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        layers=(LayerSpec(stages=_STAGES),) * vision["depth"],
        max_position_embeddings=vision["num_position_embeddings"],
        attention_scale=(hidden // heads) ** -0.5,
        rotary=(RopeConfig(theta=theta),),
        norm_eps=1e-6,
        centred_norm=True,
        norm_bias=True,
        activation=ACTIVATIONS[vision["hidden_act"]],
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        fused_qkv=True,
        initializer_range=vision["initializer_range"],
    )
    return QwenTowerConfig(
        blocks=blocks,
        channels=vision["in_channels"],
        frames=vision["temporal_patch_size"],
        patch_size=vision["patch_size"],
        merge_size=vision["spatial_merge_size"],
        positions=vision["num_position_embeddings"],
        out_size=vision["out_hidden_size"],
        prefix="model.visual",
        names=tuple(_NAMES.items()),
        deep=indices,
    )
