"""Keys of the two families of Gemma 4: global layers with wider heads whose values may be their keys, last layers that
share keys and values, experts beside the MLP, and embeddings of each layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxtune.models import values
from jaxtune.models.config import DecoderConfig, LayerSpec, MoEConfig, Part, Stage
from jaxtune.models.families.common.key import Config, Entry, Fields, Key, Record
from jaxtune.models.families.common.layers import LayerType, LayerTypes, any_count
from jaxtune.models.families.common.names import GEMMA_NORMS
from jaxtune.models.families.common.rope import (
    FULL,
    SLIDING,
    RotaryByType,
    by_type,
    check_parameters,
    rope_config,
)
from jaxtune.models.families.common.table import ATTENTION_BIAS, EXPERT_SIZE, GEMMA_ACTIVATION, SOFT_CAP
from jaxtune.models.layers.attention import AttentionShape
from jaxtune.models.layers.experts import ExpertsShape
from jaxtune.models.layers.mlp import MLPShape
from jaxtune.models.layers.per_layer import PerLayerShape

_ROPE: Config = {
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
_GLOBAL = ("head_dim", "num_key_value_heads")  # keys of per_layer_config that are known


def _check_direction(key: str, value: Any) -> None:
    """ "vision" lets an image's tokens see each other, which changes nothing in text."""
    if value != "vision":
        raise ValueError(f"{key} = {value!r} is not supported: only 'vision', which changes nothing in text, and null")


def _check_layers(key: str, value: Any) -> None:
    """Checks per_layer_config, {layer's index: {key: value}}: transformers 5.23 writes global layers' sizes there."""
    values.mapping(key, value)
    for index, sizes in value.items():
        if not str(index).isdigit():
            raise ValueError(f"{key} has {index!r}, which is not the index of a layer")
        values.mapping(f"{key}.{index}", sizes)
        for name, size in sizes.items():
            if name not in _GLOBAL:
                raise ValueError(f"{key}.{index}.{name} = {size!r} is not supported; supported: {', '.join(_GLOBAL)}")
            values.whole(f"{key}.{index}.{name}", size)


def _default_types(hf: Config) -> list[str]:
    return [SLIDING if (index + 1) % 6 else FULL for index in range(hf["num_hidden_layers"])]


def prepared(hf: Config) -> Fields:
    """layer_types is filled in, and the last layer becomes global whatever it says. per_layer_config replaces
    global_head_dim and num_global_key_value_heads; the latter becomes null if it changes nothing. Raises ValueError for
    a per_layer_config that these keys cannot express.
    """
    types = [*list(hf["layer_types"] or _default_types(hf))[:-1], FULL]
    hf = {**hf, "layer_types": types}
    if hf["per_layer_config"] is not None:
        hf |= _of_global_layers(hf, types)
    unchanged = hf["num_global_key_value_heads"] == hf["num_key_value_heads"]
    return hf | {"num_global_key_value_heads": None} if unchanged or not hf["attention_k_eq_v"] else hf


def _of_global_layers(hf: Config, types: Sequence[str]) -> Fields:
    """The two earlier keys from per_layer_config. ValueError for sizes that differ between layers of a type."""
    usual = {"head_dim": hf["head_dim"], "num_key_value_heads": hf["num_key_value_heads"]}
    sizes_by_layer = {int(index): sizes for index, sizes in hf["per_layer_config"].items()}
    shape_by_type = dict.fromkeys((FULL, SLIDING), usual)
    for kind in shape_by_type:
        shapes = [usual | sizes_by_layer.get(index, {}) for index, layer_type in enumerate(types) if layer_type == kind]
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError(f"config.json: per_layer_config gives the {kind} layers different shapes: {shapes}")
        shape_by_type[kind] = shapes[0] if shapes else usual
    if shape_by_type[SLIDING] != usual or any(index >= len(types) for index in sizes_by_layer):
        raise ValueError(f"config.json: per_layer_config = {hf['per_layer_config']} is not of global layers alone")
    shape = shape_by_type[FULL]
    if not hf["attention_k_eq_v"] and shape["num_key_value_heads"] != usual["num_key_value_heads"]:
        raise ValueError(
            f"config.json: per_layer_config gives global layers {shape['num_key_value_heads']} key and value heads in "
            f"place of {usual['num_key_value_heads']}: only supported with attention_k_eq_v = true"
        )
    return {"global_head_dim": shape["head_dim"], "num_global_key_value_heads": shape["num_key_value_heads"]}


