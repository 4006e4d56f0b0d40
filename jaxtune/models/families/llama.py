"""Llama 2, 3, 3.1, 3.2, and the many models with its architecture.

FAMILY, which models/registry.py lists by its model_type, declares how their config.json is checked, read and written,
and how checkpoints name their tensors.
"""

from jaxtune.models.families.common import Family
from jaxtune.models.families.common.table import ATTENTION_BIAS, MLP_BIAS

FAMILY = Family("llama", "LlamaForCausalLM", (ATTENTION_BIAS, MLP_BIAS), written={"pretraining_tp": 1})
