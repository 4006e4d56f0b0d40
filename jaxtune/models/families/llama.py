"""Llama 2, 3, 3.1, 3.2, and the many models with its architecture."""

from jaxtune.models.families.common import Family
from jaxtune.models.families.common.table import ATTENTION_BIAS, MLP_BIAS

FAMILY = Family("llama", "LlamaForCausalLM", (ATTENTION_BIAS, MLP_BIAS), written={"pretraining_tp": 1})
