"""Which expert gets which token: choosing, sorting into groups, and the way back."""

from jaxtune.pallas.routing.api import (
    Routing,
    choose_experts,
    expert_weights,
    load_balancing_loss,
    permute,
    route,
    router_z_loss,
    row_weights,
    unpermute,
)

__all__ = [
    "Routing", "choose_experts", "expert_weights", "load_balancing_loss", "permute", "route", "router_z_loss",
    "row_weights", "unpermute",
]  # fmt: skip
