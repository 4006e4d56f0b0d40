"""Shapes (out, in) of linears in real models, WEIGHTS. The benchmark of quant_matmul measures kernels for them, and its
tests check that the kernels for few tokens find sizes for each (row_matmul.plan, line_matmul.tiles)."""

# Llama-3.1-8B: gate and up; down; o. Qwen3-14B: down.
WEIGHTS = [(14336, 4096), (4096, 14336), (4096, 4096), (5120, 17408)]
