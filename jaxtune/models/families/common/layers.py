"""Keys of config.json by which layers differ from one another: types, windows, position encodings and parts.

LayerTypes (of which each type is a LayerType), OneWindow and MLPLayers are entries of families' tables (key.Entry),
which read such keys into DecoderConfig.layers and write them back. For files that do not list the types of layers,
`alternating`, `by_pattern` and `from_max_window_layers` compute them; `layer_types` reads or computes them. `window_of`
reads the window, and `one_window` finds the one to write. Of Qwen's families whose windows have a switch
(use_sliding_window), `switched_window` is the Family.prepare, and UPPER_WINDOWS has the entries of Qwen2 and Qwen3.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from jaxtune.models import values
from jaxtune.models.config import DecoderConfig, LayerSpec, PartConfig, RopeConfig, context_length
from jaxtune.models.families.common import rope
from jaxtune.models.families.common.key import Config, Fields, Key, Record
from jaxtune.models.layers.mlp import MLPShape

any_count = functools.partial(values.whole, least=0)
# 0 is allowed because some files write it for a missing window.
SLIDING_WINDOW = Key("sliding_window", (), any_count, None, null=None)
LAYER_TYPES = Key("layer_types", (), values.texts, None)


@dataclasses.dataclass(frozen=True)
class LayerType:
    """A type of layer: one name in the key layer_types, and the properties of the layers with that name. A family lists
    its types in LayerTypes.types, which reads and writes layers by them."""

    name: str
    """The name in layer_types."""
    window: bool = False
    """True: the layers have the window of the key sliding_window (`window_of`); False: full attention, or no
    attention."""
    rotary: int | None = 0
    """Index of the layers' rotary base in DecoderConfig.rotary; None: no position encoding."""
    mixer: Record | None = None
    """The Record that makes the config of the layers' mixer from its keys; None: attention of the decoder's shape."""

    def fits(self, layer: LayerSpec) -> bool:
        """Whether a layer can be written to config.json as this type: it has the type's kind of mixer and its rotary
        base, and no window unless the type has one. LayerTypes.write chooses each layer's type by it."""
        made = layer.config_of("mixer")
        of_mixer = made is None if self.mixer is None else isinstance(made, self.mixer.make)
        return of_mixer and layer.rotary == self.rotary and (self.window or layer.window is None)


FULL = LayerType(rope.FULL)
SLIDING = LayerType(rope.SLIDING, window=True)


def alternating(hf: Config) -> list[str]:
    """The type of each layer ("sliding_attention" or "full_attention") where sliding and full attention alternate,
    beginning with sliding. Families declare it as LayerTypes.default, for a config.json (`hf`) without layer_types."""
    return [(rope.SLIDING, rope.FULL)[index % 2] for index in range(hf["num_hidden_layers"])]


def by_pattern(hf: Config) -> list[str]:
    """The type of each layer ("sliding_attention" or "full_attention") by the key sliding_window_pattern of the
    config.json `hf`. Families declare it as LayerTypes.default, for a file without layer_types. `hf` has the family's
    default for the key if the file lacks it or has null.

    A number n stands for n - 1 sliding layers before each full one; letters such as LLLG (local, global) are repeated.
    """
    pattern, count = hf["sliding_window_pattern"], hf["num_hidden_layers"]
    if isinstance(pattern, int):
        return [rope.SLIDING if (index + 1) % pattern else rope.FULL for index in range(count)]
    return [{"L": rope.SLIDING, "G": rope.FULL}[pattern[index % len(pattern)]] for index in range(count)]


def from_max_window_layers(hf: Config) -> list[str]:
    """The type of each layer by the key max_window_layers of the config.json `hf`: if it has a window, the layers from
    that index on are "sliding_attention", and all others "full_attention". Families declare it as LayerTypes.default,
    for a file without layer_types."""
    slides = hf["sliding_window"] is not None
    indices = range(hf["num_hidden_layers"])
    return [rope.SLIDING if slides and index >= hf["max_window_layers"] else rope.FULL for index in indices]


def layer_types(hf: Config, default: Callable[[Config], Sequence[str]], known: Sequence[str]) -> list[str]:
    """The name of each layer's type, from the key layer_types, or from `default` if the config.json has none or an
    empty list. LayerTypes.read calls it.

    Args:
      hf: the config.json, in which every declared key has a value.
      default: (the config.json) -> the name of each layer's type, for files without the key.
      known: the names of types that the family has.
    Raises:
      ValueError: another number of entries than layers, or a type that is not in `known`.
    """
    names, count = list(hf["layer_types"] or default(hf)), hf["num_hidden_layers"]
    if len(names) != count:
        raise ValueError(f"config.json: layer_types has {len(names)} entries, num_hidden_layers is {count}")
    for name in set(names) - set(known):
        raise ValueError(f"config.json: layer_types {name!r} is not supported; supported: {', '.join(known)}")
    return names


