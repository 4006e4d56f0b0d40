"""config.json of published models (of multimodal ones, the text model's), with the keys of a DecoderConfig and the
format of quantised weights, for plans without weights or a connection.
"""

from __future__ import annotations

from typing import Any

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": _LLAMA3_ROPE,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_LLAMA_SMALL = {"rope_scaling": {**_LLAMA3_ROPE, "factor": 32.0}, "tie_word_embeddings": True}
_LLAMA_3B = (
    _LLAMA_8B
    | _LLAMA_SMALL
    | {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24}
)
_LLAMA_1B = (
    _LLAMA_8B | _LLAMA_SMALL | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
)
_QWEN25_05B: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
_QWEN3_14B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_QWEN3_32B = _QWEN3_14B | {"intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64}
_QWEN3_30B_A3B = _QWEN3_14B | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
_GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "quantization_config": {"quant_method": "mxfp4"},
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "sliding_window": 128,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_MIXTRAL_8X7B: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
# The text models, from transformers' default configs of their types (4B and 27B: from their model cards).
_QWEN35_9B: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_QWEN35_4B = _QWEN35_9B | {"hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True}
_QWEN35_27B = _QWEN35_9B | {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "linear_num_value_heads": 48,
}
_QWEN35_35B_A3B = _QWEN35_9B | {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}
_GEMMA4_31B: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}
_GEMMA4_12B = _GEMMA4_31B | {
    "model_type": "gemma4_unified_text",
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 1,
}
_GEMMA4_26B_A4B = _GEMMA4_31B | {
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
_GEMMA4_E4B = _GEMMA4_31B | {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 42,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 18,
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B": _LLAMA_8B,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_8B,
    "meta-llama/Llama-3.2-3B-Instruct": _LLAMA_3B,
    "meta-llama/Llama-3.2-1B-Instruct": _LLAMA_1B,
    # Copies that need no login.
    "unsloth/Llama-3.1-8B-Instruct": _LLAMA_8B,
    "unsloth/Llama-3.2-1B-Instruct": _LLAMA_1B,
    "Qwen/Qwen2.5-0.5B-Instruct": _QWEN25_05B,
    "Qwen/Qwen3-14B": _QWEN3_14B,
    "Qwen/Qwen3-32B": _QWEN3_32B,
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B_A3B,
    "Qwen/Qwen3.5-4B": _QWEN35_4B,
    "Qwen/Qwen3.5-9B": _QWEN35_9B,
    "Qwen/Qwen3.5-27B": _QWEN35_27B,
    "Qwen/Qwen3.5-35B-A3B": _QWEN35_35B_A3B,
    "google/gemma-4-E4B-it": _GEMMA4_E4B,
    "google/gemma-4-12B-it": _GEMMA4_12B,
    "google/gemma-4-26B-A4B-it": _GEMMA4_26B_A4B,
    "google/gemma-4-31B-it": _GEMMA4_31B,
    "openai/gpt-oss-20b": _GPT_OSS_20B,
    "openai/gpt-oss-120b": _GPT_OSS_20B | {"num_hidden_layers": 36, "num_local_experts": 128},
    "mistralai/Mixtral-8x7B-Instruct-v0.1": _MIXTRAL_8X7B,
}
