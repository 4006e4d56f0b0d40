"""Routing of tokens to experts in a mixture of experts: choosing experts (choose_experts) and their weights
(expert_weights), sorting tokens into groups of rows by expert (route, which returns a Routing), products with experts
that include the copy of tokens to these rows (matmul_of_tokens) or the sum of each token's rows (matmul_to_tokens; with
the gated activation before it gated_to_tokens), the weights of rows (row_weights), the bias of the product that sums
(token_bias), and the sums for the router's losses (router_sums, RouterSums). Layers of experts in models/layers call
these functions. The copy (permute) and the sum (unpermute) without a product are for tests alone."""

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
