"""Granite 3 and 4 (dense): Llama with factors on the embedding, attention scores, residual additions and logits."""

from jaxtune.models import values
from jaxtune.models.families.common import FLOAT, Conversion, Family, Key
from jaxtune.models.families.common.table import ATTENTION_BIAS, MLP_BIAS

# 14 digits give the divisor that was read, not one rounded twice.
_DIVISOR = Conversion(lambda scaling: 1.0 / scaling, lambda scale: float(f"{1.0 / scale:.14g}"))

FAMILY = Family(
    "granite",
    "GraniteForCausalLM",
    (
        ATTENTION_BIAS,
        MLP_BIAS,
        Key("attention_multiplier", "attention_scale", values.positive, 1.0, conversion=FLOAT),
        Key("embedding_multiplier", "embedding_scale", values.positive, 1.0, conversion=FLOAT),
        Key("residual_multiplier", "residual_scale", values.positive, 1.0, conversion=FLOAT),
        Key("logits_scaling", "logit_scale", values.positive, 1.0, conversion=_DIVISOR),
    ),
)
