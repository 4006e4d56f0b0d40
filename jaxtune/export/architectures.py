"""What llama.cpp needs to know of a model, and what it would compute differently, as it hard-codes much that Hugging
Face's configs can vary. A model that it would compute differently is refused; one with a shorter context or slightly
other logits is written with a note. The rules are those of the oldest llama.cpp that reads the architecture.
"""

from __future__ import annotations

import math
from typing import Any

from jaxtune.export import gemma4
from jaxtune.models.config import DecoderConfig, RopeConfig
from jaxtune.models.files.gguf_names import ARCHITECTURES, MLP, OUT, QKV, Architecture
from jaxtune.models.rope import rotary_frequencies

# Constants that llama.cpp uses whatever the file says.
_OSS_LIMIT, _OSS_ALPHA = 7.0, 1.702
_GEMMA3_LOCAL_THETA = 10_000.0


def architecture(config: DecoderConfig) -> Architecture:
    """llama.cpp's architecture for a model. Raises ValueError, with a line for every reason, if there is none or it
    would compute something else.
    """
    arch = ARCHITECTURES.get(config.family)
    if arch is None:
        raise ValueError(
            f"gguf: models of the family {config.family!r} cannot be written for llama.cpp; these can: "
            f"{', '.join(ARCHITECTURES)}"
        )
    if problems := _problems(config, arch):
        raise ValueError("\n".join(f"gguf: {config.family}: {problem}" for problem in problems))
    return arch


