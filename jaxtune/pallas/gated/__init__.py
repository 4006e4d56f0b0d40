"""Gated activations and their backward. `gated_backward` is the backward of an MLP's activation(gate) * up, for which a
kernel writes the results over the memory of its arguments if it supports the call; the backward of a layer's MLP calls
it, at the peak of a training step's memory. `gated_thin` and `gated_thin_backward` are forward and backward
with the thin products that the down projection's adapter needs, and `thin_of_gated` is the forward's product alone.
`gated_rows_backward` is the backward of experts, whose rows have weights and whose form a RowGate says; `gated_rows` is
their forward. ACTIVATIONS: {name: the activation as a JAX function}."""

from jaxtune.pallas.gated.api import gated_backward, gated_rows_backward, in_place
from jaxtune.pallas.gated.reference import ACTIVATIONS, RowGate, gated_rows
from jaxtune.pallas.gated.thin import gated_thin, gated_thin_backward, thin_of_gated

__all__ = [
    "ACTIVATIONS",
    "RowGate",
    "gated_backward",
    "gated_rows",
    "gated_rows_backward",
    "gated_thin",
    "gated_thin_backward",
    "in_place",
    "thin_of_gated",
]
