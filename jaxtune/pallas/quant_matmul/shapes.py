"""Shapes (out, in) of linears in real models, WEIGHTS, for which the benchmark of quant_matmul measures kernels and its
tests check which kernel is chosen."""

# Llama-3.1-8B: gate and up; down; o. Qwen3-32B's down is Qwen3-14B's shape (5,120 x 17,408).
WEIGHTS = [(14336, 4096), (4096, 14336), (4096, 4096), (5120, 17408)]
