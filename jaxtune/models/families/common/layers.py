"""Keys of config.json by which layers differ from one another: types, windows, position encodings and parts. Functions
of a config.json that return types of layers are defaults for files without layer_types.
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
    """One name in layer_types, and the properties of its layers."""

    name: str
    window: bool = False
    """Whether the layers have the window of sliding_window."""
    rotary: int | None = 0
    """Index of the rotary base; None: no position encoding."""
    mixer: Record | None = None
    """Makes the mixer's config; None: attention of the decoder's shape."""

    def fits(self, layer: LayerSpec) -> bool:
        """Whether a layer can be written as this type."""
        mixer_config = layer.config_of("mixer")
        of_mixer = mixer_config is None if self.mixer is None else isinstance(mixer_config, self.mixer.make)
        return of_mixer and layer.rotary == self.rotary and (self.window or layer.window is None)


FULL = LayerType(rope.FULL)
SLIDING = LayerType(rope.SLIDING, window=True)


def alternating(hf: Config) -> list[str]:
    """Sliding and full attention in turn, beginning with sliding."""
    return [(rope.SLIDING, rope.FULL)[index % 2] for index in range(hf["num_hidden_layers"])]


def by_pattern(hf: Config) -> list[str]:
    """sliding_window_pattern n stands for n - 1 sliding layers before each full one; letters such as LLLG (local,
    global) are repeated.
    """
    pattern, count = hf["sliding_window_pattern"], hf["num_hidden_layers"]
    if isinstance(pattern, int):
        return [rope.SLIDING if (index + 1) % pattern else rope.FULL for index in range(count)]
    return [{"L": rope.SLIDING, "G": rope.FULL}[pattern[index % len(pattern)]] for index in range(count)]


def from_max_window_layers(hf: Config) -> list[str]:
    """Layers from max_window_layers on slide, if there is a window."""
    slides = hf["sliding_window"] is not None
    indices = range(hf["num_hidden_layers"])
    return [rope.SLIDING if slides and index >= hf["max_window_layers"] else rope.FULL for index in indices]


def layer_types(hf: Config, default: Callable[[Config], Sequence[str]], type_names: Sequence[str]) -> list[str]:
    """The name of each layer's type, from layer_types or `default`. Raises ValueError for a wrong number, or a type not
    in `type_names`.

      hf: config.json with a value for every key (`completed`).
      default: hf -> the names, one a layer, for a config.json without layer_types.
      type_names: the names that the family knows.
    """
    names, count = list(hf["layer_types"] or default(hf)), hf["num_hidden_layers"]
    if len(names) != count:
        raise ValueError(f"config.json: layer_types has {len(names)} entries, num_hidden_layers is {count}")
    for name in set(names) - set(type_names):
        raise ValueError(f"config.json: layer_types {name!r} is not supported; supported: {', '.join(type_names)}")
    return names


def window_of(hf: Config, rotary: Sequence[RopeConfig]) -> int | None:
    """The window in tokens; None if it is at least as long as the context, because full attention is then the same and
    faster. Raises ValueError if sliding_window is null or below 1.
    """
    window = hf["sliding_window"]
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"config.json: layers have a window, but sliding_window is {window!r}: it must be at least 1")
    return None if window >= context_length(hf["max_position_embeddings"], rotary) else window


def one_window(config: DecoderConfig, layers: Sequence[LayerSpec]) -> int | None:
    """The window that all `layers` have; None for none. Raises ValueError for several, which a config.json cannot
    express.
    """
    windows = {layer.window for layer in layers}
    if len(windows) > 1:
        raise ValueError(
            f"layers have the windows {sorted(windows, key=str)}: config.json of a {config.family} model can have one"
        )
    return windows.pop() if windows else None


@dataclasses.dataclass(frozen=True)
class LayerTypes:
    """An entry for layer_types: window, rotary base and mixer of each layer. It stands after the family's entry for
    rotary bases, because the context that yarn extends limits windows.
    """

    default: Callable[[Config], Sequence[str]]
    types: tuple[LayerType, ...] = (FULL, SLIDING)
    """A layer is written as the first type that fits it."""
    needs_window: bool = True
    """Without windows, sliding_window is written as the context's length, for classes that need a number, or else null.
    """

    gives = ()  # no field for itself (Entry.gives), because other entries also change `layers`

    @property
    def keys(self) -> tuple[Key, ...]:
        mixers = (key for kind in self.types if kind.mixer is not None for key in kind.mixer.keys)
        return (SLIDING_WINDOW, LAYER_TYPES, *mixers)

    def read(self, hf: Config, fields: Config) -> Fields:
        types = {kind.name: kind for kind in self.types}
        names = layer_types(hf, self.default, tuple(types))
        mixers = {kind.name: kind.mixer.build(hf) for kind in self.types if kind.mixer is not None}
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
        """Raises ValueError for a layer of no type, or different windows or mixers within one."""
        kinds = [self._type_of(index, config) for index in range(config.num_layers)]
        written: Fields = {"layer_types": [kind.name for kind in kinds]}
        for kind in self.types:
            layers = [layer for layer, layer_kind in zip(config.layers, kinds, strict=True) if layer_kind is kind]
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
        layer_type = next((kind for kind in self.types if kind.fits(config.layers[index])), None)
        if layer_type is None:
            names = ", ".join(kind.name for kind in self.types)
            raise ValueError(
                f"layer {index} is of no type that config.json of a {config.family} model has ({names}): none has its "
                "window, position encoding and mixer"
            )
        return layer_type


class OneWindow:
    """An entry for a sliding_window of all layers, or of none for null. It stands after the family's entry for rotary
    bases.
    """

    keys = (SLIDING_WINDOW,)
    gives = ()  # no field for itself (Entry.gives), because other entries also change `layers`

    def read(self, hf: Config, fields: Config) -> Fields:
        window = None if hf["sliding_window"] is None else window_of(hf, fields["rotary"])
        return {"layers": tuple(dataclasses.replace(layer, window=window) for layer in fields["layers"])}

    def write(self, config: DecoderConfig) -> Fields:
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
    """sliding_window becomes null unless use_sliding_window is true: files give a window even if it is not used."""
    return {**hf, "sliding_window": hf["sliding_window"] if hf["use_sliding_window"] else None}


def _first_window(config: DecoderConfig) -> int:
    return next((i for i, layer in enumerate(config.layers) if layer.window is not None), config.num_layers)


MAX_WINDOW_LAYERS = Key("max_window_layers", (), any_count, 28)
UPPER_WINDOWS = (
    LayerTypes(from_max_window_layers, needs_window=False),
    WINDOW_SWITCH,
    dataclasses.replace(MAX_WINDOW_LAYERS, written=_first_window),
)


@dataclasses.dataclass(frozen=True)
class MLPFirst:
    """An entry for the number of a model's first layers that have an MLP and no experts."""

    name: str
    default: int

    gives = ()  # no field for itself (Entry.gives), because other entries also change `layers`

    @property
    def keys(self) -> tuple[Key, ...]:
        return (Key(self.name, (), any_count, self.default),)

    def read(self, hf: Config, fields: Config) -> Fields:
        mlp: PartConfig = MLPShape(hf["intermediate_size"])
        layers = enumerate(fields["layers"])
        return {"layers": tuple(layer.replaced(mlp=mlp) if at < hf[self.name] else layer for at, layer in layers)}

    def write(self, config: DecoderConfig) -> Fields:
        """Raises ValueError for an MLP behind experts."""
        dense = [layer.config_of("mlp") is not None for layer in config.layers]
        if dense != sorted(dense, reverse=True):
            raise ValueError(f"layers with an MLP behind experts: a {config.family} model's are the first")
        return {self.name: sum(dense)}


class MLPLayers:
    """An entry for mlp_only_layers and decoder_sparse_step: layers of a model with experts that have an MLP instead."""

    keys = (
        Key("mlp_only_layers", (), functools.partial(values.items, check=any_count), ()),
        Key("decoder_sparse_step", (), values.whole, 1),
    )
    gives = ()  # no field for itself (Entry.gives), because other entries also change `layers`

    def read(self, hf: Config, fields: Config) -> Fields:
        mlp: PartConfig = MLPShape(hf["intermediate_size"])
        layers = (
            layer.replaced(mlp=mlp)
            if index in hf["mlp_only_layers"] or (index + 1) % hf["decoder_sparse_step"]
            else layer
            for index, layer in enumerate(fields["layers"])
        )
        return {"layers": tuple(layers)}

    def write(self, config: DecoderConfig) -> Fields:
        """The list alone says it, whatever step was read."""
        listed = [index for index, layer in enumerate(config.layers) if layer.config_of("mlp") is not None]
        return {"mlp_only_layers": listed, "decoder_sparse_step": 1}
