"""Packed causal attention whose cost depends only on what each token can see."""

from jaxtune.pallas.attention.api import attention, attention_backward, attention_forward
from jaxtune.pallas.attention.layout import PackedLayout, packed_layout

__all__ = [
    "PackedLayout",
    "attention",
    "attention_backward",
    "attention_forward",
    "packed_layout",
]
