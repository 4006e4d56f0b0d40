"""Keys of the two families of Gemma 4: five sliding layers to each global one, whose heads are wider and whose values
may be their keys; last layers that share keys and values; experts beside the MLP; embeddings of each layer. The files
gemma4.py and gemma4_unified.py of models/families declare their FAMILY with KEYS, SHARING, DEFAULTS, FIELDS, NORMS,
`prepared` (rewrites a config.json before its keys are read) and `unused_tensors` (prefixes of tensors that are not
loaded); gemma4.py also with EXPERTS and PER_LAYER. The classes are entries of the table: _Rotary (bases), _Layers
(types of layers), _Sharing (shared keys and values), _PerLayer (embeddings of layers) and _Experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
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
    check_parameters,
    rope_config,
    rope_to_hf,
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
    """Raises ValueError unless `value`, the entry use_bidirectional_attention of a config.json, is "vision", with which
    the tokens of an image see each other in both directions. That changes nothing in text, which is all that jaxtune
    trains. It is the Key.check of that key, and not called for null. key: what the error calls the value."""
    if value != "vision":
        raise ValueError(f"{key} = {value!r} is not supported: only 'vision', which changes nothing in text, and null")


def _check_layers(key: str, value: Any) -> None:
    """The Key.check of per_layer_config, {index of a layer: {key: its value in that layer}}, in which transformers 5.23
    writes the sizes of global layers; earlier files have them in the keys global_head_dim and
    num_global_key_value_heads. Raises ValueError for a value that is no such object of objects, an index that is no
    number, a key that is neither head_dim nor num_key_value_heads, or a size that is no positive integer. Whether the
    layers exist and are global is checked later (_of_global_layers).

    key: what the error calls the value. value: the per_layer_config.
    """
    values.mapping(key, value)
    for index, said in value.items():
        if not str(index).isdigit():
            raise ValueError(f"{key} has {index!r}, which is not the index of a layer")
        values.mapping(f"{key}.{index}", said)
        for name, own in said.items():
            if name not in _GLOBAL:
                raise ValueError(f"{key}.{index}.{name} = {own!r} is not supported; supported: {', '.join(_GLOBAL)}")
            values.whole(f"{key}.{index}.{name}", own)


def _default_types(hf: Config) -> list[str]:
    """The types of all layers of the config.json `hf`, which has no layer_types: every sixth is global
    ("full_attention"), the others slide ("sliding_attention"). `prepared` fills in layer_types with it, and it is the
    LayerTypes.default of Gemma 4."""
    return [SLIDING if (index + 1) % 6 else FULL for index in range(hf["num_hidden_layers"])]


def prepared(hf: Config) -> Fields:
    """The config.json `hf`, in which all keys have values, rewritten so that its keys can be read one by one (for
    Family.prepare). `hf` itself is not changed.

    layer_types is filled in if it is missing (_default_types), and the last layer becomes global whatever it says. If
    there is a per_layer_config, its sizes replace those of global_head_dim and num_global_key_value_heads, the keys for
    all global layers (_of_global_layers). A num_global_key_value_heads that changes nothing becomes null: one that
    equals num_key_value_heads, or any if attention_k_eq_v is false.

    Raises:
      ValueError: a per_layer_config that these keys cannot express.
    """
    types = [*list(hf["layer_types"] or _default_types(hf))[:-1], FULL]
    hf = {**hf, "layer_types": types}
    if hf["per_layer_config"] is not None:
        hf |= _of_global_layers(hf, types)
    same = hf["num_global_key_value_heads"] == hf["num_key_value_heads"]
    return hf | {"num_global_key_value_heads": None} if same or not hf["attention_k_eq_v"] else hf


def _of_global_layers(hf: Config, types: Sequence[str]) -> Fields:
    """The sizes of global layers from per_layer_config of the config.json `hf`, {"global_head_dim": ...,
    "num_global_key_value_heads": ...}, the keys that earlier files have for all global layers; `prepared` puts them
    into the config. A size that per_layer_config does not give is head_dim or num_key_value_heads, even if the file has
    the earlier keys.

    types: the type of each layer, "full_attention" (global) or "sliding_attention".

    Raises:
      ValueError: layers of one type with different sizes; sizes for layers that do not exist; layers that slide with
        other sizes than head_dim and num_key_value_heads; or global layers with another number of key and value heads
        than num_key_value_heads without attention_k_eq_v.
    """
    usual = {"head_dim": hf["head_dim"], "num_key_value_heads": hf["num_key_value_heads"]}
    own = {int(index): said for index, said in hf["per_layer_config"].items()}
    found = dict.fromkeys((FULL, SLIDING), usual)
    for kind in found:
        shapes = [usual | own.get(index, {}) for index, one in enumerate(types) if one == kind]
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError(f"config.json: per_layer_config gives the {kind} layers different shapes: {shapes}")
        found[kind] = shapes[0] if shapes else usual
    if found[SLIDING] != usual or any(index >= len(types) for index in own):
        raise ValueError(f"config.json: per_layer_config = {hf['per_layer_config']} is not of global layers alone")
    shape = found[FULL]
    if not hf["attention_k_eq_v"] and shape["num_key_value_heads"] != usual["num_key_value_heads"]:
        raise ValueError(
            f"config.json: per_layer_config gives global layers {shape['num_key_value_heads']} key and value heads in "
            f"place of {usual['num_key_value_heads']}: only supported with attention_k_eq_v = true"
        )
    return {"global_head_dim": shape["head_dim"], "num_global_key_value_heads": shape["num_key_value_heads"]}


class _Rotary(RotaryByType):
    """The entry of Gemma 4's table (key.Entry) for its rotary bases, one for each type of layer: RotaryByType, in which
    the key rope_parameters alone has them. The base of global layers rotates heads of global_head_dim, that of sliding
    layers heads of head_dim."""

    keys = (Key("rope_parameters", (), check_parameters, None),)

    def given_to(self, layer_type: str, hf: Config) -> Fields:
        """The rotary parameters of the layers of one type (layer_type, "full_attention" or "sliding_attention") as one
        flat dict, as `rope_parameters` returns it: from the config.json `hf` or, without rope_parameters, those of
        Gemma 4. Raises ValueError if rope_parameters has none for the type. With the rope_type default,
        partial_rotary_factor is left out, because transformers' class then rotates whole heads."""
        given = (hf["rope_parameters"] or _ROPE).get(layer_type)
        if not isinstance(given, Mapping):
            raise ValueError(
                f"config.json: rope_parameters lacks {layer_type!r}: a {hf['model_type']!r} model has an object for "
                "each type of layer"
            )
        given = {"rope_type": "default"} | {key: value for key, value in given.items() if value is not None}
        if given["rope_type"] == "default":  # which rotates whole heads in this class
            given.pop("partial_rotary_factor", None)
        return given

    def read(self, hf: Config, fields: Config) -> Fields:
        """{"rotary": a tuple with the RopeConfig of each of `types`, each with the head size of its layers}, by the
        config.json `hf`; raises ValueError for parameters that are missing or do not fit the head. `fields` is not
        used, but all Entries take it."""
        dims = {FULL: hf["global_head_dim"], SLIDING: hf["head_dim"]}
        found = (rope_config({**hf, "head_dim": dims[name]}, self.given_to(name, hf)) for name in self.types)
        return {
            "rotary": tuple(
                dataclasses.replace(rope, head_dim=dims[name]) for name, rope in zip(self.types, found, strict=True)
            )
        }

    def write(self, config: DecoderConfig) -> Fields:
        """{"rope_parameters": {type of layer: its rotary parameters as one flat dict}} for the config.json of a model
        with this `config`: the inverse of `read`."""
        ropes = zip(self.types, config.rotary, strict=True)
        return {
            "rope_parameters": {
                name: {"rope_theta": rope.theta} | (rope_to_hf(rope) or {"rope_type": "default"})
                for name, rope in ropes
            }
        }


