"""GLM-4-0414: norms before and after attention and MLP, fused gate and up, interleaved rotation of half a head."""

from jaxtune.models import values
from jaxtune.models.config import PRE_AND_POST_NORM
from jaxtune.models.families.common import Family, Key
from jaxtune.models.families.common.rope import PARTIAL_ROTARY

FAMILY = Family(
    "glm4",
    "Glm4ForCausalLM",
    (Key("attention_bias", "qkv_bias", values.boolean, True), PARTIAL_ROTARY),
    defaults={"num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7},
    fields={"fused_gate_up": True, "interleaved_rotary": True},
    stages=PRE_AND_POST_NORM,
    norms={
        "mixer_norm": "input_layernorm",
        "mixer_post_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_mlp_layernorm",
    },
)
