"""y = x W^T + scale (x A^T) B^T for one or several weights that share x, each an array or quantised."""

from jaxtune.pallas.quant_matmul.api import LoraWeights, decoded, in_e4m3, quant_matmul

__all__ = ["LoraWeights", "decoded", "in_e4m3", "quant_matmul"]
