"""y = x W^T + scale (x A^T) B^T for one to n weights that share x, each stored as an array or in few bits."""

from jaxtune.pallas.quant_matmul.api import LoraWeights, decoded, quant_matmul
from jaxtune.pallas.quant_matmul.formats import FP4, NF4, FourBit, dense
from jaxtune.pallas.quant_matmul.mxfp4 import MXFP4

__all__ = ["FP4", "MXFP4", "NF4", "FourBit", "LoraWeights", "decoded", "dense", "quant_matmul"]
