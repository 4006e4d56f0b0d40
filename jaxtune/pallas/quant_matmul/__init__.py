"""y = x W^T + scale (x A^T) B^T for one to n weights that share x, each stored as an array or in few bits."""

from jaxtune.pallas.quant_matmul.api import LoraWeights, decoded, in_e4m3, quant_matmul

__all__ = ["LoraWeights", "decoded", "in_e4m3", "quant_matmul"]
