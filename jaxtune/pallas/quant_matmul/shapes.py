"""Shapes (out, in) of linears in real models, for benchmarks and tests."""

# Llama-3.1-8B: gate and up; down; o. Qwen3-14B: down.
WEIGHTS = [(14336, 4096), (4096, 14336), (4096, 4096), (5120, 17408)]
