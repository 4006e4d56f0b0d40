"""The tiny models as llama.cpp can run them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from random_weights import random_tensor
from tiny import CONFIGS
from tiny_models import named

from jaxtune.models.hf import model_from_config

# What llama.cpp cannot run of tiny.CONFIGS is taken out; the rest of each family's features stays.
CHANGES = {
    "llama": {},
    "llama_yarn": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": dict(attention_bias=False),
    "qwen3_moe": dict(attention_bias=False, norm_topk_prob=True),
    "mixtral": {},
    "gemma2": dict(query_pre_attn_scalar=32, attention_bias=False),
    "gemma3": dict(
        query_pre_attn_scalar=32,
        final_logit_softcapping=None,
        sliding_window_pattern=6,
        rope_local_base_freq=10000.0,
        num_hidden_layers=6,
    ),
    "gemma4": dict(attention_bias=False),
    "gemma4_experts": {},
    "gemma4_shared": dict(vocab_size_per_layer_input=128),
    "gemma4_unified": {},
    "phi3": {},
    "olmo2": dict(attention_bias=False, tie_word_embeddings=True),
    "gpt_oss": dict(swiglu_limit=7.0),
    "smollm3": dict(attention_bias=False, mlp_bias=False, no_rope_layers=[1, 1, 1, 0]),
    "qwen2_moe": dict(mlp_only_layers=[], use_sliding_window=False, sliding_window=None),
    "gemma": dict(attention_bias=False),
    "seed_oss": dict(attention_out_bias=False, mlp_bias=False),
    "granite": {},
    "glm4": {},
    "cohere2": dict(
        attention_bias=False, num_hidden_layers=4, layer_types=[*["sliding_attention"] * 3, "full_attention"]
    ),
}


def config_of(name: str, **changes) -> dict:
    return CONFIGS[name] | CHANGES.get(name, {}) | changes


def made(name: str, dtype="float32", **changes):
    """The model of a config, with weights of its tensors' names; no program is compiled for them."""
    model = nnx.eval_shape(lambda: model_from_config(config_of(name, **changes), jax.random.key(0), dtype))
    for key, variable in named(model).items():
        variable.set_value(jnp.asarray(random_tensor(key, variable.shape), dtype))
    return model
