"""The gated activation of an MLP: its backward, in place where a kernel serves."""

from jaxtune.pallas.gated.api import gated_backward
from jaxtune.pallas.gated.reference import ACTIVATIONS

__all__ = ["ACTIVATIONS", "gated_backward"]
