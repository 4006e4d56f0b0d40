"""SmolLM3: Llama in which every fourth layer has no position encoding."""

from __future__ import annotations

from jaxtune.models.config import DecoderConfig, LayerSpec
from jaxtune.models.families import common

NORMS = common.LLAMA_NORMS
_DEFAULTS = {
    "num_key_value_heads": 4,
    "rope_theta": 2_000_000.0,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
}


def from_hf(hf: dict) -> DecoderConfig:
    hf = _DEFAULTS | hf
    count, every = common.require(hf, "num_hidden_layers"), hf["no_rope_layer_interval"]
    rotates = hf.get("no_rope_layers") or [
        int((i + 1) % every != 0) for i in range(count)
    ]  # 1: rotates, despite its name
    if len(rotates) != count:
        raise ValueError(f"config.json: no_rope_layers has {len(rotates)} entries, num_hidden_layers is {count}")
    slides = bool(hf.get("use_sliding_window")) and hf.get("sliding_window") is not None
    default = [common.SLIDING if slides and not rotate else common.FULL for rotate in rotates]
    kinds = common.layer_kinds(hf, default)
    windows = common.layer_windows(hf, kinds)
    bias = bool(hf.get("attention_bias", False))
    return common.decoder_config(
        hf,
        layers=tuple(LayerSpec(w, 0 if rotate else None) for w, rotate in zip(windows, rotates, strict=True)),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias", False)),
    )


def to_hf(config: DecoderConfig) -> dict:
    windows = common.windows_to_hf(config)
    return common.hf_config(
        config,
        "SmolLM3ForCausalLM",
        attention_bias=config.qkv_bias,
        mlp_bias=config.mlp_bias,
        no_rope_layers=[int(layer.rotary is not None) for layer in config.layers],
        use_sliding_window=windows["sliding_window"] is not None,
        **windows,
    )
