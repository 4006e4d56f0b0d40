"""Families that llama.cpp knows: what it has for each (ARCHITECTURES, a table of Architecture), whether it computes
what a model does (`architecture`; `_problems` and `_layer_problems` find what it does not), the metadata that it needs
(`hyperparameters`, with `_rope_keys`), and the factors of rotary frequencies that it reads as tensors (`rope_factors`).
Exports to GGUF files use it: api.py all but `rope_factors`, which gguf_tensors.py calls.

llama.cpp hard-codes much of an architecture that Hugging Face's configs can vary. A model that it would compute
differently is refused here, with the reason. A model that it computes correctly in a shorter context only is written
with a note, and, if a sliding window is the reason, with that context. A note also names yarn without truncation, whose
logits differ slightly. The rules are those of the oldest llama.cpp that reads the architecture, so that every later one
reads it too.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from jaxtune.export import gemma4
from jaxtune.models.config import DecoderConfig, RopeConfig
from jaxtune.models.rope import rotary_frequencies

_QKV, _OUT, _MLP = "q/k/v", "attention output", "MLP"
# Constants that llama.cpp uses whatever the file says.
_OSS_LIMIT, _OSS_ALPHA = 7.0, 1.702
_GEMMA3_LOCAL_THETA = 10_000.0


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How llama.cpp computes the models of one family, as far as its architectures differ. The table ARCHITECTURES has
    one for each family. An export compares a model with it, and refuses one that llama.cpp would compute differently,
    except for what `hyperparameters` only notes. "It" below is llama.cpp."""

    name: str  # general.architecture of the file
    # rotary pairs are the neighbours (2i, 2i + 1) of a head, and those of Hugging Face's model are not, so rows of q
    # and k are reordered; False: the pairs are the same in both
    permuted: bool = False
    # projections whose biases it reads, of "q/k/v", "attention output" and "MLP"; a model with other biases is refused
    biases: frozenset[str] = frozenset()
    # layers whose number, from 1, is a multiple of it have full attention, and the others a sliding window; None: it
    # has no windows, or the file says which layers have one (by_layer)
    period: int | None = None
    split_heads: bool = False  # it assumes that a head has hidden_size / num_attention_heads dimensions
    ropes: tuple[str, ...] = ("default", "linear", "yarn")  # kinds of RopeConfig that it computes
    own_output: bool = False  # the file must contain the head as a tensor, even if it is tied to the embedding
    tied_output: bool = False  # the head must be tied to the embedding
    # with this number of layers, scores are scaled by (hidden_size / heads)^-0.5 in place of head_dim^-0.5 (Gemma 27B)
    wide_scale_layers: int | None = None
    # layers whose number, from 1, is a multiple of it have no position encoding; None: all layers have one
    nope_period: int | None = None
    # the rotary embedding may cover only the first dimensions of each head; else it covers all, except in the kind
    # "proportional"
    partial: bool = False
    factors: bool = False  # it reads factors on embedding, scores, layers and logits (that of the logits divides them)
    gemma: bool = False  # the embedding is scaled by the square root of its size, and the activation is GELU, not SiLU
    fused_experts: bool = False  # gate and up of experts are one tensor of the file, gate first
    # the file says of each layer its heads, window and MLP, as in export/gemma4.py; no pattern is hard-coded. Scores
    # are then not scaled, and logits may have a soft cap
    by_layer: bool = False
    # (llama.cpp's key of an end token, the token's text), for end tokens it does not recognise by text
    ends: tuple[tuple[str, str], ...] = ()
    # texts of special tokens that it is to write into an answer, where whoever reads thoughts and tool calls finds them
    shown: tuple[str, ...] = ()


