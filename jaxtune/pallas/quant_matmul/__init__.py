"""Products of activations with the weights of linears, each an array or quantised, with adapters: y = x W^T + scale (x
A^T) B^T.
"""

from jaxtune.pallas.quant_matmul.api import decoded, in_e4m3, quant_matmul
from jaxtune.pallas.quant_matmul.coded import few_product
from jaxtune.pallas.quant_matmul.gated_matmul import gated_matmul, gated_mlp, joins
from jaxtune.pallas.quant_matmul.lora_weights import LoraWeights
from jaxtune.pallas.quant_matmul.normed_matmul import normed_matmul

__all__ = [
    "LoraWeights",
    "decoded",
    "few_product",
    "gated_matmul",
    "gated_mlp",
    "in_e4m3",
    "joins",
    "normed_matmul",
    "quant_matmul",
]
