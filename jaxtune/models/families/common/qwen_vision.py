"""vision_config of Qwen3.5 and 3.6, and of Qwen3-VL."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtune.models.config import LayerSpec, Part, in_sequence
from jaxtune.models.families.common.key import Config
from jaxtune.models.families.common.vision import PLAIN, tower_of, vision_fields
from jaxtune.models.layers.attention import AttentionShape
from jaxtune.models.layers.plain_mlp import PlainMLPShape
from jaxtune.models.vision.qwen import QwenTowerConfig

_LAYER = LayerSpec(stages=in_sequence(Part("mixer", AttentionShape(hf_name="attn")), Part("mlp", PlainMLPShape())))


def qwen_tower(hf: Config, deep: Sequence[int] = ()) -> QwenTowerConfig:
    """The tower of a config.json with vision_config. deep: deepstack_visual_indexes of a file that has none; (): the
    family has none. Raises ValueError for a value that is not supported.
    """
    fields = vision_fields(
        hf,
        depth=27,
        hidden_size=1152,
        hidden_act="gelu_pytorch_tanh",
        intermediate_size=4304,
        num_heads=16,
        in_channels=3,
        patch_size=16,
        spatial_merge_size=2,
        temporal_patch_size=2,
        out_hidden_size=3584,
        num_position_embeddings=2304,
        initializer_range=0.02,
        deepstack_visual_indexes=None,
        rope_parameters={},
    )
    text_hidden, indices = hf["text_config"]["hidden_size"], fields["deep"]
    if fields["out_size"] != text_hidden:
        raise ValueError(
            f"config.json: vision_config.out_hidden_size = {fields['out_size']}: must be {text_hidden}, "
            "text_config.hidden_size, as a feature stands in place of a token's embedding"
        )
    if indices and not deep:
        raise ValueError(
            f"config.json: vision_config.deepstack_visual_indexes = {indices!r} is not supported: only [] is, as "
            f"transformers reads the last layer alone in a {hf.get('model_type')!r} model"
        )
    fields["deep"] = indices = tuple(deep if indices is None else indices)
    if len(indices) > (layers := hf["text_config"].get("num_hidden_layers", len(indices))):
        raise ValueError(
            f"config.json: vision_config.deepstack_visual_indexes = {list(indices)}: text_config has {layers} layers"
        )
    blocks = PLAIN | {"family": "qwen3_5_vision", "norm_eps": 1e-6, "fused_qkv": True}
    return tower_of(QwenTowerConfig, fields, blocks, _LAYER, theta=10_000.0)