class _Layers(LayerTypes):
    """The entry of Gemma 4's table (key.Entry) for the key layer_types: LayerTypes, in which the output of every layer
    is also multiplied by a scalar of that layer. It writes layers without their sharing of keys and values, which is
    the entry _Sharing's."""

    def read(self, hf: Config, fields: Config) -> Fields:
        """{"layers": the LayerSpecs of `fields` with the window, rotary base and attention of each layer's type by the
        config.json `hf`, as LayerTypes sets them, and with output_scale True: each layer's output is multiplied by a
        scalar of the checkpoint}. fields: the fields of DecoderConfig that earlier entries set, `layers` among them.
        Raises ValueError for another number of types than layers, types that the family does not have, or a window that
        is missing."""
        layers = super().read(hf, fields)["layers"]
        return {"layers": tuple(dataclasses.replace(layer, output_scale=True) for layer in layers)}

    def write(self, config: DecoderConfig) -> Fields:
        """{key: value} of layer_types, sliding_window and the keys of global layers' attention for the config.json of
        `config`, as LayerTypes writes them. The layers' sharing of keys and values is left out, because another key
        says it. Raises ValueError for layers that are of no type, or that differ within a type."""
        return super().write(dataclasses.replace(config, layers=tuple(map(_unshared, config.layers))))


