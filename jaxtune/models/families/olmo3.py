"""OLMo 3: OLMo 2 with a window in three of four layers, by default. An extension of the rotary base, such as yarn,
applies only to layers without a window.
"""

from __future__ import annotations

from jaxtune.models.config import POST_NORM
from jaxtune.models.families.common import Config, Family, Fields, LayerType, LayerTypes, RotaryByType
from jaxtune.models.families.common.layers import FULL, by_pattern
from jaxtune.models.families.common.names import POST_NORMS
from jaxtune.models.families.common.rope import SLIDING, by_type
from jaxtune.models.families.common.table import ATTENTION_BIAS, WINDOW_PATTERN


class _Rotary(RotaryByType):
    def parameters_of_type(self, layer_type: str, hf: Config) -> Fields:
        """Sliding layers get the base alone, unless rope_parameters has an object for them."""
        parameters = super().parameters_of_type(layer_type, hf)
        if layer_type == SLIDING and SLIDING not in by_type(hf["rope_parameters"]):
            # The file has one object for all layers, whose extension applies to full layers only.
            return {"rope_theta": parameters["rope_theta"], "rope_type": "default"}
        return parameters


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
