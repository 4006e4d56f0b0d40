"""The backward of an MLP's gated activation, activation(gate) * up: gated_backward, which a kernel computes over the
memory of its arguments if it supports the call; and ACTIVATIONS, the activations by name."""

from jaxtune.pallas.gated.api import gated_backward
from jaxtune.pallas.gated.reference import ACTIVATIONS

__all__ = ["ACTIVATIONS", "gated_backward"]
