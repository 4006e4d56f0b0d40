"""One tiny config a family, with every feature of the family on, as a config.json would hold it."""

from __future__ import annotations

import numpy as np

LENGTH = 24  # of the test rows: past every window and every original context below

_SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": True,
    "torch_dtype": "float32",
}


def _config(model_type: str, architecture: str, **features) -> dict:
    return {"architectures": [architecture], "model_type": model_type} | _SHAPE | features


CONFIGS = {
    "llama": _config(
        "llama",
        "LlamaForCausalLM",
        hidden_act="silu",
        rms_norm_eps=1e-5,
        attention_bias=True,
        mlp_bias=True,
        rope_theta=1000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        tie_word_embeddings=True,
    ),
    # Transformers 5's spelling, a head_dim that is not hidden_size / heads, and yarn.
    "llama_yarn": _config(
        "llama",
        "LlamaForCausalLM",
        hidden_act="silu",
        rms_norm_eps=1e-6,
        head_dim=32,
        num_hidden_layers=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 8.0,
            "beta_slow": 1.0,
        },
        tie_word_embeddings=False,
        dtype="float32",
    ),
    "mistral": _config(
        "mistral",
        "MistralForCausalLM",
        hidden_act="silu",
        rms_norm_eps=1e-5,
        head_dim=32,
        rope_theta=10000.0,
        sliding_window=7,
        tie_word_embeddings=False,
    ),
    "qwen2": _config(
        "qwen2",
        "Qwen2ForCausalLM",
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
        tie_word_embeddings=True,
    ),
    "qwen3": _config(
        "qwen3",
        "Qwen3ForCausalLM",
        hidden_act="silu",
        rms_norm_eps=1e-6,
        head_dim=32,
        attention_bias=True,
        rope_theta=1000000.0,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        use_sliding_window=True,
        sliding_window=9,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        tie_word_embeddings=False,
    ),
    "gemma2": _config(
        "gemma2",
        "Gemma2ForCausalLM",
        hidden_activation="gelu_pytorch_tanh",
        rms_norm_eps=1e-6,
        head_dim=32,
        query_pre_attn_scalar=24,
        attention_bias=True,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
        sliding_window=8,
        rope_theta=10000.0,
        tie_word_embeddings=True,
    ),
    "gemma3": _config(
        "gemma3_text",
        "Gemma3ForCausalLM",
        hidden_activation="gelu_pytorch_tanh",
        num_hidden_layers=4,
        rms_norm_eps=1e-6,
        head_dim=32,
        query_pre_attn_scalar=40,
        final_logit_softcapping=4.0,
        attn_logit_softcapping=None,
        sliding_window=5,
        sliding_window_pattern=3,
        rope_theta=1000000.0,
        rope_local_base_freq=100.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        tie_word_embeddings=True,
    ),
    "phi3": _config(
        "phi3",
        "Phi3ForCausalLM",
        hidden_act="silu",
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=16,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.0, 2.0, 3.0, 5.0, 7.0, 9.0],
        },
        sliding_window=10,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        tie_word_embeddings=False,
    ),
    "olmo2": _config(
        "olmo2",
        "Olmo2ForCausalLM",
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_theta=500000.0,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    "smollm3": _config(
        "smollm3",
        "SmolLM3ForCausalLM",
        hidden_act="silu",
        num_hidden_layers=4,
        rms_norm_eps=1e-6,
        rope_theta=5000.0,
        no_rope_layers=[1, 0, 1, 0],
        use_sliding_window=True,
        sliding_window=6,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
}


def golden_tokens() -> np.ndarray:
    """int32[2, LENGTH], without token 0: torch gives the padding token's embedding no gradient."""
    return np.random.default_rng(7).integers(3, _SHAPE["vocab_size"], (2, LENGTH), np.int32)
