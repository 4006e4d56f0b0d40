"""Packed causal attention: a row may hold several documents and padding, and a token sees itself and the earlier tokens
of its document. The kernels skip blocks that no token sees, so cost follows documents and window, not the rows' length.
"""

from jaxtune.pallas.attention.api import attention, attention_backward, attention_forward
from jaxtune.pallas.attention.layout import PackedLayout, packed_layout

__all__ = [
    "PackedLayout",
    "attention",
    "attention_backward",
    "attention_forward",
    "packed_layout",
]
