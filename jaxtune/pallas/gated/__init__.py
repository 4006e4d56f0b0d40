"""Gated activations, such as an MLP's activation(gate) * up, and their backward, of MLPs and of experts."""

from jaxtune.pallas.gated.api import gated_backward, gated_rows_backward, in_place
from jaxtune.pallas.gated.reference import ACTIVATIONS, RowGate, activated, gated_rows
from jaxtune.pallas.gated.thin import gated_thin, gated_thin_backward, thin_of_gated

__all__ = [
    "ACTIVATIONS",
    "RowGate",
    "activated",
    "gated_backward",
    "gated_rows",
    "gated_rows_backward",
    "gated_thin",
    "gated_thin_backward",
    "in_place",
    "thin_of_gated",
]
