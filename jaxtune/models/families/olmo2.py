"""OLMo 2: norms only on the outputs of attention and MLP; queries and keys normed over the whole projection."""

from jaxtune.models.config import POST_NORM
from jaxtune.models.families.common import Family
from jaxtune.models.families.common.names import POST_NORMS
from jaxtune.models.families.common.table import ATTENTION_BIAS

FAMILY = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    (ATTENTION_BIAS,),
    defaults={"rms_norm_eps": 1e-5},
    fields={"qk_norm": "projection", "float32_norm": True},
    stages=POST_NORM,
    norms=POST_NORMS,
)
