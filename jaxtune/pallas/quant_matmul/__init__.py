"""Products of activations with the weights of linears, each an array or quantised, with adapters (LoraWeights), y = x
W^T + scale (x A^T) B^T: quant_matmul, for one or several weights that share x; gated_matmul, for an MLP's down
projection, whose x is activation(gate) * up, and gated_mlp, the same with the derivative of the whole MLP, for weights
that join; normed_matmul, for weights whose x is an RMS norm's result; decoded, for a weight as an array; and in_e4m3,
which rounds activations to FP8."""

from jaxtune.pallas.quant_matmul.api import LoraWeights, decoded, in_e4m3, quant_matmul
from jaxtune.pallas.quant_matmul.gated_matmul import gated_matmul, gated_mlp, joins
from jaxtune.pallas.quant_matmul.normed_matmul import normed_matmul

__all__ = ["LoraWeights", "decoded", "gated_matmul", "gated_mlp", "in_e4m3", "joins", "normed_matmul", "quant_matmul"]
