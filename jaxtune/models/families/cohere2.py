"""Command R7B and Command A: attention and MLP in parallel, LayerNorm without bias, scaled logits.

By default three of four layers have a window and interleaved rotary positions; the others have neither. transformers
computes head_dim as hidden_size / num_attention_heads, whatever config.json says, so `_prepare` does so on reading, and
`_head_dim` refuses another value on writing.

FAMILY, which models/registry.py lists by its model_type, declares how their config.json is checked, read and written,
and how checkpoints name their tensors.
"""

from __future__ import annotations

from jaxtune.models import values
from jaxtune.models.config import PARALLEL, DecoderConfig
from jaxtune.models.families.common import FLOAT, Config, Family, Key, LayerType, LayerTypes
from jaxtune.models.families.common.layers import SLIDING, by_pattern
from jaxtune.models.families.common.rope import FULL
from jaxtune.models.families.common.table import ATTENTION_BIAS, WINDOW_PATTERN


def _prepare(hf: Config) -> Config:
    """A copy of the config.json `hf` in which head_dim is hidden_size // num_attention_heads, because transformers
    ignores the file's. It is the Family.prepare of FAMILY, called before the entries read the keys."""
    return {**hf, "head_dim": hf["hidden_size"] // hf["num_attention_heads"]}


def _head_dim(config: DecoderConfig) -> int:
    """The value of head_dim that is written to config.json (for Key.written); raises ValueError if it is not
    hidden_size / num_attention_heads, which transformers would use instead of it."""
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
