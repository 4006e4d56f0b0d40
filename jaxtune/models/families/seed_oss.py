"""Seed-OSS: Llama with biases on q, k and v, unless attention_bias in config.json is false; attention_out_bias says
whether the output projection has one too, by default not.

FAMILY, which models/registry.py lists by its model_type, declares how their config.json is checked, read and written,
and how checkpoints name their tensors.
"""

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
