"""SmolLM3: Llama in which some layers, by default every fourth, have no position encoding."""

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
    """For each layer 1 if it has rotary positions, else 0: despite its name the content of no_rope_layers."""
    count, every = hf["num_hidden_layers"], hf["no_rope_layer_interval"]
    rotates = hf["no_rope_layers"] or [int((index + 1) % every != 0) for index in range(count)]
    if len(rotates) != count:
        raise ValueError(f"config.json: no_rope_layers has {len(rotates)} entries, num_hidden_layers is {count}")
    return rotates


def _default_types(hf: Config) -> list[str]:
    """Layers without rotary positions slide if use_sliding_window is true and there is a window."""
    slides = hf["use_sliding_window"] and hf["sliding_window"] is not None
    return [SLIDING if slides and not rotates else FULL for rotates in _rotates(hf)]


class _Layers(LayerTypes):
    """LayerTypes, in which no_rope_layers, and not the type, decides which layers have rotary positions."""

    def read(self, hf: Config, fields: Config) -> Fields:
        layers = zip(super().read(hf, fields)["layers"], _rotates(hf), strict=True)
        return {"layers": tuple(dataclasses.replace(layer, rotary=0 if rotates else None) for layer, rotates in layers)}

    def write(self, config: DecoderConfig) -> Fields:
        """Layers are described as if all had rotary positions, because another entry writes no_rope_layers."""
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
            functools.partial(values.items, check=_bit),
            None,
            written=lambda config: [int(layer.rotary is not None) for layer in config.layers],
        ),
        WINDOW_SWITCH,
        _Layers(_default_types, needs_window=False),
    ),
    defaults={"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True},
)