def _shape_of(layer: LayerSpec) -> AttentionShape:
    """The AttentionShape of a layer, the settings of its attention; AttentionShape() if the layer has none of its own
    and takes the decoder's. The functions here that read and write the sharing of keys and values call it."""
    shape = layer.config_of("mixer") or AttentionShape()
    assert isinstance(shape, AttentionShape)
    return shape


def _unshared(layer: LayerSpec) -> LayerSpec:
    """The layer without the sharing of keys and values: as if it neither gave its own to later layers nor took an
    earlier layer's. `_Layers.write` describes such layers, because the sharing has a key of its own in config.json."""
    shape = dataclasses.replace(_shape_of(layer), gives_keys=None, takes_keys=None)
    config = None if shape == AttentionShape() else shape

    def one(part: Part) -> Part:
        """The part with the config without sharing if it is the mixer, else unchanged."""
        return dataclasses.replace(part, config=config) if part.name == "mixer" else part

    stages = (dataclasses.replace(stage, parts=tuple(map(one, stage.parts))) for stage in layer.stages)
    return dataclasses.replace(layer, stages=tuple(stages))


class _Sharing:
    """The entry of Gemma 4's table (key.Entry) for num_kv_shared_layers, the number of last layers that have no keys
    and values of their own. Each takes those of the last layer of its type before them. Their MLP has twice the width
    if use_double_wide_mlp is true."""

    gives = ()  # no field for itself (Entry.gives), because other entries also change `layers`
    keys = (
        Key("num_kv_shared_layers", (), any_count, 0),
        Key("use_double_wide_mlp", (), values.boolean, False),
    )

    def read(self, hf: Config, fields: Config) -> Fields:
        """Reads which layers share keys and values from the config.json `hf`. Returns {"layers": the LayerSpecs of
        `fields`, the fields of DecoderConfig that earlier entries set, changed}: each of the last num_kv_shared_layers
        layers takes the keys and values of the last layer of its type (sliding or full attention) before all of these,
        which is marked as giving them. The layers that take them get an MLP of twice the width if use_double_wide_mlp
        is true.

        Raises:
          ValueError: a layer that shares has no layer of its type before the sharing ones.
        """
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
        """{key: value} of num_kv_shared_layers and use_double_wide_mlp for the config.json of a model with this
        `config`: the inverse of `read`. The latter is true if any layer that takes keys and values has an MLP of twice
        the width."""
        takers = [layer for layer in config.layers if _shape_of(layer).takes_keys is not None]
        wide = MLPShape(2 * config.intermediate_size)
        doubled = any(wide in (layer.config_of("mlp"), layer.config_of("dense")) for layer in takers)
        return {"num_kv_shared_layers": len(takers), "use_double_wide_mlp": doubled}