_LLAMA = Architecture(
    "llama", permuted=True, biases=frozenset({_QKV, _OUT, _MLP}), ropes=("default", "linear", "llama3", "yarn")
)
_GEMMA4 = Architecture(
    "gemma4",
    ropes=("default", "proportional"),
    gemma=True,
    fused_experts=True,
    by_layer=True,
    ends=(("eot", "<turn|>"),),
    shown=gemma4.SHOWN,
)
ARCHITECTURES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": Architecture("qwen2", biases=frozenset({_QKV}), split_heads=True),
    "qwen3": Architecture("qwen3"),
    "qwen3_moe": Architecture("qwen3moe"),
    "qwen2_moe": Architecture("qwen2moe", biases=frozenset({_QKV}), split_heads=True, own_output=True),
    "gemma": Architecture("gemma", tied_output=True, gemma=True),
    "gemma2": Architecture("gemma2", period=2, tied_output=True, wide_scale_layers=46, ropes=("default",), gemma=True),
    "gemma3_text": Architecture("gemma3", period=6, wide_scale_layers=62, ropes=("default", "linear"), gemma=True),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "phi3": Architecture("phi3", split_heads=True, ropes=("default", "longrope"), partial=True),
    "olmo2": Architecture("olmo2", split_heads=True, own_output=True),
    "gpt_oss": Architecture("gpt-oss", biases=frozenset({_QKV, _OUT}), period=2, own_output=True),
    "smollm3": Architecture("smollm3", permuted=True, split_heads=True, nope_period=4),
    "seed_oss": Architecture("seed_oss", biases=frozenset({_QKV})),
    "granite": dataclasses.replace(_LLAMA, name="granite", factors=True),
    "glm4": Architecture(
        "glm4", biases=frozenset({_QKV}), partial=True, ends=(("eot", "<|user|>"), ("eom", "<|observation|>"))
    ),
    "cohere2": Architecture("cohere2", period=4, nope_period=4, split_heads=True, tied_output=True, ropes=("default",)),
}


