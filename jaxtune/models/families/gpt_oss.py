"""gpt-oss: experts with biases and a clamped SwiGLU of interleaved columns, attention sinks, windows in every other
layer. Expert weights are [E, in, out] in the model and in 16-bit files; the published MXFP4 files have [E, out, in],
which is transposed when decoded.
"""

from jaxtune.models import values
from jaxtune.models.families.common import Family, Key, LayerTypes, Rotary
from jaxtune.models.families.common.layers import alternating
from jaxtune.models.families.common.table import ATTENTION_BIAS, local_experts

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_EXPERTS = local_experts(
    Key("swiglu_limit", "swiglu_limit", values.positive, 7.0),
    Key("swiglu_alpha", "swiglu_alpha", values.number, 1.702),
    router_bias=True,
    expert_bias=True,
    transposed=True,
    interleaved=True,
)
FAMILY = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    (ATTENTION_BIAS, Rotary(_ROPE), LayerTypes(alternating), _EXPERTS),
    defaults={
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "attention_bias": True,
        "rope_theta": 150000.0,
    },
    fields={"attention_sinks": True, "float32_norm": True},
)
