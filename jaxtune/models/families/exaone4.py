"""EXAONE 4: norms on the outputs of attention and MLP, and on each head's queries and keys. With a window
(sliding_window; 4096 if the key is missing), full layers have no position encoding; with null, all layers are full and
have one.
"""

from __future__ import annotations

from jaxtune.models.config import POST_NORM, DecoderConfig
from jaxtune.models.families.common import Config, Family, Fields, LayerType, LayerTypes
from jaxtune.models.families.common.layers import SLIDING, by_pattern
from jaxtune.models.families.common.names import POST_NORMS
from jaxtune.models.families.common.rope import FULL
from jaxtune.models.families.common.table import WINDOW_PATTERN


def _default_types(hf: Config) -> list[str]:
    return by_pattern(hf) if hf["sliding_window"] is not None else [FULL] * hf["num_hidden_layers"]


class _Layers(LayerTypes):
    """LayerTypes, in which all layers have full attention and rotary positions if sliding_window is null."""

    def read(self, hf: Config, fields: Config) -> Fields:
        read = super().read(hf, fields)
        return read if hf["sliding_window"] is not None else {}

    def write(self, config: DecoderConfig) -> Fields:
        """The window is null if all layers are full with rotary positions: `read` takes full layers beside one as
        without.
        """
        if all(layer.window is None and layer.rotary == 0 for layer in config.layers):
            return {"sliding_window": None, "layer_types": [FULL] * config.num_layers}
        return super().write(config)


FAMILY = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    (WINDOW_PATTERN, _Layers(_default_types, (LayerType(FULL, rotary=None), SLIDING))),
    defaults={
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    fields={"qk_norm": "head"},
    stages=POST_NORM,
    norms=POST_NORMS,
)