def architecture(config: DecoderConfig) -> Architecture:
    """Returns llama.cpp's architecture for a model, if llama.cpp computes what the model does. Exports to GGUF, of
    models and of adapters, call it before they write anything.

    Raises:
      ValueError: llama.cpp has no architecture for the family of `config`, the model's, or would compute something
        other than the model does; every reason is a line of the message.
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
    """Returns everything in a model's config that llama.cpp would compute differently, so that `architecture` refuses
    the model, a clause each for an error message; [] if there is nothing. What the user only gets a note about
    (`hyperparameters`) is not among it. config: the model's. arch: llama.cpp's architecture for its family."""
    found = []

    def check(right: bool, what: str) -> None:
        if not right:
            found.append(f"{what}: llama.cpp cannot run it")

    ordinary = all(part.config is None for layer in config.layers for part in layer.parts)
    check(ordinary or arch.by_layer, "layers of another kind")
    present = {_QKV: config.qkv_bias, _OUT: config.out_bias, _MLP: config.mlp_bias}
    for place in sorted(place for place, there in present.items() if there and place not in arch.biases):
        check(False, f"biases of the {place} projections")
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
    found += gemma4.problems(config) if arch.by_layer else _layer_problems(config, arch)
    for rope in config.rotary:
        check(rope.kind in arch.ropes, f"rope_type {rope.kind!r}")
        check(rope.head_dim in (None, config.head_dim) or arch.by_layer, f"a rotary head of {rope.head_dim}")
        partial = rope.partial_rotary_factor
        check(partial == 1.0 or arch.partial or rope.kind == "proportional", f"partial_rotary_factor = {partial}")
        if rope.kind == "yarn" and rope.attention_factor is not None:
            formula = 0.1 * math.log(rope.factor) + 1.0
            check(math.isclose(rope.attention_factor, formula), f"yarn's attention_factor = {rope.attention_factor}")
    return found


def _layer_problems(config: DecoderConfig, arch: Architecture) -> list[str]:
    """Returns clauses for an error message that say where the model's layers differ from the pattern that llama.cpp
    hard-codes for the architecture `arch`: which have a sliding window, of one length, which have which position
    encoding, and in Gemma 3 that the local one is unscaled with the base 10,000. Windows are compared only if
    arch.period is set, and a model without any windows passes. Of windows, as of position encodings, only the first
    layer that differs is named. [] if nothing differs. config: the model's. `_problems` calls it for architectures
    without by_layer."""
    found = []
    if arch.period is not None:
        windows = {layer.window for layer in config.layers if layer.window is not None}
        if len(windows) > 1:
            found.append(f"sliding_window of {len(windows)} lengths: llama.cpp has one")
        wrong = [i for i, layer in enumerate(config.layers) if layer.window and (i + 1) % arch.period == 0]
        if windows:
            wrong += [i for i, layer in enumerate(config.layers) if not layer.window and (i + 1) % arch.period]
        if wrong:
            found.append(
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
            found.append(f"the position encoding of layer {index}: llama.cpp has another one there")
            break
    if config.family == "gemma3_text":
        local = config.rotary[1]
        if local != RopeConfig(theta=_GEMMA3_LOCAL_THETA):
            found.append(f"rope_local_base_freq = {local.theta:g}: llama.cpp has {_GEMMA3_LOCAL_THETA:g}")
    return found


def hyperparameters(config: DecoderConfig, arch: Architecture) -> tuple[dict[str, Any], list[str]]:
    """The metadata by which llama.cpp knows a model's sizes and constants, for the GGUF file of a model.

    Args:
      config: the model's.
      arch: its architecture, as `architecture` returns it.
    Returns:
      ({key: value}, notes for the user: one if the model has sliding windows and llama.cpp's architecture none, so that
        no longer context than the smallest window is written; one for longrope, whose factors llama.cpp chooses by the
        size of its context; and one for yarn without truncation, whose logits differ slightly). In the file a key
        begins with the architecture's name and a dot, which these keys do not have; ints are stored as uint32, floats
        as float32, and texts as such. A list (Gemma 4) has a value for each layer; its ints are stored as int32.
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
    """The metadata of a rotary embedding's scaling, {key: value} with keys rope.scaling.* that do not have the prefix
    with the architecture's name. It is {} for kinds other than linear, yarn and longrope: their frequencies follow from
    the base, or from factors that are tensors of the file (`rope_factors`).

    Args:
      config: the model's, of which max_position_embeddings and the head size are read.
      rope: its rotary embedding, the first one if it has several.
      notes: sentences for the user on where llama.cpp computes otherwise. It is changed in place: one is appended for
        longrope, and for a yarn whose bounds are not rounded.
    """
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


def rope_factors(config: DecoderConfig) -> dict[str, np.ndarray]:
    """The factors by which llama.cpp divides the rotary frequencies, which it reads as tensors of the file: {tensor's
    name in the file: float32[rotary dims / 2], or, for the proportional kind, float32[head size / 2]}. They are one
    tensor for rotary embeddings of kind llama3, two for longrope (for long and for short contexts), and one for the
    proportional kind of Gemma 4's global layers; {} for other kinds. config: the model's, whose first rotary embedding
    is read. gguf_tensors.of_model writes them first."""
    rope = config.rotary[0]
    if rope.kind == "proportional":
        return {"rope_freqs.weight": gemma4.frequency_factors(rope, config.head_dim)}
    if rope.kind == "longrope":
        return {
            "rope_factors_long.weight": np.asarray(rope.long_factor, np.float32),
            "rope_factors_short.weight": np.asarray(rope.short_factor, np.float32),
        }
    if rope.kind == "llama3":
        plain = dataclasses.replace(rope, kind="default")
        base = rotary_frequencies(plain, config.head_dim, config.max_position_embeddings).short
        scaled = rotary_frequencies(rope, config.head_dim, config.max_position_embeddings).short
        return {"rope_freqs.weight": (base / scaled).astype(np.float32)}
    return {}
