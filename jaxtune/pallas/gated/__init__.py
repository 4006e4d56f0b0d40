"""The backward of an MLP's gated activation, computed in place if the kernel supports the call."""

from jaxtune.pallas.gated.api import gated_backward
from jaxtune.pallas.gated.reference import ACTIVATIONS

__all__ = ["ACTIVATIONS", "gated_backward"]