def window_of(hf: Config, rotary: Sequence[RopeConfig]) -> int | None:
    """The window in tokens from the key sliding_window of a config.json (`hf`), for its sliding layers (LayerTypes,
    OneWindow). None if the window is at least as long as the context, because full attention is then the same and
    faster. rotary: the rotary bases that were read from the file; those of the kind yarn extend the context.

    Raises:
      ValueError: sliding_window is null or below 1.
    """
    window = hf["sliding_window"]
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"config.json: layers have a window, but sliding_window is {window!r}: it must be at least 1")
    return None if window >= context_length(hf["max_position_embeddings"], rotary) else window


def one_window(config: DecoderConfig, layers: Sequence[LayerSpec]) -> int | None:
    """The window in tokens that all of `layers`, some or all layers of `config`, have, for the key sliding_window that
    LayerTypes and OneWindow write; None for no window or no layers. Of `config` only the family's name is used, for the
    error.

    Raises:
      ValueError: they have different windows, or only some have one, which one config.json cannot express.
    """
    windows = {layer.window for layer in layers}
    if len(windows) > 1:
        raise ValueError(
            f"layers have the windows {sorted(windows, key=str)}: config.json of a {config.family} model can have one"
        )
    return windows.pop() if windows else None


@dataclasses.dataclass(frozen=True)
class LayerTypes:
    """An entry of families' tables (key.Entry) for the key layer_types: gives each LayerSpec in DecoderConfig.layers
    the window, rotary base and mixer of the layer's type, and writes the types of layers back. It stands after the
    family's own entry for rotary bases, if there is one, because the context that yarn extends limits windows."""

    default: Callable[[Config], Sequence[str]]
    """Computes the types for a config.json without layer_types; it may read all keys of the family."""
    types: tuple[LayerType, ...] = (FULL, SLIDING)
    """The types that exist; a layer is written as the first one that fits it."""
    needs_window: bool = True
    """What is written for sliding_window if no layer has a window: True: the length of the context, because
    transformers' class needs a number; False: null."""

    gives = ()  # no field for itself (Entry.gives), because other entries also change `layers`

    @property
    def keys(self) -> tuple[Key, ...]:
        """sliding_window, layer_types, and the keys of the types' mixers, which `read` needs (Entry.keys)."""
        mixers = (key for kind in self.types if kind.mixer is not None for key in kind.mixer.keys)
        return (SLIDING_WINDOW, LAYER_TYPES, *mixers)

    def read(self, hf: Config, fields: Config) -> Fields:
        """{"layers": the LayerSpecs of `fields`, each with the window, rotary base and mixer of its type} by the
        config.json `hf`. fields: the fields of DecoderConfig that earlier entries set, with `layers` and `rotary`.
        Raises ValueError for another number of types than layers, types that the family does not have, or, if a layer
        is of a type with a window, a sliding_window that is null or 0."""
        types = {kind.name: kind for kind in self.types}
        names = layer_types(hf, self.default, tuple(types))
        mixers = {kind.name: kind.mixer.made(hf) for kind in self.types if kind.mixer is not None}
        window = window_of(hf, fields["rotary"]) if any(types[name].window for name in names) else None
        layers = (
            dataclasses.replace(
                layer.replaced(mixer=mixers.get(name)),
                window=window if types[name].window else None,
                rotary=types[name].rotary,
            )
            for layer, name in zip(fields["layers"], names, strict=True)
        )
        return {"layers": tuple(layers)}

    def write(self, config: DecoderConfig) -> Fields:
        """{key: value} of layer_types, sliding_window and the keys of the types' mixers for the config.json of
        `config`. If no layer of a type with a window has one, `needs_window` says what sliding_window is. It is left
        out if no type has a window, and a mixer's keys are left out if no layer is of its type.

        Raises:
          ValueError: layers that are of no type, or layers of one type with different windows or mixers.
        """
        kinds = [self._type_of(index, config) for index in range(config.num_layers)]
        written: Fields = {"layer_types": [kind.name for kind in kinds]}
        for kind in self.types:
            layers = [layer for layer, one in zip(config.layers, kinds, strict=True) if one is kind]
            if kind.window:
                longest = config.context_length if self.needs_window else None
                written["sliding_window"] = one_window(config, layers) or longest
            if kind.mixer is not None and layers:
                mixers = {layer.config_of("mixer") for layer in layers}
                if len(mixers) > 1:
                    raise ValueError(
                        f"layers of type {kind.name} have different mixers, but config.json can have one: {mixers}"
                    )
                written |= kind.mixer.described(mixers.pop())
        return written

    def _type_of(self, index: int, config: DecoderConfig) -> LayerType:
        """The first type that fits the layer of this index in `config`, by which the layer is written to config.json.

        Raises:
          ValueError: none fits it.
        """
        found = next((kind for kind in self.types if kind.fits(config.layers[index])), None)
        if found is None:
            names = ", ".join(kind.name for kind in self.types)
            raise ValueError(
                f"layer {index} is of no type that config.json of a {config.family} model has ({names}): none has its "
                "window, position encoding and mixer"
            )
        return found


