"""Products of rows sorted by expert with the experts' weights: `grouped_matmul`, with LoRA adapters (`GroupedLora`),
and `grouped_bias`, which adds biases. `Groups` is the layout of the sorted rows, in tiles of TILE_ROWS rows.
`implementations` says which implementations support a call, and `fills_adapters` whether it copies adapters."""

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
