"""Shapes of published models by their short names. Weights are made at random on the device."""

from jaxtune.models.files.published import PUBLISHED

QWEN15_MOE = {
    "model_type": "qwen2_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
    "output_router_logits": False,
}
SHAPES = {
    "llama-3.1-8b": PUBLISHED["meta-llama/Llama-3.1-8B-Instruct"],
    "llama-3.2-3b": PUBLISHED["meta-llama/Llama-3.2-3B-Instruct"],
    "llama-3.2-1b": PUBLISHED["meta-llama/Llama-3.2-1B-Instruct"],
    "llama-3.3-70b": PUBLISHED["meta-llama/Llama-3.1-8B-Instruct"]
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "qwen3-14b": PUBLISHED["Qwen/Qwen3-14B"],
    "qwen3-32b": PUBLISHED["Qwen/Qwen3-32B"],
    "qwen3-30b-a3b": PUBLISHED["Qwen/Qwen3-30B-A3B"],
    "qwen1.5-moe-a2.7b": QWEN15_MOE,
    "qwen3.5-9b": PUBLISHED["Qwen/Qwen3.5-9B"],
    "qwen3.5-27b": PUBLISHED["Qwen/Qwen3.5-27B"],
    "qwen3.5-35b-a3b": PUBLISHED["Qwen/Qwen3.5-35B-A3B"],
    "gemma-4-e4b": PUBLISHED["google/gemma-4-E4B-it"],
    "gemma-4-12b": PUBLISHED["google/gemma-4-12B-it"],
    "gemma-4-26b-a4b": PUBLISHED["google/gemma-4-26B-A4B-it"],
    "gemma-4-31b": PUBLISHED["google/gemma-4-31B-it"],
    "gpt-oss-20b": PUBLISHED["openai/gpt-oss-20b"],
}
