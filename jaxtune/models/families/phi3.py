"""Phi-3, Phi-3.5 and Phi-4: q/k/v and gate/up are one matrix each; longrope; a part of each head may not rotate."""

from __future__ import annotations

from jaxtune.models.config import DecoderConfig, LayerSpec
from jaxtune.models.families import common

NORMS = common.LLAMA_NORMS
_DEFAULTS = {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None}


def from_hf(hf: dict) -> DecoderConfig:
    hf = _DEFAULTS | hf
    kind = common.FULL if hf["sliding_window"] is None else common.SLIDING
    windows = common.layer_windows(hf, [kind] * common.require(hf, "num_hidden_layers"))
    rope = common.rope_parameters(hf)
    if rope["rope_type"] in ("su", "yarn"):  # what early files call longrope
        rope["rope_type"] = "longrope"
    return common.decoder_config(
        hf,
        layers=tuple(LayerSpec(window) for window in windows),
        rotary=(common.rope_config(hf, rope),),
        fused_qkv=True,
        fused_gate_up=True,
    )


def to_hf(config: DecoderConfig) -> dict:
    windows = {layer.window for layer in config.layers}
    if len(windows) > 1:
        raise ValueError("a Phi-3 config holds one sliding_window for all layers; these layers differ")
    rope = config.rotary[0]
    original = rope.original_max_position_embeddings or config.max_position_embeddings
    scaling = None
    if rope.kind == "longrope":
        # Exactly these keys: transformers 4 refuses others.
        scaling = {"type": "longrope", "short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
        if rope.attention_factor is not None or rope.factor != config.max_position_embeddings / original:
            scaling |= {"factor": rope.factor, "attention_factor": rope.attention_factor}
    elif rope.kind != "default":
        raise ValueError(f"Phi-3: rotary kind {rope.kind!r} cannot be saved; only default and longrope can")
    return common.hf_config(
        config,
        "Phi3ForCausalLM",
        sliding_window=windows.pop(),
        rope_scaling=scaling,
        original_max_position_embeddings=original,
        partial_rotary_factor=rope.partial_rotary_factor,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
