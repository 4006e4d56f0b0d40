"""The kernels of mosaic.py, but every product that the fused kernel can make is made by it: an explicit choice.

It has not been measured yet; mosaic.py takes the fused kernel only where a measurement says so.
"""

from __future__ import annotations

from jaxtune.pallas.quant_matmul import fused_matmul
from jaxtune.pallas.quant_matmul.formats import FourBit
from jaxtune.pallas.quant_matmul.mosaic import (
    dequantize,
    fused_product,
    fused_refusal,
    refusal,
    small_matmul,
    small_refusal,
)

__all__ = ["dequantize", "fused_product", "fused_tile", "refusal", "small_matmul", "small_refusal"]


def fused_tile(weight: FourBit, dtype, tokens: int, contract: int) -> fused_matmul.Tile | None:
    """The first tile with which `fused_product` can make this product, or None."""
    if weight.ndim != 2:
        return None
    candidates = fused_matmul.tiles(weight, contract, tokens)
    return next((tile for tile in candidates if fused_refusal(tile, weight, dtype, contract) is None), None)
