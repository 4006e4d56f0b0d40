"""Packed causal attention: a row may hold several documents and padding, and a token sees only itself and the tokens
before it in its document. The cost of the kernels depends only on what each token can see. `attention` is
differentiable. Code that saves residuals itself calls attention_forward and attention_backward, which compute its
result and its gradients separately. Each takes a PackedLayout, the bounds of the documents in the rows, which
packed_layout makes of segment ids."""

from jaxtune.pallas.attention.api import attention, attention_backward, attention_forward
from jaxtune.pallas.attention.layout import PackedLayout, packed_layout

__all__ = [
    "PackedLayout",
    "attention",
    "attention_backward",
    "attention_forward",
    "packed_layout",
]
