"""Routing of tokens to experts in a mixture of experts: choosing experts and their weights, sorting tokens into groups
of rows by expert, products with experts of rows that are gathered from tokens or summed back to them, undoing the
sort, and the sums for the losses that balance the choice."""

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
