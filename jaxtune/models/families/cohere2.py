"""Command R7B and Command A: attention and MLP in parallel, LayerNorm without bias, scaled logits. By default three of
four layers have a window and interleaved rotary positions; the others have neither.
"""

from __future__ import annotations

from jaxtune.models import values
from jaxtune.models.config import PARALLEL, DecoderConfig
from jaxtune.models.families.common import FLOAT, Config, Family, Key, LayerType, LayerTypes
from jaxtune.models.families.common.layers import SLIDING, by_pattern
from jaxtune.models.families.common.rope import FULL
from jaxtune.models.families.common.table import ATTENTION_BIAS, WINDOW_PATTERN


def _prepare(hf: Config) -> Config:
    """Computes head_dim, because transformers ignores the file's."""
    return {**hf, "head_dim": hf["hidden_size"] // hf["num_attention_heads"]}


def _head_dim(config: DecoderConfig) -> int:
    """Refuses a value that transformers would ignore."""
    if config.query_size != config.hidden_size:
        raise ValueError(f"Cohere2: head_dim = {config.head_dim} is not hidden_size / num_attention_heads")
    return config.head_dim


FAMILY = Family(
    "cohere2",
    "Cohere2ForCausalLM",
    (
        ATTENTION_BIAS,
        Key("head_dim", "head_dim", values.whole, None, written=_head_dim),
        Key("layer_norm_eps", "norm_eps", values.positive, 1e-5),
        Key("logit_scale", "logit_scale", values.positive, 0.0625, conversion=FLOAT),
        WINDOW_PATTERN,
        LayerTypes(by_pattern, (LayerType(FULL, rotary=None), SLIDING)),
    ),
    defaults={"sliding_window": 4096, "sliding_window_pattern": 4, "tie_word_embeddings": True},
    fields={"centred_norm": True, "interleaved_rotary": True},
    refused=("use_qk_norm",),
    prepare=_prepare,
    stages=PARALLEL,
    norms={"mixer_norm": "input_layernorm"},
)
