"""Seed-OSS: Llama with biases on q, k and v, and optionally on the output projection (attention_out_bias)."""

from jaxtune.models import values
from jaxtune.models.families.common import Family, Key
from jaxtune.models.families.common.table import MLP_BIAS

FAMILY = Family(
    "seed_oss",
    "SeedOssForCausalLM",
    (
        Key("attention_bias", "qkv_bias", values.boolean, True),
        Key("attention_out_bias", "out_bias", values.boolean, False),
        MLP_BIAS,
    ),
    defaults={"num_key_value_heads": 8, "head_dim": 128},
    written={"residual_dropout": 0.0},
)
