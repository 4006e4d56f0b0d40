"""Gemma 3, the text model: five sliding layers before each full one, a rotary base for each type, normed q and k."""

from __future__ import annotations

from jaxtune.models.config import PRE_AND_POST_NORM, DecoderConfig
from jaxtune.models.families.common import Config, Family, Fields, Key, LayerType, LayerTypes, Rotary, RotaryByType
from jaxtune.models.families.common.gemma3_vision import gemma3_tower
from jaxtune.models.families.common.layers import FULL, by_pattern
from jaxtune.models.families.common.names import GEMMA_NORMS
from jaxtune.models.families.common.rope import SLIDING, above_one, by_type, rope_parameters
from jaxtune.models.families.common.table import GEMMA, GEMMA_DEFAULTS, GEMMA_FIELDS, WINDOW_PATTERN


class _Rotary(RotaryByType):
    """RotaryByType, with rope_theta and rope_scaling of full layers and rope_local_base_freq of sliding ones."""

    keys = (*RotaryByType.keys, Key("rope_local_base_freq", (), above_one, 10_000.0))

    def parameters_of_type(self, layer_type: str, hf: Config) -> Fields:
        """Parameters of rope_parameters outside an object for a type of layer are ignored, as in transformers."""
        parameters = by_type(hf["rope_parameters"])
        hf = {**hf, "rope_parameters": parameters}
        if layer_type == SLIDING:
            hf = {"rope_theta": hf["rope_local_base_freq"], "rope_parameters": parameters}
        return rope_parameters(hf, layer_type)

    def write(self, config: DecoderConfig) -> Fields:
        """Raises ValueError for an extended base of sliding layers, which rope_local_base_freq cannot express."""
        sliding = config.rotary[1]
        if sliding.kind != "default":
            raise ValueError(
                f"Gemma 3: the rotary base of sliding layers has kind {sliding.kind!r}; only 'default' is saved"
            )
        return Rotary.write(self, config) | {"rope_local_base_freq": sliding.theta}


FAMILY = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    (
        *GEMMA,
        WINDOW_PATTERN,
        _Rotary(),
        LayerTypes(by_pattern, (FULL, LayerType(SLIDING, window=True, rotary=1))),
    ),
    defaults=GEMMA_DEFAULTS
    | {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
    },
    fields=GEMMA_FIELDS | {"qk_norm": "head"},
    written={"attn_logit_softcapping": None},
    stages=PRE_AND_POST_NORM,
    norms=GEMMA_NORMS,
    text_of=("gemma3",),
    tower=gemma3_tower,
)
