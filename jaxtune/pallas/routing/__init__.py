"""Routing of tokens to experts: choosing experts, sorting tokens into groups, undoing the sort, and the losses that
balance the choice."""

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
from jaxtune.pallas.routing.losses import RouterSums, router_sums

__all__ = [
    "RouterSums",
    "Routing",
    "choose_experts",
    "expert_weights",
    "matmul_of_tokens",
    "matmul_to_tokens",
    "permute",
    "route",
    "router_sums",
    "row_weights",
    "token_bias",
    "unpermute",
]
