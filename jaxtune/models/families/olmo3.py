"""OLMo 3: OLMo 2 with a window in three of four layers, by default. If the file extends the rotary base of all layers
alike, such as by yarn, this applies only to the layers without a window (`_Rotary`).

FAMILY, which models/registry.py lists by its model_type, declares how their config.json is checked, read and written,
and how checkpoints name their tensors.
"""

from __future__ import annotations

from jaxtune.models.config import POST_NORM
from jaxtune.models.families.common import Config, Family, Fields, LayerType, LayerTypes, RotaryByType
from jaxtune.models.families.common.layers import FULL, by_pattern
from jaxtune.models.families.common.names import POST_NORMS
from jaxtune.models.families.common.rope import SLIDING
from jaxtune.models.families.common.table import ATTENTION_BIAS, WINDOW_PATTERN


class _Rotary(RotaryByType):
    """The entry of OLMo 3's table (key.Entry) for its two rotary bases: RotaryByType, in which an extension that a file
    gives for all layers applies to full layers only."""

    def given_to(self, layer_type: str, hf: Config) -> Fields:
        """The rotary parameters of one type of layer as one flat dict, as `rope_parameters` returns it. Sliding layers
        get the base alone, {"rope_theta": ..., "rope_type": "default"}, without an extension, unless rope_parameters
        has an object for them. layer_type: "full_attention" or "sliding_attention". hf: the config.json."""
        given = super().given_to(layer_type, hf)
        if layer_type == SLIDING and not isinstance((hf["rope_parameters"] or {}).get(SLIDING), dict):
            # The file has one object for all layers, whose extension applies to full layers only.
            return {"rope_theta": given["rope_theta"], "rope_type": "default"}
        return given


FAMILY = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    (
        ATTENTION_BIAS,
        WINDOW_PATTERN,
        _Rotary(),
        LayerTypes(by_pattern, (FULL, LayerType(SLIDING, window=True, rotary=1))),
    ),
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096, "sliding_window_pattern": 4},
    fields={"qk_norm": "projection", "float32_norm": True},
    stages=POST_NORM,
    norms=POST_NORMS,
)