def _problems(config: DecoderConfig, arch: Architecture) -> list[str]:
    """A clause for everything that llama.cpp would compute differently."""
    problems = []

    def check(right: bool, difference: str) -> None:
        if not right:
            problems.append(f"{difference}: llama.cpp cannot run it")

    ordinary = all(part.config is None for layer in config.layers for part in layer.parts)
    check(ordinary or arch.by_layer, "layers of another kind")
    present = {QKV: config.qkv_bias, OUT: config.out_bias, MLP: config.mlp_bias}
    for projection in sorted(
        projection for projection, has_bias in present.items() if has_bias and projection not in arch.biases
    ):
        check(False, f"biases of the {projection} projections")
    if config.family in ("qwen2", "qwen2_moe"):
        check(config.qkv_bias, "no biases of the q/k/v projections")
    if config.family == "gpt_oss":
        check(config.qkv_bias and config.out_bias, "attention_bias = false")
    if arch.split_heads:
        split = config.hidden_size == config.query_size
        check(split, f"head_dim = {config.head_dim} is not hidden_size / num_attention_heads")
    scale = 1.0 if arch.by_layer else config.head_dim**-0.5
    if arch.wide_scale_layers is not None and config.num_layers == arch.wide_scale_layers:
        scale = (config.hidden_size // config.num_heads) ** -0.5
    check(
        arch.factors or math.isclose(config.attention_scale, scale, rel_tol=1e-6),
        f"query_pre_attn_scalar = {config.attention_scale**-2:g}, where it has {scale**-2:g} for a model of this size",
    )
    check(config.activation == ("gelu_tanh" if arch.gemma else "silu"), f"activation {config.activation!r}")
    embedding = config.hidden_size**0.5 if arch.gemma else 1.0
    right = arch.factors or math.isclose(config.embedding_scale, embedding, rel_tol=1e-6)
    check(right, f"embedding_scale {config.embedding_scale}")
    if config.family == "gemma2":
        caps = config.attention_soft_cap is not None and config.final_soft_cap is not None
        check(caps, "attn_logit_softcapping or final_logit_softcapping = null")
    else:
        check(config.attention_soft_cap is None, f"attn_logit_softcapping = {config.attention_soft_cap}")
        capped = config.final_soft_cap is not None and not arch.by_layer
        check(not capped, f"final_logit_softcapping = {config.final_soft_cap}")
    check(config.tie_embeddings or not arch.tied_output, "tie_word_embeddings = false")
    if config.moe is not None:
        normed = config.family != "qwen2_moe"  # llama.cpp normalises a token's expert weights in all other families
        check(config.moe.renormalize == normed, f"norm_topk_prob = {str(not normed).lower()}")
        clamped = (_OSS_LIMIT, _OSS_ALPHA) if config.family == "gpt_oss" else (None, config.moe.swiglu_alpha)
        limits = (config.moe.swiglu_limit, config.moe.swiglu_alpha)
        check(limits == clamped, f"swiglu_limit, swiglu_alpha = {limits}")
    problems += gemma4.problems(config) if arch.by_layer else _layer_problems(config, arch)
    for rope in config.rotary:
        check(rope.kind in arch.ropes, f"rope_type {rope.kind!r}")
        check(rope.head_dim in (None, config.head_dim) or arch.by_layer, f"a rotary head of {rope.head_dim}")
        partial = rope.partial_rotary_factor
        check(partial == 1.0 or arch.partial or rope.kind == "proportional", f"partial_rotary_factor = {partial}")
        if rope.kind == "yarn" and rope.attention_factor is not None:
            formula = 0.1 * math.log(rope.factor) + 1.0
            check(math.isclose(rope.attention_factor, formula), f"yarn's attention_factor = {rope.attention_factor}")
    return problems


def _layer_problems(config: DecoderConfig, arch: Architecture) -> list[str]:
    """Where layers differ from the pattern of windows and position encodings that llama.cpp hard-codes."""
    problems = []
    if arch.period is not None:
        windows = {layer.window for layer in config.layers if layer.window is not None}
        if len(windows) > 1:
            problems.append(f"sliding_window of {len(windows)} lengths: llama.cpp has one")
        wrong = [i for i, layer in enumerate(config.layers) if layer.window and (i + 1) % arch.period == 0]
        if windows:
            wrong += [i for i, layer in enumerate(config.layers) if not layer.window and (i + 1) % arch.period]
        if wrong:
            problems.append(
                f"layer_types of layer {min(wrong)}: llama.cpp has full attention in every {arch.period}th layer "
                "and a window in all others"
            )
    for index, layer in enumerate(config.layers):
        expected: int | None = 0
        if config.family == "gemma3_text" and arch.period is not None:
            expected = int((index + 1) % arch.period != 0)
        elif arch.nope_period is not None and (index + 1) % arch.nope_period == 0:
            expected = None
        if layer.rotary != expected:
            problems.append(f"the position encoding of layer {index}: llama.cpp has another one there")
            break
    if config.family == "gemma3_text":
        local = config.rotary[1]
        if local != RopeConfig(theta=_GEMMA3_LOCAL_THETA):
            problems.append(f"rope_local_base_freq = {local.theta:g}: llama.cpp has {_GEMMA3_LOCAL_THETA:g}")
    return problems


def hyperparameters(config: DecoderConfig, arch: Architecture) -> tuple[dict[str, Any], list[str]]:
    """({key: value} of a GGUF file, notes for the user). Keys lack the architecture's name and a dot. Ints are stored
    as uint32, floats as float32; a list (Gemma 4) has a value a layer, ints as int32.
    """
    notes = []
    context = config.context_length
    windows = {layer.window for layer in config.layers if layer.window is not None}
    rope = config.rotary[0]
    keys: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        f"attention.layer_norm_{'' if config.centred_norm else 'rms_'}epsilon": float(config.norm_eps),
        "rope.dimension_count": int(config.head_dim * rope.partial_rotary_factor),
        "rope.freq_base": float(rope.theta),
    }
    if arch.by_layer:
        keys |= gemma4.hyperparameters(config)
    elif arch.period is not None:
        keys["attention.sliding_window"] = max(windows, default=context)
    elif windows:
        context = min(context, *windows)
        notes.append(
            f"llama.cpp has no sliding windows in {arch.name} models: context_length is written as the window, "
            f"{context} tokens, within which the model is the same"
        )
    if config.family == "phi3":
        keys["attention.sliding_window"] = 0  # older versions require the key
    if config.attention_soft_cap is not None:
        keys["attn_logit_softcapping"] = float(config.attention_soft_cap)
    if config.final_soft_cap is not None:
        keys["final_logit_softcapping"] = float(config.final_soft_cap)
    if arch.factors:
        keys["attention.scale"] = float(config.attention_scale)
        keys["embedding_scale"] = float(config.embedding_scale)
        keys["residual_scale"] = float(config.residual_scale)
    if arch.factors or config.logit_scale != 1.0:
        keys["logit_scale"] = 1.0 / config.logit_scale if arch.factors else float(config.logit_scale)
    if config.moe is not None:
        keys["expert_count"] = config.moe.num_experts
        keys["expert_used_count"] = config.moe.experts_per_token
        if arch.name != "llama":
            keys["expert_feed_forward_length"] = config.moe.expert_size
        if config.moe.shared_size is not None:
            keys["expert_shared_feed_forward_length"] = config.moe.shared_size
    keys["context_length"] = context
    return keys | _rope_keys(config, rope, notes), notes


def _rope_keys(config: DecoderConfig, rope: RopeConfig, notes: list[str]) -> dict[str, Any]:
    """Keys rope.scaling.* of linear, yarn and longrope; appends to `notes`."""
    original = rope.original_max_position_embeddings or config.max_position_embeddings
    if rope.kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope.factor)}
    if rope.kind == "longrope":
        notes.append(
            "llama.cpp chooses the long rotary factors by the size of its whole context: run it with at most "
            f"{original} tokens of context for texts that fit in"
        )
        scale = rotary_frequencies(rope, config.head_dim, config.max_position_embeddings).scale
        return {"rope.scaling.original_context_length": original, "rope.scaling.attn_factor": float(scale)}
    if rope.kind == "yarn":
        if not rope.truncate:
            notes.append(
                "llama.cpp rounds the bounds of yarn's ramp, and this model does not (truncate = false): "
                "logits differ slightly"
            )
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope.factor),
            "rope.scaling.original_context_length": original,
            "rope.scaling.yarn_beta_fast": float(rope.beta_fast),
            "rope.scaling.yarn_beta_slow": float(rope.beta_slow),
        }
    return {}
