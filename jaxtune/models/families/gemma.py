"""Gemma 1: Llama with a scaled embedding, norms that multiply by 1 + weight, and a separate head size."""

from __future__ import annotations

from jaxtune.models.families.common import Config, Family, Key
from jaxtune.models.families.common.table import ATTENTION_BIAS, GEMMA_FIELDS, check_activation


def _prepare(hf: Config) -> Config:
    """Sets hidden_act: hidden_activation takes precedence, and "gelu" in either means its tanh form."""
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
