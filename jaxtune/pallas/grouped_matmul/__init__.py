"""Products of rows sorted by expert with the experts' weights, with LoRA adapters and biases. Products that take tokens
in place of sorted rows are in jaxtune.pallas.routing.
"""

from jaxtune.pallas.grouped_matmul.api import (
    GroupedLora,
    filled_adapter,
    fills_adapters,
    grouped_bias,
    grouped_matmul,
    implementations,
)
from jaxtune.pallas.grouped_matmul.layout import TILE_ROWS, Groups

__all__ = [
    "TILE_ROWS",
    "GroupedLora",
    "Groups",
    "filled_adapter",
    "fills_adapters",
    "grouped_bias",
    "grouped_matmul",
    "implementations",
]
