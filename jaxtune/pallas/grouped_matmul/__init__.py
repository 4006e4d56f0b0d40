"""Products of rows sorted by expert with the experts' weights, with LoRA adapters and biases. Products that take tokens
in place of sorted rows are in jaxtune.pallas.routing.
"""

from jaxtune.pallas.grouped_matmul.api import (
    GroupedLora,
    grouped_bias,
    grouped_matmul,
    implementations,
    padded_adapter,
    pads_adapters,
)
from jaxtune.pallas.grouped_matmul.layout import TILE_ROWS, Groups

__all__ = [
    "TILE_ROWS",
    "GroupedLora",
    "Groups",
    "padded_adapter",
    "pads_adapters",
    "grouped_bias",
    "grouped_matmul",
    "implementations",
]
