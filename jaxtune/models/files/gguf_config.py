"""config.json of a model in a GGUF file, from llama.cpp's metadata and tensors: the inverse of exports."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxtune.models.config import RopeConfig
from jaxtune.models.families.common.key import Config, Fields
from jaxtune.models.files.gguf_metadata import Metadata, shortest
from jaxtune.models.files.gguf_names import ARCHITECTURES, ROPE_FREQUENCIES, ROPE_LONG, ROPE_SHORT
from jaxtune.models.files.gguf_unread import require_all_read
from jaxtune.models.rope import rotary_frequencies


def config_of(data: Metadata) -> Fields:
    """config.json of the model. Raises ValueError for an unsupported architecture, or metadata that are missing or do
    not fit it.
    """
    make = _FAMILIES.get(data.architecture)
    if make is None:
        raise ValueError(
            f"{data.file}: general.architecture = {data.architecture!r} is not supported in GGUF files; supported: "
            f"{', '.join(_FAMILIES)}. Take the model's safetensors folder"
        )
    heads = data.need("attention.head_count")
    hidden = data.need("embedding_length")
    head_dim = data.get("attention.key_length") or hidden // heads
    config = {
        "vocab_size": data.shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": data.need("feed_forward_length"),
        "num_hidden_layers": data.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": data.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": data.need("context_length"),
        "rms_norm_eps": data.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": data.get("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": data.tied,
    }
    if config["rms_norm_eps"] is None:
        del config["rms_norm_eps"]
    config |= _scaling(data, head_dim)
    config |= make(data, config)
    for name in ("bos", "eos", "padding"):
        number = data.fields.get(f"tokenizer.ggml.{name}_token_id")
        if number is not None:
            config[f"{'pad' if name == 'padding' else name}_token_id"] = int(number)
    require_all_read(data, config)
    return config


def _scaling(data: Metadata, head_dim: int) -> Fields:
    """rope_scaling, as config.json has it, and the original context. ValueError for another kind."""
    if data.architecture == "gemma4":  # its own rotations are all that it has
        return {}
    if ROPE_FREQUENCIES in data.shapes:
        return _llama3(data, head_dim)
    if ROPE_LONG in data.shapes:
        original = data.need("rope.scaling.original_context_length")
        scaling: Fields = {
            "type": "longrope",
            "short_factor": [shortest(factor) for factor in data.values(ROPE_SHORT)],
            "long_factor": [shortest(factor) for factor in data.values(ROPE_LONG)],
        }
        if (attention := data.get("rope.scaling.attn_factor")) is not None:
            scaling |= {"factor": data.need("context_length") / original, "attention_factor": attention}
        return {"rope_scaling": scaling, "original_max_position_embeddings": original}
    kind = data.get("rope.scaling.type", "linear")  # as llama.cpp does; by default the factor is 1
    if kind == "none":
        return {}
    factor = data.get("rope.scaling.factor")
    factor = data.get("rope.scale_linear") if factor is None else factor  # the key of older files
    if factor in (None, 0.0, 1.0) and kind in ("linear", "yarn"):
        return {}
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn":
        original = data.get("rope.scaling.original_context_length") or data.need("context_length")
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": data.get("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": data.get("rope.scaling.yarn_beta_slow", 1.0),
        }
        return {"rope_scaling": scaling}
    raise ValueError(f"{data.file}: rope.scaling.type = {kind!r} is not supported; take the safetensors folder")


def _llama3(data: Metadata, head_dim: int) -> Fields:
    """rope_scaling of kind llama3 that gives the file's divisors; ValueError if none does."""
    divisors = data.values(ROPE_FREQUENCIES)
    factor = shortest(divisors.max())
    if factor == 1.0:
        return {}
    theta, positions = data.get("rope.freq_base", 10000.0), data.need("context_length")
    dim = data.get("rope.dimension_count") or head_dim
    base = rotary_frequencies(RopeConfig(theta=theta), dim, positions).short
    for power in range(2, 24):
        for low, high in ((1.0, 4.0), (1.0, 2.0), (1.0, 8.0), (1.0, 32.0)):
            rope = RopeConfig(
                theta=theta,
                kind="llama3",
                factor=factor,
                low_freq_factor=low,
                high_freq_factor=high,
                original_max_position_embeddings=2**power,
            )
            candidate = base / rotary_frequencies(rope, dim, positions).short
            if candidate.shape == divisors.shape and np.allclose(candidate, divisors, rtol=1e-5):
                scaling = {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": low,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": 2**power,
                }
                return {"rope_scaling": scaling}
    raise ValueError(f"{data.file}: {ROPE_FREQUENCIES} is not of Llama 3's form; take the model's safetensors folder")


