"""Keys of a GGUF file's model that its reader did not ask for: each changes no number, or the file is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from jaxtune.models.families.common.key import Config
from jaxtune.models.files.gguf_metadata import Metadata
from jaxtune.models.files.gguf_names import ARCHITECTURES, Architecture

# Keys that change no number of these families, whatever their value.
_UNCHANGING = {
    "attention.group_norm_epsilon",
    "attention.layer_norm_epsilon",  # a family asks for the epsilon of its own kind of norm
    "attention.layer_norm_rms_epsilon",
    "decoder_start_token_id",
    "pooling_type",  # of embeddings of texts
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",  # yarn and longrope ask for it
    "rope.scaling.yarn_beta_fast",  # yarn asks for both
    "rope.scaling.yarn_beta_slow",
    "tensor_data_layout",
    "use_parallel_residual",  # only GPT-NeoX has both ways
}
# Keys, and the values at which they change no number.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.shared_kv_layers": (0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "router_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "embedding_length_per_layer_input": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "interleave_moe_layer_step": (0, 1),
    "moe_every_n_layers": (0,),
    "leading_dense_block_count": (0,),
    "n_deepstack_layers": (0,),
    "nextn_predict_layers": (0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
_SOFTMAX, _SOFTMAX_OF_CHOSEN = 1, 3  # expert_gating_func


def require_all_read(data: Metadata, config: Config) -> None:
    """Raises ValueError for a key under the architecture's name that was not asked for, unless its value changes no
    number.

      config: config.json as it was read.
    """
    asked = frozenset(data.asked)
    arch = next(arch for arch in ARCHITECTURES.values() if arch.name == data.architecture)
    own = _of_model(data, config, arch)
    prefix = f"{data.architecture}."
    for name in data.fields:
        key = name.removeprefix(prefix)
        if not name.startswith(prefix) or key in asked or key in _UNCHANGING:
            continue
        value, fits = data.get(key), own.get(key) or _one_of(*_NEUTRAL.get(key, ()))
        if fits(value):
            continue
        known = f"; it may be {' or '.join(map(str, _NEUTRAL[key]))}" if key in _NEUTRAL else ""
        raise ValueError(
            f"{data.file}: {name} = {value!r} is not followed in {data.architecture} models{known}: take the model's "
            "safetensors folder, or a file without that key if it changes nothing"
        )


def _of_model(data: Metadata, config: Config, arch: Architecture) -> dict[str, Callable[[object], bool]]:
    """{key: whether a value says what the model has anyway}."""
    head_dim = data.get("attention.key_length") or data.need("embedding_length") // data.need("attention.head_count")
    sliding_dim, context = data.get("attention.key_length_swa", head_dim), data.need("context_length")
    score_scale = 1.0 if arch.by_layer else config.get("query_pre_attn_scalar", head_dim) ** -0.5
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "none"))
    # Of a yarn or a line the factor was asked for, in one of its two keys; with the type "none" neither does anything.
    factors = _one_of(0.0, 1.0, *([scaling["factor"]] if kind in ("linear", "yarn") else []))
    if data.get("rope.scaling.type") == "none" and kind == "none":
        factors = _any
    return {
        "vocab_size": _one_of(config["vocab_size"]),
        "attention.key_length_swa": _one_of(head_dim),
        "attention.value_length": _one_of(head_dim),
        "attention.value_length_swa": _one_of(sliding_dim),
        "attention.scale": lambda value: isinstance(value, float) and math.isclose(value, score_scale, rel_tol=1e-5),
        "attention.sliding_window": lambda value: (
            arch.name != "olmo2" and isinstance(value, int | float) and (value == 0 or value >= context)
        ),
        "attention.sliding_window_pattern": lambda value: value in (arch.period or 0, _slides(data, arch)),
        "expert_feed_forward_length": _one_of(0, data.get("feed_forward_length")),
        "expert_gating_func": _one_of(0, _SOFTMAX_OF_CHOSEN if arch.name == "gpt-oss" else _SOFTMAX),
        "expert_weights_norm": _one_of(arch.name != "qwen2moe"),
        "rope.dimension_count": _one_of(head_dim),
        "rope.dimension_count_swa": _one_of(sliding_dim),
        "rope.freq_base_swa": _one_of(config.get("rope_local_base_freq", data.get("rope.freq_base", 10000.0))),
        "rope.scale_linear": factors,
        "rope.scaling.factor": factors,
        "rope.scaling.type": _one_of("none", "linear", *(["longrope"] if kind == "longrope" else [])),
        "rope.scaling.yarn_ext_factor": _one_of(-1.0, *{"yarn": (1.0,), "none": (0.0, 1.0)}.get(kind, (0.0,))),
    }


def _slides(data: Metadata, arch: Architecture) -> list[bool]:
    """Of each layer whether it has a sliding window."""
    return [bool(arch.period and (index + 1) % arch.period) for index in range(data.need("block_count"))]


def _any(value: object) -> bool:
    return True


def _one_of(*values: object) -> Callable[[object], bool]:
    """Whether a value, or each element of a list, is one of these."""
    return lambda value: all(element in values for element in (value if isinstance(value, list) else [value]))
