"""Gemma 2: norms before and after attention and MLP, soft caps, windows in every other layer, a scaled embedding."""

from jaxtune.models import values
from jaxtune.models.config import PRE_AND_POST_NORM
from jaxtune.models.families.common import Family, Key, LayerTypes
from jaxtune.models.families.common.layers import alternating
from jaxtune.models.families.common.names import GEMMA_NORMS
from jaxtune.models.families.common.table import GEMMA, GEMMA_DEFAULTS, GEMMA_FIELDS

FAMILY = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    (
        *GEMMA,
        Key("attn_logit_softcapping", "attention_soft_cap", values.positive, 50.0, null=None),
        LayerTypes(alternating),
    ),
    defaults=GEMMA_DEFAULTS | {"final_logit_softcapping": 30.0},
    fields=GEMMA_FIELDS,
    stages=PRE_AND_POST_NORM,
    norms=GEMMA_NORMS,
)
