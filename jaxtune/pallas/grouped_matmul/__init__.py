"""Products of rows sorted by expert with the experts' weights and their adapters: grouped_matmul and grouped_bias, the
layout of the sorted rows (Groups), and the adapters (GroupedLora)."""

from jaxtune.pallas.grouped_matmul.api import GroupedLora, grouped_bias, grouped_matmul, implementations
from jaxtune.pallas.grouped_matmul.layout import TILE_ROWS, Groups

__all__ = ["TILE_ROWS", "GroupedLora", "Groups", "grouped_bias", "grouped_matmul", "implementations"]
