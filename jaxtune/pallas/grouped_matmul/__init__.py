"""Products of rows sorted by expert with the experts' weights: `grouped_matmul`, with LoRA adapters (`GroupedLora`),
and `grouped_bias`, which adds biases. `Groups` is the layout of the sorted rows, in tiles of TILE_ROWS rows.
`implementations` says which implementations support a call. `fills_adapters` says whether every product would cast and
pad its adapters again, which a sampler does only once, by `filled_adapter`. Layers of experts mostly multiply by the
products of jaxtune.pallas.routing, which take tokens and call the parts of `grouped_matmul`."""

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
