"""Shapes of published models by their short names. Weights are made at random on the device."""

from jaxtune.models.files.published import PUBLISHED

SHAPES = {
    "llama-3.1-8b": PUBLISHED["meta-llama/Llama-3.1-8B-Instruct"],
    "llama-3.2-3b": PUBLISHED["meta-llama/Llama-3.2-3B-Instruct"],
    "llama-3.2-1b": PUBLISHED["meta-llama/Llama-3.2-1B-Instruct"],
    "llama-3.3-70b": PUBLISHED["meta-llama/Llama-3.1-8B-Instruct"]
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "qwen3-14b": PUBLISHED["Qwen/Qwen3-14B"],
    "qwen3-32b": PUBLISHED["Qwen/Qwen3-32B"],
    "qwen3-30b-a3b": PUBLISHED["Qwen/Qwen3-30B-A3B"],
    "qwen3.5-9b": PUBLISHED["Qwen/Qwen3.5-9B"],
    "qwen3.5-27b": PUBLISHED["Qwen/Qwen3.5-27B"],
    "qwen3.5-35b-a3b": PUBLISHED["Qwen/Qwen3.5-35B-A3B"],
    "gemma-4-e4b": PUBLISHED["google/gemma-4-E4B-it"],
    "gemma-4-12b": PUBLISHED["google/gemma-4-12B-it"],
    "gemma-4-26b-a4b": PUBLISHED["google/gemma-4-26B-A4B-it"],
    "gemma-4-31b": PUBLISHED["google/gemma-4-31B-it"],
    "gpt-oss-20b": PUBLISHED["openai/gpt-oss-20b"],
}
