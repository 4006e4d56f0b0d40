"""EXAONE 4: norms on the outputs of attention and MLP, and on each head's queries and keys.

If config.json gives a window (sliding_window; 4096 if the key is missing), the layers with full attention have no
position encoding; with null for it, all layers have full attention and rotary positions. `_Layers` reads and writes
layer_types so.

FAMILY, which models/registry.py lists by its model_type, declares how their config.json is checked, read and written,
and how checkpoints name their tensors.
"""

from __future__ import annotations

from jaxtune.models.config import POST_NORM, DecoderConfig
from jaxtune.models.families.common import Config, Family, Fields, LayerType, LayerTypes
from jaxtune.models.families.common.layers import SLIDING, by_pattern
from jaxtune.models.families.common.names import POST_NORMS
from jaxtune.models.families.common.rope import FULL
from jaxtune.models.families.common.table import WINDOW_PATTERN


def _default_types(hf: Config) -> list[str]:
    """The type of each layer ("sliding_attention" or "full_attention") by sliding_window_pattern of the config.json
    `hf`, or full attention everywhere if sliding_window is null. It is the LayerTypes.default of FAMILY, for a file
    without layer_types."""
    return by_pattern(hf) if hf["sliding_window"] is not None else [FULL] * hf["num_hidden_layers"]


class _Layers(LayerTypes):
    """The entry of EXAONE 4's table (key.Entry) for the key layer_types: LayerTypes, in which all layers have full
    attention and rotary positions if sliding_window is null in config.json."""

    def read(self, hf: Config, fields: Config) -> Fields:
        """{"layers": LayerSpecs by the types} of the config.json `hf`; {} if sliding_window is null, which leaves the
        layers as an earlier entry set them: with full attention and rotary positions. fields: the fields of
        DecoderConfig that are set so far. Raises ValueError for another number of types than layers, and types that the
        family does not have or that slide without a window."""
        read = super().read(hf, fields)
        return read if hf["sliding_window"] is not None else {}

    def write(self, config: DecoderConfig) -> Fields:
        """{"layer_types": ..., "sliding_window": ...} for the config.json of `config`. The window is null if every
        layer has full attention and rotary positions, because `read` takes full layers beside a window for layers
        without positions. Raises ValueError for layers that are of no type, or windows that differ."""
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
