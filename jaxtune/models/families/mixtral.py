"""Mixtral: Mistral with experts (eight by default) instead of the MLP, and with a window only if the file has one."""

from jaxtune.models.families.common import ExpertFiles, Family, OneWindow
from jaxtune.models.families.common.names import ROUTED_NORMS
from jaxtune.models.families.common.table import local_experts

FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    (OneWindow(), local_experts()),
    defaults={
        "num_key_value_heads": 8,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
    refused=("router_jitter_noise",),
    norms=ROUTED_NORMS,
    expert_files=ExpertFiles("block_sparse_moe", "w1", "w3", "w2"),
)
