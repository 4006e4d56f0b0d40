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
# As its config.json says, but for the positions, which cost memory alone.
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
SHAPES = {
    "llama-3.1-8b": PUBLISHED["meta-llama/Llama-3.1-8B-Instruct"],
    "llama-3.2-3b": PUBLISHED["meta-llama/Llama-3.2-3B-Instruct"],
    "llama-3.2-1b": PUBLISHED["meta-llama/Llama-3.2-1B-Instruct"],
    # As their config.json say, but for the positions.
    "smollm2-135m": _SMOLLM2
    | {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    | {"num_attention_heads": 9, "num_key_value_heads": 3},
    "smollm2-360m": _SMOLLM2
    | {"hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32}
    | {"num_attention_heads": 15, "num_key_value_heads": 5},
    "llama-3.3-70b": PUBLISHED["meta-llama/Llama-3.1-8B-Instruct"]
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "qwen3-0.6b": PUBLISHED["Qwen/Qwen3-14B"]
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": PUBLISHED["Qwen/Qwen3-14B"]
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "qwen3-14b": PUBLISHED["Qwen/Qwen3-14B"],
    "qwen3-32b": PUBLISHED["Qwen/Qwen3-32B"],
    "qwen3-30b-a3b": PUBLISHED["Qwen/Qwen3-30B-A3B"],
    "qwen1.5-moe-a2.7b": QWEN15_MOE,
    "qwen3-next-80b-a3b": QWEN3_NEXT,
    "qwen3.5-9b": PUBLISHED["Qwen/Qwen3.5-9B"],
    "qwen3.5-27b": PUBLISHED["Qwen/Qwen3.5-27B"],
    "qwen3.5-35b-a3b": PUBLISHED["Qwen/Qwen3.5-35B-A3B"],
    "gemma-4-e4b": PUBLISHED["google/gemma-4-E4B-it"],
    "gemma-4-12b": PUBLISHED["google/gemma-4-12B-it"],
    "gemma-4-26b-a4b": PUBLISHED["google/gemma-4-26B-A4B-it"],
    "gemma-4-31b": PUBLISHED["google/gemma-4-31B-it"],
    # Random weights are stored in no format, unless a benchmark makes them so.
    "gpt-oss-20b": PUBLISHED["openai/gpt-oss-20b"] | {"quantization_config": None},
    "gpt-oss-120b": PUBLISHED["openai/gpt-oss-120b"] | {"quantization_config": None},
}
