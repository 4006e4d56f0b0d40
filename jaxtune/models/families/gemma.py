"""Gemma 1: Llama with a scaled embedding, norms around zero and heads of their own width."""

from __future__ import annotations

from jaxtune.models.families.common import Config, Family, Key
from jaxtune.models.families.common.table import ATTENTION_BIAS, GEMMA_FIELDS, check_activation


def _prepare(hf: Config) -> Config:
    """The first releases say gelu and mean its tanh form; hidden_activation comes before hidden_act."""
    name = hf["hidden_activation"] or hf["hidden_act"]
    return {**hf, "hidden_act": "gelu_pytorch_tanh" if name == "gelu" else name}


FAMILY = Family(
    "gemma",
    "GemmaForCausalLM",
    (ATTENTION_BIAS, Key("hidden_activation", (), check_activation, None)),
    defaults={
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    fields=GEMMA_FIELDS,
    prepare=_prepare,
)
