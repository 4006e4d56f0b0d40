"""What the values of a config.json may be: types, and ranges where the families compute with a value as they read it.

Ranges of everything else are DecoderConfig's and RopeConfig's to check, whoever makes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from jaxtune.models import values

# Where null does not mean that the key is left out.
_NULL_MEANS = {"sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "num_key_value_heads"}
_any_count = functools.partial(values.whole, least=0)
_above_one = functools.partial(values.number, above=1)


def _window_pattern(key: str, value: Any) -> None:
    """A number of layers, or a letter for each layer of the pattern, as EXAONE 4 has it ("LLLG")."""
    if not isinstance(value, str):
        values.whole(key, value)


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "model_type": values.text,
    "num_hidden_layers": functools.partial(values.whole, most=values.MOST_LAYERS),
    **dict.fromkeys(("architectures", "layer_types"), values.texts),
    "mlp_only_layers": functools.partial(values.items, of=functools.partial(values.whole, least=0)),
    "no_rope_layers": functools.partial(values.items, of=functools.partial(values.whole, least=0, most=1)),
    **dict.fromkeys(
        (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "original_max_position_embeddings",
            "no_rope_layer_interval",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "decoder_sparse_step",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_conv_kernel_dim",
            "full_attention_interval",
            "shared_expert_intermediate_size",
        ),
        values.whole,
    ),
    "sliding_window_pattern": _window_pattern,
    # 0 is how some files say that there is none.
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "sliding_window", "max_window_layers"), _any_count
    ),
    **dict.fromkeys(
        (
            "rms_norm_eps",
            "query_pre_attn_scalar",
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "partial_rotary_factor",
            "swiglu_limit",
            "layer_norm_eps",
            "logit_scale",
            "logits_scaling",
            "attention_multiplier",
            "embedding_multiplier",
            "residual_multiplier",
        ),
        values.positive,
    ),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), _above_one),
    **dict.fromkeys(("initializer_range", "router_aux_loss_coef"), values.not_negative),
    "swiglu_alpha": values.number,
    **dict.fromkeys(
        (
            "attention_bias",
            "mlp_bias",
            "tie_word_embeddings",
            "use_sliding_window",
            "norm_topk_prob",
            "output_router_logits",
            "attention_out_bias",
            "qkv_bias",
            "use_qk_norm",
            "attn_output_gate",
        ),
        values.boolean,
    ),
    **dict.fromkeys(("hidden_act", "hidden_activation"), values.text),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "text_config", "id2label"), values.mapping),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), values.token_ids),
}
_numbers = functools.partial(values.items, of=values.positive)
_ROPE_CHECKS: dict[str, Callable[[str, Any], None]] = {
    **dict.fromkeys(("rope_type", "type"), values.text),
    "rope_theta": _above_one,
    **dict.fromkeys(
        (
            "partial_rotary_factor",
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "attention_factor",
            "beta_fast",
            "beta_slow",
        ),
        values.positive,
    ),
    **dict.fromkeys(("mscale", "mscale_all_dim", "llama_4_scaling_beta"), values.not_negative),
    "original_max_position_embeddings": values.whole,
    **dict.fromkeys(("short_factor", "long_factor"), _numbers),
    "truncate": values.boolean,
}


def _check(given: Mapping[str, Any], checks: Mapping[str, Callable[[str, Any], None]], prefix: str) -> None:
    for key, check in checks.items():
        if given.get(key) is not None:
            check(prefix + key, given[key])


def checked(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The config without the keys that are null, but for those where null says something.

    Raises:
      ValueError: a value that is not what its key holds, by key and value.
    """
    _check(hf, _CHECKS, "config.json: ")
    for name in ("rope_parameters", "rope_scaling"):
        rope = hf.get(name) or {}
        _check(rope, _ROPE_CHECKS, f"config.json: {name}.")
        for kind, inner in rope.items():  # one for each kind of layer
            if isinstance(inner, Mapping):
                _check(inner, _ROPE_CHECKS, f"config.json: {name}.{kind}.")
    return {key: value for key, value in hf.items() if value is not None or key in _NULL_MEANS}