def unused_tensors(config: DecoderConfig) -> tuple[str, ...]:
    """Prefixes of tensor names, such as "model.layers.20.self_attn.k_proj.", that a checkpoint of a model with this
    `config` may have and that are not loaded: projections and norms of keys and values of the layers that take those of
    earlier layers; () if no layer does. Published checkpoints have them all the same. It is the Family.unused_tensors
    of Gemma 4."""
    takers = [index for index, layer in enumerate(config.layers) if _shape_of(layer).takes_keys is not None]
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    return tuple(f"model.layers.{index}.self_attn.{name}." for index in takers for name in names)


class _PerLayer:
    """The entry of Gemma 4's table (key.Entry) for per-layer embeddings, which translates between config.json and
    DecoderConfig: their sizes, and the stage of every layer that adds them. 0 or null for hidden_size_per_layer_input
    means that there are none."""

    gives = ("per_layer_size", "per_layer_vocab_size")
    keys = (
        Key("hidden_size_per_layer_input", (), any_count, 256, null=0),
        Key("vocab_size_per_layer_input", (), values.whole, 262_144),
    )

    def read(self, hf: Config, fields: Config) -> Fields:
        """Reads the per-layer embeddings from the config.json `hf`. Returns the fields per_layer_size,
        per_layer_vocab_size and `layers`: the LayerSpecs of `fields`, each with one more stage at its end. A stage is a
        sublayer with its own residual connection, as attention and the MLP are; this one adds the layer's own
        embeddings. Returns {} if the model has none. fields: the fields of DecoderConfig that earlier entries set."""
        size = hf["hidden_size_per_layer_input"]
        if not size:
            return {}
        stage = Stage((Part("per_layer", PerLayerShape(size), norm=False, post_norm=True),))
        layers = (dataclasses.replace(layer, stages=(*layer.stages, stage)) for layer in fields["layers"])
        rows = hf["vocab_size_per_layer_input"]
        return {"per_layer_size": size, "per_layer_vocab_size": rows, "layers": tuple(layers)}

    def write(self, config: DecoderConfig) -> Fields:
        """{key: value} of both keys for the config.json of a model with this `config`. A model without these
        embeddings has 0 for hidden_size_per_layer_input, and its vocabulary's size for the other."""
        rows = config.per_layer_vocab_size or config.vocab_size
        return {"hidden_size_per_layer_input": config.per_layer_size or 0, "vocab_size_per_layer_input": rows}


class _Experts:
    """The entry of Gemma 4's table (key.Entry) for experts in parallel with the MLP, which all layers have if
    enable_moe_block is true: sets DecoderConfig.moe and the stages of the layers. MLP and experts each have a norm
    before and after them, and their sum has one more. `record` has the keys of the experts' MoEConfig."""

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
        """{"moe": the MoEConfig that the config.json `hf` describes, "layers": the LayerSpecs of `fields` with such
        experts beside an MLP}; {} for a dense model. fields: the fields of DecoderConfig that earlier entries set.

        Raises:
          ValueError: enable_moe_block is true, and a number or the size of experts is missing, or MoEConfig refuses
            them.
        """
        if not hf["enable_moe_block"]:
            return {}
        for key in self.record.keys:
            if hf[key.name] is None:
                raise ValueError(f"config.json: {key.name} is missing, and enable_moe_block = True needs it")
        moe = self.record.made(hf)
        dense = Part("dense", MLPShape(hf["intermediate_size"]), post_norm=True)
        beside = Part("experts", ExpertsShape(moe, hf_name=""), post_norm=True)
        stages = (Stage((Part("mixer", post_norm=True),)), Stage((dense, beside), post_norm=True))
        # The config of an attention of another shape than the decoder's stays the layer's.
        layers = (
            dataclasses.replace(layer, stages=stages).replaced(mixer=layer.config_of("mixer"))
            for layer in fields["layers"]
        )
        return {"moe": moe, "layers": tuple(layers)}

    def write(self, config: DecoderConfig) -> Fields:
        """{key: value} of enable_moe_block and the numbers and size of experts for the config.json of a model with
        this `config`. In a dense model enable_moe_block is false and the others are null."""
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
