"""Gated activations, such as an MLP's activation(gate) * up, and their backward.

`gated_backward` computes the gradients of gate and up. Its kernel writes them over the memory of gate and up.
`gated_thin` computes the activation and its product with the A of the down projection's adapter; `thin_of_gated`
computes that product alone; `gated_thin_backward` computes the gradients of gate, up and A. `gated_rows` and
`gated_rows_backward` are the forward and the backward of experts, whose rows have weights; a RowGate says how their
rows are gated. ACTIVATIONS is {name: the activation as a JAX function}."""

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
