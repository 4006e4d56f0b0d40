"""Gemma 3, text only: five sliding layers to one full one, each kind with a rotary base of its own; normed q and k."""

from __future__ import annotations

from jaxtune.models.config import DecoderConfig, LayerSpec
from jaxtune.models.families import common

NORMS = common.GEMMA_NORMS
_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "final_logit_softcapping": None,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}
_THETA = {common.FULL: 1_000_000.0, common.SLIDING: 10_000.0}
_KINDS = (common.FULL, common.SLIDING)  # LayerSpec.rotary is the index in here


def _rotary(hf: dict, kind: str):
    if kind == common.FULL:
        own = {"rope_theta": _THETA[kind], **hf}
    else:  # rope_scaling is for the full layers
        theta = hf.get("rope_local_base_freq", _THETA[kind])
        own = {"rope_theta": theta, "rope_parameters": hf.get("rope_parameters")}
    return common.rope_config(hf, common.rope_parameters(own, kind))


def from_hf(hf: dict) -> DecoderConfig:
    hf = _DEFAULTS | hf
    kinds = common.layer_kinds(hf, common.pattern_kinds(hf))
    windows = common.layer_windows(hf, kinds)
    return common.decoder_config(
        hf,
        layers=tuple(LayerSpec(window, _KINDS.index(kind)) for window, kind in zip(windows, kinds, strict=True)),
        rotary=tuple(_rotary(hf, kind) for kind in _KINDS),
        qk_norm="head",
        **common.gemma_features(hf),
    )


def to_hf(config: DecoderConfig) -> dict:
    local = config.rotary[1]
    if local.kind != "default":
        raise ValueError(f"Gemma 3: the rotary base of sliding layers has kind {local.kind!r}; only 'default' is saved")
    windows = {layer.window for layer in config.layers if layer.rotary == 1}
    if len(windows) > 1:
        raise ValueError("a Gemma 3 config holds one sliding_window; these layers differ")
    return common.hf_config(
        config,
        "Gemma3ForCausalLM",
        **common.gemma_to_hf(config),
        rope_local_base_freq=local.theta,
        layer_types=[_KINDS[layer.rotary or 0] for layer in config.layers],
        sliding_window=(windows.pop() if windows else None) or config.max_position_embeddings,
        attn_logit_softcapping=None,
    )