class _Rotary(RotaryByType):
    """RotaryByType from rope_parameters alone; global layers rotate heads of global_head_dim."""

    keys = (Key("rope_parameters", (), check_parameters, None),)

    def parameters_of_type(self, layer_type: str, hf: Config) -> Fields:
        parameters = by_type(hf["rope_parameters"] or _ROPE).get(layer_type)
        if parameters is None:
            raise ValueError(
                f"config.json: rope_parameters lacks {layer_type!r}: a {hf['model_type']!r} model has an object for "
                "each type of layer"
            )
        parameters = {"rope_type": "default"} | {key: value for key, value in parameters.items() if value is not None}
        if parameters["rope_type"] == "default":  # which rotates whole heads in this class
            parameters.pop("partial_rotary_factor", None)
        return parameters

    def read(self, hf: Config, fields: Config) -> Fields:
        dims = {FULL: hf["global_head_dim"], SLIDING: hf["head_dim"]}
        ropes = (rope_config({**hf, "head_dim": dims[name]}, self.parameters_of_type(name, hf)) for name in self.types)
        return {
            "rotary": tuple(
                dataclasses.replace(rope, head_dim=dims[name]) for name, rope in zip(self.types, ropes, strict=True)
            )
        }

    def write(self, config: DecoderConfig) -> Fields:
        return self.written_by_type(config)


class _Layers(LayerTypes):
    """LayerTypes, in which a scalar of the checkpoint multiplies each layer's output. _Sharing writes the sharing."""

    def read(self, hf: Config, fields: Config) -> Fields:
        layers = super().read(hf, fields)["layers"]
        return {"layers": tuple(dataclasses.replace(layer, output_scale=True) for layer in layers)}

    def write(self, config: DecoderConfig) -> Fields:
        return super().write(dataclasses.replace(config, layers=tuple(map(_unshared, config.layers))))


def _shape_of(layer: LayerSpec) -> AttentionShape:
    shape = layer.config_of("mixer") or AttentionShape()
    assert isinstance(shape, AttentionShape)
    return shape


def _unshared(layer: LayerSpec) -> LayerSpec:
    """The layer without the sharing of keys and values."""
    shape = dataclasses.replace(_shape_of(layer), gives_keys=None, takes_keys=None)
    config = None if shape == AttentionShape() else shape

    def without_sharing(part: Part) -> Part:
        return dataclasses.replace(part, config=config) if part.name == "mixer" else part

    stages = (dataclasses.replace(stage, parts=tuple(map(without_sharing, stage.parts))) for stage in layer.stages)
    return dataclasses.replace(layer, stages=tuple(stages))


class _Sharing:
    """The last num_kv_shared_layers layers, which take keys and values of the last layer of their type before."""

    gives = ()  # no field for itself (Entry.gives), because other entries also change `layers`
    keys = (
        Key("num_kv_shared_layers", (), any_count, 0),
        Key("use_double_wide_mlp", (), values.boolean, False),
    )

    def read(self, hf: Config, fields: Config) -> Fields:
        """Raises ValueError for a layer without one of its type before the sharing ones."""
        layers, count = list(fields["layers"]), hf["num_kv_shared_layers"]
        first = len(layers) - count
        types = [SLIDING if layer.rotary else FULL for layer in layers]
        for index in range(max(first, 0), len(layers)):
            if types[index] not in types[: max(first, 0)]:
                raise ValueError(
                    f"config.json: num_kv_shared_layers = {count}: layer {index} shares the keys and values of a "
                    f"{types[index]} layer before the last {count}, and there is none"
                )
            shape = dataclasses.replace(_shape_of(layers[index]), takes_keys=types[index])
            wide = MLPShape(2 * hf["intermediate_size"]) if hf["use_double_wide_mlp"] else None
            layers[index] = layers[index].replaced(mixer=shape, mlp=wide, dense=wide)
        for name in set(types[first:]) if count else ():
            giver = first - 1 - types[:first][::-1].index(name)
            shape = dataclasses.replace(_shape_of(layers[giver]), gives_keys=name)
            layers[giver] = layers[giver].replaced(mixer=shape)
        return {"layers": tuple(layers)}

    def write(self, config: DecoderConfig) -> Fields:
        takers = [layer for layer in config.layers if _shape_of(layer).takes_keys is not None]
        wide = MLPShape(2 * config.intermediate_size)
        doubled = any(wide in (layer.config_of("mlp"), layer.config_of("dense")) for layer in takers)
        return {"num_kv_shared_layers": len(takers), "use_double_wide_mlp": doubled}


