"""Packed causal attention whose cost depends only on what each token can see. `attention` is differentiable;
attention_forward and attention_backward are its two halves, for code that keeps residuals itself. Each takes a
PackedLayout, the bounds of the documents in the rows, which packed_layout makes of segment ids."""

from jaxtune.pallas.attention.api import attention, attention_backward, attention_forward
from jaxtune.pallas.attention.layout import PackedLayout, packed_layout

__all__ = [
    "PackedLayout",
    "attention",
    "attention_backward",
    "attention_forward",
    "packed_layout",
]
