"""OLMo 3: OLMo 2 with a window in three of four layers; only the others stretch their rotary base."""

from __future__ import annotations

from jaxtune.models.config import DecoderConfig, LayerSpec, RopeConfig
from jaxtune.models.families import common

NORMS = common.POST_NORMS
_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096, "sliding_window_pattern": 4}
_KINDS = (common.FULL, common.SLIDING)  # LayerSpec.rotary is the index in here


def _rotary(hf: dict, kind: str) -> RopeConfig:
    given = common.rope_parameters(hf, kind)
    if kind == common.SLIDING and not isinstance((hf.get("rope_parameters") or {}).get(kind), dict):
        # One for all layers, of which only full ones are stretched.
        given = {"rope_theta": given["rope_theta"], "rope_type": "default"}
    return common.rope_config(hf, given)


def from_hf(hf: dict) -> DecoderConfig:
    hf = _DEFAULTS | hf
    kinds = common.layer_kinds(hf, common.pattern_kinds(hf))
    windows = common.layer_windows(hf, kinds)
    return common.decoder_config(
        hf,
        layers=tuple(LayerSpec(window, _KINDS.index(kind)) for window, kind in zip(windows, kinds, strict=True)),
        rotary=tuple(_rotary(hf, kind) for kind in _KINDS),
        **common.olmo_features(hf),
    )


def to_hf(config: DecoderConfig) -> dict:
    windows = {layer.window for layer in config.layers if layer.rotary == 1}
    if len(windows) > 1 or any(layer.window for layer in config.layers if layer.rotary != 1):
        raise ValueError("an OLMo 3 config holds one sliding_window, of the layers with the second rotary base")
    ropes = zip(_KINDS, config.rotary, strict=True)
    return common.hf_config(
        config,
        "Olmo3ForCausalLM",
        attention_bias=config.qkv_bias,
        layer_types=[_KINDS[layer.rotary or 0] for layer in config.layers],
        sliding_window=(windows.pop() if windows else None) or config.max_position_embeddings,
        # Beside rope_scaling, which transformers 4 reads: 5 would read another base of sliding layers from that alone.
        rope_parameters={
            kind: {"rope_theta": rope.theta} | (common.rope_to_hf(rope) or {"rope_type": "default"})
            for kind, rope in ropes
        },
    )