def unused_tensors(config: DecoderConfig) -> tuple[str, ...]:
    """Prefixes of the tensors of keys and values in layers that take an earlier layer's. Published checkpoints have
    them.
    """
    takers = [index for index, layer in enumerate(config.layers) if _shape_of(layer).takes_keys is not None]
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    return tuple(f"model.layers.{index}.self_attn.{name}." for index in takers for name in names)


class _PerLayer:
    """Per-layer embeddings: their sizes, and the stage of every layer that adds them."""

    gives = ("per_layer_size", "per_layer_vocab_size")
    keys = (
        Key("hidden_size_per_layer_input", (), any_count, 256, null=0),
        Key("vocab_size_per_layer_input", (), values.whole, 262_144),
    )

    def read(self, hf: Config, fields: Config) -> Fields:
        size = hf["hidden_size_per_layer_input"]
        if not size:
            return {}
        stage = Stage((Part("per_layer", PerLayerShape(size), norm=False, post_norm=True),))
        layers = (dataclasses.replace(layer, stages=(*layer.stages, stage)) for layer in fields["layers"])
        rows = hf["vocab_size_per_layer_input"]
        return {"per_layer_size": size, "per_layer_vocab_size": rows, "layers": tuple(layers)}

    def write(self, config: DecoderConfig) -> Fields:
        """Without these embeddings the sizes are 0 and the vocabulary's."""
        rows = config.per_layer_vocab_size or config.vocab_size
        return {"hidden_size_per_layer_input": config.per_layer_size or 0, "vocab_size_per_layer_input": rows}


class _Experts:
    """Experts in parallel with the MLP if enable_moe_block is true."""

    gives = ("moe",)
    record = Record(
        MoEConfig,
        (
            Key("num_experts", "num_experts", values.whole, None, null=None),
            Key("top_k_experts", "experts_per_token", values.whole, None, null=None),
            dataclasses.replace(EXPERT_SIZE, default=None, null=None),
        ),
        {"scaled_router": True},
    )
    keys = (Key("enable_moe_block", (), values.boolean, False), *record.keys)

    def read(self, hf: Config, fields: Config) -> Fields:
        if not hf["enable_moe_block"]:
            return {}
        for key in self.record.keys:
            if hf[key.name] is None:
                raise ValueError(f"config.json: {key.name} is missing, and enable_moe_block = True needs it")
        moe = self.record.build(hf)
        dense = Part("dense", MLPShape(hf["intermediate_size"]), post_norm=True)
        experts = Part("experts", ExpertsShape(moe, hf_name=""), post_norm=True)
        stages = (Stage((Part("mixer", post_norm=True),)), Stage((dense, experts), post_norm=True))
        # The config of an attention of another shape than the decoder's stays the layer's.
        layers = (
            dataclasses.replace(layer, stages=stages).replaced(mixer=layer.config_of("mixer"))
            for layer in fields["layers"]
        )
        return {"moe": moe, "layers": tuple(layers)}

    def write(self, config: DecoderConfig) -> Fields:
        sizes: Fields = dict.fromkeys((key.name for key in self.record.keys), None)
        if config.moe is not None:
            sizes = self.record.described(config.moe)
        return {"enable_moe_block": config.moe is not None} | sizes


NORMS = GEMMA_NORMS | {
    "dense_norm": "pre_feedforward_layernorm",
    "dense_post_norm": "post_feedforward_layernorm_1",
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_post_norm": "post_feedforward_layernorm_2",
    "dense_sum_norm": "post_feedforward_layernorm",
    "per_layer_post_norm": "post_per_layer_input_norm",
}
_ATTENTION = Record(
    AttentionShape,
    (
        Key("global_head_dim", "head_dim", values.whole, 512),
        Key("num_global_key_value_heads", "num_kv_heads", values.whole, None, null=None),
        Key("attention_k_eq_v", "values_are_keys", values.boolean, False),
    ),
)
KEYS: tuple[Entry, ...] = (
    *GEMMA_ACTIVATION,
    SOFT_CAP,
    ATTENTION_BIAS,
    Key("per_layer_config", (), _check_layers, None),
    Key("use_bidirectional_attention", (), _check_direction, None),
    _Rotary(),
    _Layers(_default_types, (LayerType(FULL, mixer=_ATTENTION), LayerType(SLIDING, window=True, rotary=1))),
)
# Entries that follow KEYS, in this order: each changes the layers that the earlier ones made.
EXPERTS, SHARING, PER_LAYER = _Experts(), _Sharing(), _PerLayer()
DEFAULTS = {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True}
FIELDS = {
    "attention_scale": 1.0,
    "qk_norm": "head",
    "value_norm": True,
    "float32_norm": True,
    "embedding_scale": lambda hf: hf["hidden_size"] ** 0.5,
}