class OneWindow:
    """An entry of families' tables (key.Entry) for a sliding_window that all layers have: sets it in each LayerSpec,
    and writes it back. Null in the file means that no layer has a window. It stands after the family's own entry for
    rotary bases, as LayerTypes does."""

    keys = (SLIDING_WINDOW,)
    gives = ()  # no field for itself (Entry.gives), because other entries also change `layers`

    def read(self, hf: Config, fields: Config) -> Fields:
        """{"layers": the LayerSpecs of `fields`, each with the window of the config.json `hf`}, None for a window that
        is null or at least as long as the context. fields: the fields of DecoderConfig that earlier entries set,
        `layers` and `rotary` among them. Raises ValueError for a window of 0."""
        window = None if hf["sliding_window"] is None else window_of(hf, fields["rotary"])
        return {"layers": tuple(dataclasses.replace(layer, window=window) for layer in fields["layers"])}

    def write(self, config: DecoderConfig) -> Fields:
        """{"sliding_window": the window of all layers of `config`, or None if they have none}, for its config.json;
        raises ValueError if layers have different windows."""
        return {"sliding_window": one_window(config, config.layers)}


# Unless this key is true, Qwen's families with it have no windows (their `prepare` is `switched_window`), and SmolLM3
# has none by default; there, sliding layers that layer_types lists have their window all the same.
WINDOW_SWITCH = Key(
    "use_sliding_window",
    (),
    values.boolean,
    False,
    written=lambda config: any(layer.window is not None for layer in config.layers),
)


def switched_window(hf: Config) -> Fields:
    """The config.json `hf`, in which all keys of the family have values, with null for sliding_window unless
    use_sliding_window is true. It is the Family.prepare of Qwen2, Qwen3 and their families with experts, whose files
    give a sliding_window even if the model does not use it."""
    return {**hf, "sliding_window": hf["sliding_window"] if hf["use_sliding_window"] else None}


def _first_window(config: DecoderConfig) -> int:
    """The value of max_window_layers that is written to config.json for `config` (Key.written): the index of the first
    layer with a window, or the number of layers if none has one."""
    return next((i for i, layer in enumerate(config.layers) if layer.window is not None), config.num_layers)


MAX_WINDOW_LAYERS = Key("max_window_layers", (), any_count, 28)
UPPER_WINDOWS = (
    LayerTypes(from_max_window_layers, needs_window=False),
    WINDOW_SWITCH,
    dataclasses.replace(MAX_WINDOW_LAYERS, written=_first_window),
)


class MLPLayers:
    """An entry of families' tables (key.Entry) for mlp_only_layers and decoder_sparse_step, which say which layers of a
    model with experts have an MLP instead: replaces the feed-forward of these LayerSpecs, and writes mlp_only_layers
    back. Qwen2-MoE and Qwen3-Next have it; in Qwen3-MoE every layer must have experts."""

    keys = (
        Key("mlp_only_layers", (), functools.partial(values.items, of=any_count), ()),
        Key("decoder_sparse_step", (), values.whole, 1),
    )
    gives = ()  # no field for itself (Entry.gives), because other entries also change `layers`

    def read(self, hf: Config, fields: Config) -> Fields:
        """{"layers": the LayerSpecs of `fields`, with an MLP of the width intermediate_size in the layers that have no
        experts by the config.json `hf`}: those in mlp_only_layers, and all but every decoder_sparse_step-th. fields:
        the fields of DecoderConfig that earlier entries set."""
        mlp: PartConfig = MLPShape(hf["intermediate_size"])
        layers = (
            layer.replaced(mlp=mlp)
            if index in hf["mlp_only_layers"] or (index + 1) % hf["decoder_sparse_step"]
            else layer
            for index, layer in enumerate(fields["layers"])
        )
        return {"layers": tuple(layers)}

    def write(self, config: DecoderConfig) -> Fields:
        """{"mlp_only_layers": the indices of all layers of `config` that have an MLP, "decoder_sparse_step": 1}. The
        list alone says it, whatever step the model was read with."""
        listed = [index for index, layer in enumerate(config.layers) if layer.config_of("mlp") is not None]
        return {"mlp_only_layers": listed, "decoder_sparse_step": 1}
