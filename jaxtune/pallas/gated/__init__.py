"""The backward of an MLP's gated activation, activation(gate) * up: `gated_backward`, for which a kernel writes the
results over the memory of its arguments if it supports the call; and ACTIVATIONS, {name: the activation as a JAX
function}. The backward of a layer's MLP calls `gated_backward`, at the peak of a training step's memory."""

from jaxtune.pallas.gated.api import gated_backward
from jaxtune.pallas.gated.reference import ACTIVATIONS

__all__ = ["ACTIVATIONS", "gated_backward"]
