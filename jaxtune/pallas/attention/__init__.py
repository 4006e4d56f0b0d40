"""Packed causal attention: a row may hold several documents and padding, and a token sees only itself and the tokens
before it in its document. The Mosaic and Triton kernels skip the blocks that no token sees, so their cost follows from
the documents and the window, not from the length of the rows. `attention` is differentiable. Code that saves residuals
itself, such as the layers of a model, calls attention_forward and attention_backward, which compute its result and its
gradients separately. Each takes a PackedLayout, the bounds of the documents in the rows, which packed_layout makes of
segment ids. api.py chooses among four implementations: cuDNN, Mosaic, Triton and plain JAX."""

from jaxtune.pallas.attention.api import attention, attention_backward, attention_forward
from jaxtune.pallas.attention.layout import PackedLayout, packed_layout

__all__ = [
    "PackedLayout",
    "attention",
    "attention_backward",
    "attention_forward",
    "packed_layout",
]