# ---- families: (metadata, what all have) -> what is the family's own


def _biases(data: Metadata) -> Fields:
    return {"attention_bias": data.has("attn_q.bias"), "mlp_bias": data.has("ffn_gate.bias")}


def _experts(data: Metadata) -> Fields:
    return {
        "num_experts": data.need("expert_count"),
        "num_experts_per_tok": data.need("expert_used_count"),
        "moe_intermediate_size": data.get("expert_feed_forward_length", data.need("feed_forward_length")),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _partial(data: Metadata, config: Config) -> Fields:
    return {"partial_rotary_factor": data.get("rope.dimension_count", config["head_dim"]) / config["head_dim"]}


def _llama(data: Metadata, config: Config) -> Fields:
    if data.get("expert_count"):
        experts = data.need("expert_count"), data.need("expert_used_count")
        return {"model_type": "mixtral", "num_local_experts": experts[0], "num_experts_per_tok": experts[1]}
    return {"model_type": "llama", **_biases(data)}


def _granite(data: Metadata, config: Config) -> Fields:
    return {
        "model_type": "granite",
        **_biases(data),
        "attention_multiplier": data.get("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": data.get("embedding_scale", 1.0),
        "residual_multiplier": data.get("residual_scale", 1.0),
        "logits_scaling": data.get("logit_scale", 1.0),
    }


def _qwen2(data: Metadata, config: Config) -> Fields:
    return {"model_type": "qwen2", "use_sliding_window": False}


def _qwen3(data: Metadata, config: Config) -> Fields:
    return {"model_type": "qwen3", "attention_bias": data.has("attn_q.bias"), "use_sliding_window": False}


def _qwen3_moe(data: Metadata, config: Config) -> Fields:
    bias = data.has("attn_q.bias")
    return {"model_type": "qwen3_moe", "attention_bias": bias, "norm_topk_prob": True, **_experts(data)}


def _qwen2_moe(data: Metadata, config: Config) -> Fields:
    return {
        "model_type": "qwen2_moe",
        "qkv_bias": True,
        "use_sliding_window": False,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": data.need("expert_shared_feed_forward_length"),
        **_experts(data),
    }


def _gemma(data: Metadata, config: Config) -> Fields:
    return {
        "model_type": {"gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text"}[data.architecture],
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma2(data: Metadata, config: Config) -> Fields:
    arch = ARCHITECTURES["gemma2" if data.architecture == "gemma2" else "gemma3_text"]
    wide = config["num_hidden_layers"] == arch.wide_scale_layers
    query = config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
    return {
        **_gemma(data, config),
        "query_pre_attn_scalar": query,
        "sliding_window": data.need("attention.sliding_window"),
        "attn_logit_softcapping": data.get("attn_logit_softcapping"),
        "final_logit_softcapping": data.get("final_logit_softcapping"),
    }


def _gemma3(data: Metadata, config: Config) -> Fields:
    period = ARCHITECTURES["gemma3_text"].period
    return {**_gemma2(data, config), "sliding_window_pattern": period, "rope_local_base_freq": 10_000.0}


def _gemma4(data: Metadata, config: Config) -> Fields:
    """The keys of config.json that Gemma 4 alone has. config: those that are known already."""
    slides = data.need("attention.sliding_window_pattern")
    head_dim, wide = data.need("attention.key_length_swa"), data.need("attention.key_length")
    widths, heads = config["intermediate_size"], config["num_key_value_heads"]
    widths = widths if isinstance(widths, list) else [widths] * len(slides)
    heads = heads if isinstance(heads, list) else [heads] * len(slides)
    divisors = data.values(ROPE_FREQUENCIES)
    turning = int((divisors < 1e29).sum())
    full = {"rope_type": "proportional", "rope_theta": config["rope_theta"], "factor": shortest(divisors[0])}
    full["partial_rotary_factor"] = turning / len(divisors)
    local = {"rope_type": "default", "rope_theta": data.need("rope.freq_base_swa")}
    shared = data.get("attention.shared_kv_layers", 0)
    unshared_layers = len(slides) - shared
    equal = any(f"blk.{index}.attn_v.weight" not in data.shapes for index in range(unshared_layers))
    per_layer = data.get("embedding_length_per_layer_input", 0)
    fields = {
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": head_dim,
        "global_head_dim": wide,
        "intermediate_size": widths[0],
        "num_key_value_heads": heads[slides.index(True)] if True in slides else heads[0],
        "num_global_key_value_heads": heads[slides.index(False)],
        "attention_k_eq_v": equal,
        "final_logit_softcapping": data.get("final_logit_softcapping") or None,
        "sliding_window": data.need("attention.sliding_window"),
        "layer_types": ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides],
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "rope_theta": None,
        "hidden_size_per_layer_input": per_layer,
        "vocab_size_per_layer_input": config["vocab_size"],
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": shared > 0 and widths[-1] == 2 * widths[0],
    }
    if data.get("expert_count"):
        fields |= {
            "enable_moe_block": True,
            "num_experts": data.need("expert_count"),
            "top_k_experts": data.need("expert_used_count"),
            "moe_intermediate_size": data.need("expert_feed_forward_length"),
        }
    return fields


def _phi3(data: Metadata, config: Config) -> Fields:
    window = data.get("attention.sliding_window") or None
    return {"model_type": "phi3", "sliding_window": window, **_partial(data, config)}


def _olmo2(data: Metadata, config: Config) -> Fields:
    return {"model_type": "olmo2"}


def _gpt_oss(data: Metadata, config: Config) -> Fields:
    scaling = config.get("rope_scaling")
    return {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "intermediate_size": data.get("expert_feed_forward_length", config["intermediate_size"]),
        "num_local_experts": data.need("expert_count"),
        "num_experts_per_tok": data.need("expert_used_count"),
        "sliding_window": data.need("attention.sliding_window"),
        "rope_scaling": scaling and {**scaling, "truncate": False},
    }


def _smollm3(data: Metadata, config: Config) -> Fields:
    every = ARCHITECTURES["smollm3"].nope_period
    return {
        "model_type": "smollm3",
        "no_rope_layer_interval": every,
        "use_sliding_window": False,
        "attention_bias": data.has("attn_q.bias"),
        "mlp_bias": data.has("ffn_gate.bias"),
    }


def _seed_oss(data: Metadata, config: Config) -> Fields:
    bias = data.has("attn_q.bias")
    return {"model_type": "seed_oss", "attention_bias": bias, "attention_out_bias": False, "mlp_bias": False}


def _glm4(data: Metadata, config: Config) -> Fields:
    return {"model_type": "glm4", "attention_bias": data.has("attn_q.bias"), **_partial(data, config)}


def _cohere2(data: Metadata, config: Config) -> Fields:
    return {
        "model_type": "cohere2",
        "layer_norm_eps": data.need("attention.layer_norm_epsilon"),
        "logit_scale": data.get("logit_scale", 1.0),
        "sliding_window": data.need("attention.sliding_window"),
        "sliding_window_pattern": ARCHITECTURES["cohere2"].period,
    }


_FAMILIES: dict[str, Callable[[Metadata, Config], Fields]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "qwen2moe": _qwen2_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "gpt-oss": _gpt_oss,
    "smollm3": _smollm3,
    "seed_oss": _seed_oss,
    "granite": _granite,
    "glm4": _glm4,
    "cohere2": _cohere2,
}
