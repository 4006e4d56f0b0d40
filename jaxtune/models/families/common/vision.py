"""vision_config of a whole model's config.json: its keys, and the tower that they describe."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from jaxtune.models import values
from jaxtune.models.config import DecoderConfig, LayerSpec, RopeConfig
from jaxtune.models.families.common.key import Config, Fields, Key, completed, require_allowed
from jaxtune.models.families.common.rope import check_parameters
from jaxtune.models.families.common.table import ACTIVATION, check_activation
from jaxtune.models.vision.tower import TowerConfig


def _check_indices(key: str, value: object) -> None:
    values.items(key, value, functools.partial(values.whole, least=0))


def _check_false(key: str, value: object) -> None:
    if value is not False:
        raise ValueError(f"{key} = {str(value).lower()} is not supported: only false is")


_WHOLE = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "mm_embed_dim": ("hidden_size", "intermediate_size", "head_dim"),
    "num_hidden_layers": "num_layers",
    "depth": "num_layers",
    "num_attention_heads": "num_heads",
    "num_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "num_channels": "channels",
    "in_channels": "channels",
    "patch_size": "patch_size",
    "temporal_patch_size": "frames",
    "image_size": "image_size",
    "pooling_kernel_size": "merge_size",
    "spatial_merge_size": "merge_size",
    "position_embedding_size": ("positions", "max_position_embeddings"),
    "num_position_embeddings": ("positions", "max_position_embeddings"),
    "mm_posemb_size": ("positions", "max_position_embeddings"),
    "out_hidden_size": "out_size",
    "output_proj_dims": "out_size",
}
_KEYS = (
    *(Key(name, field, values.whole) for name, field in _WHOLE.items()),
    *(Key(name, "activation", check_activation, conversion=ACTIVATION) for name in ("hidden_act", "hidden_activation")),
    *(Key(name, "norm_eps", values.positive) for name in ("layer_norm_eps", "rms_norm_eps")),
    *(Key(name, (), _check_false) for name in ("attention_bias", "vision_use_head")),
    Key("initializer_range", "initializer_range", values.not_negative),
    Key("use_clipped_linears", "clipped", values.boolean),
    Key("standardize", "standardised", values.boolean),
    Key("deepstack_visual_indexes", "deep", _check_indices),
    Key("rope_parameters", "rope_parameters", check_parameters),
)
_OF_BLOCKS = {field.name for field in dataclasses.fields(DecoderConfig)}
# Of layers as SigLIP's: LayerNorms, and biases everywhere.
PLAIN = dict.fromkeys(("centred_norm", "norm_bias", "qkv_bias", "out_bias", "mlp_bias"), True)


def vision_fields(hf: Config, **defaults) -> Fields:
    """{field of DecoderConfig or of a TowerConfig: value} of a config.json with vision_config. Raises ValueError for a
    value that is not allowed.

    defaults: {key that is read: its default}.
    """
    values.mapping("config.json: vision_config", hf["vision_config"])
    named = {f"vision_config.{name}": value for name, value in hf["vision_config"].items()}
    defaults = {f"vision_config.{name}": value for name, value in defaults.items()}
    keys = [key for key in _NAMED if key.name in defaults]
    complete = completed(named, keys, defaults)
    require_allowed(complete, keys)
    fields = {field: value for key in keys for field, value in key.read(complete, {}).items()}
    if "num_heads" in fields and "head_dim" not in fields:
        hidden, heads = fields["hidden_size"], fields["num_heads"]
        name = next(key.name for key in keys if key.field == "num_heads").removeprefix("vision_config.")
        if hidden % heads:
            raise ValueError(f"config.json: vision_config.hidden_size {hidden} is not a multiple of {name} {heads}")
        fields["head_dim"] = hidden // heads
    return {"out_size": hf["text_config"]["hidden_size"]} | fields


_NAMED = tuple(dataclasses.replace(key, name=f"vision_config.{key.name}") for key in _KEYS)


def tower_of[T: TowerConfig](
    make: Callable[..., T], fields: Fields, blocks: Config, spec: LayerSpec | None = None, theta: float | None = None
) -> T:
    """The config of a tower.

    make: its class.
    fields: of its layers and of the class.
    blocks: further fields of the layers.
    spec: of each layer; None: there are no layers.
    theta: of the rotary base, where the config.json has none; None: nothing turns.
    """
    of_tower = dict(fields)
    count, rope = of_tower.pop("num_layers", 0), of_tower.pop("rope_parameters", {})
    of_blocks = {name: of_tower.pop(name) for name in fields if name in _OF_BLOCKS} | dict(blocks)
    of_blocks.setdefault("num_kv_heads", of_blocks["num_heads"])
    of_blocks.setdefault("attention_scale", of_blocks["head_dim"] ** -0.5)
    if theta is not None:
        of_blocks["rotary"] = (RopeConfig(theta=float(rope.get("rope_theta") or theta)),)
    layers = () if spec is None else (spec,) * count
    return make(blocks=DecoderConfig(vocab_size=1, layers=layers, **of_blocks), **of_tower)
