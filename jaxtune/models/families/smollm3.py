"""SmolLM3: Llama in which some layers, by default every fourth, have no position encoding. no_rope_layers, a Key of its
own, says which (`_rotates`); `_Layers` reads and writes layer_types, and takes the rotary base from these layers.

FAMILY, which models/registry.py lists by its model_type, declares how their config.json is checked, read and written,
and how checkpoints name their tensors.
"""

from __future__ import annotations

import dataclasses
import functools

from jaxtune.models import values
from jaxtune.models.config import DecoderConfig
from jaxtune.models.families.common import Config, Family, Fields, Key, LayerTypes
from jaxtune.models.families.common.layers import WINDOW_SWITCH
from jaxtune.models.families.common.rope import FULL, SLIDING
from jaxtune.models.families.common.table import ATTENTION_BIAS, MLP_BIAS

_bit = functools.partial(values.whole, least=0, most=1)


def _rotates(hf: Config) -> list[int]:
    """For each layer 1 if it has rotary positions, otherwise 0. Despite its name, that is what the key no_rope_layers
    of the config.json `hf` contains; without the key, or if its list is empty, each no_rope_layer_interval-th layer has
    a 0. Raises ValueError for another number of entries than layers. `_default_types` and `_Layers.read` call it."""
    count, every = hf["num_hidden_layers"], hf["no_rope_layer_interval"]
    rotates = hf["no_rope_layers"] or [int((index + 1) % every != 0) for index in range(count)]
    if len(rotates) != count:
        raise ValueError(f"config.json: no_rope_layers has {len(rotates)} entries, num_hidden_layers is {count}")
    return rotates


def _default_types(hf: Config) -> list[str]:
    """The type of each layer ("sliding_attention" or "full_attention") by the config.json `hf`: layers without rotary
    positions slide if use_sliding_window is true and sliding_window is not null; all others have full attention. Raises
    ValueError for another number of entries in no_rope_layers than layers. It is the LayerTypes.default of FAMILY, for
    a file without layer_types."""
    slides = hf["use_sliding_window"] and hf["sliding_window"] is not None
    return [SLIDING if slides and not rotates else FULL for rotates in _rotates(hf)]


class _Layers(LayerTypes):
    """The entry of SmolLM3's table (key.Entry) for the key layer_types: LayerTypes, in which no_rope_layers, and not
    the type, decides which layers have rotary positions."""

    def read(self, hf: Config, fields: Config) -> Fields:
        """{"layers": LayerSpecs by the types of the config.json `hf`, without a rotary base where `_rotates` has a 0}.
        fields: the fields of DecoderConfig that earlier entries set, of which it uses `layers` and `rotary`. Raises
        ValueError for unknown types, sliding layers although sliding_window is null or 0, or lists of another length
        than there are layers."""
        layers = zip(super().read(hf, fields)["layers"], _rotates(hf), strict=True)
        return {"layers": tuple(dataclasses.replace(one, rotary=0 if rotates else None) for one, rotates in layers)}

    def write(self, config: DecoderConfig) -> Fields:
        """{"layer_types": ..., "sliding_window": ...} for the config.json of `config`; another entry writes
        no_rope_layers, so layers are described here as if all had rotary positions. Some layers may have
        a window and others none. Raises ValueError for windows of different lengths, or a layer whose mixer is not
        attention."""
        layers = tuple(dataclasses.replace(layer, rotary=0) for layer in config.layers)
        return super().write(dataclasses.replace(config, layers=layers))


FAMILY = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    (
        ATTENTION_BIAS,
        MLP_BIAS,
        Key("no_rope_layer_interval", (), values.whole, 4),
        Key(
            "no_rope_layers",
            (),
            functools.partial(values.items, of=_bit),
            None,
            written=lambda config: [int(layer.rotary is not None) for layer in config.layers],
        ),
        WINDOW_SWITCH,
        _Layers(_default_types, needs_window=False),
    ),
    defaults={"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True},
)
