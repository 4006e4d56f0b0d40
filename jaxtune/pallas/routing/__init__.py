"""Routing of tokens to experts: their choice and weights, the sort into rows by expert, and products from tokens to
rows and back.
"""

from jaxtune.pallas.routing.api import (
    Routing,
    choose_experts,
    expert_weights,
    matmul_of_tokens,
    matmul_to_tokens,
    permute,
    route,
    row_weights,
    token_bias,
    unpermute,
)
from jaxtune.pallas.routing.gated import gated_to_tokens
from jaxtune.pallas.routing.losses import RouterSums, router_sums

__all__ = [
    "RouterSums",
    "Routing",
    "choose_experts",
    "expert_weights",
    "gated_to_tokens",
    "matmul_of_tokens",
    "matmul_to_tokens",
    "permute",
    "route",
    "router_sums",
    "row_weights",
    "token_bias",
    "unpermute",
]
