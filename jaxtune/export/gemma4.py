"""Gemma 4 in GGUF files: llama.cpp's architecture "gemma4" reads each layer's settings instead of hard-coding a
pattern.
"""

from __future__ import annotations

from typing import Any

from jaxtune.models.config import DecoderConfig, LayerSpec
from jaxtune.models.layers.attention import AttentionShape
from jaxtune.models.layers.mlp import MLPShape

_GLOBAL, _SLIDING = 0, 1  # numbers of the rotary bases in DecoderConfig.rotary


def _attention(layer: LayerSpec) -> AttentionShape:
    """In what a layer's attention differs from the decoder's; None is the decoder's value."""
    shape = layer.config_of("mixer")
    return shape if isinstance(shape, AttentionShape) else AttentionShape()


def _slides(layer: LayerSpec) -> bool:
    """Whether a layer slides, by its rotary base: a window as long as the context is none in LayerSpec."""
    return layer.rotary == _SLIDING


def _mlp_size(config: DecoderConfig, layer: LayerSpec) -> int:
    """The width of a layer's MLP, the dense one beside experts."""
    shape = layer.config_of("mlp") or layer.config_of("dense")
    return shape.intermediate_size if isinstance(shape, MLPShape) else config.intermediate_size


def problems(config: DecoderConfig) -> list[str]:
    """A clause for everything that llama.cpp would compute differently."""
    reasons, shapes = [], [_attention(layer) for layer in config.layers]
    windows = {layer.window for layer in config.layers if layer.window is not None}
    if len(windows) > 1:
        reasons.append(f"sliding_window of {len(windows)} lengths: llama.cpp has one")
    wrong = [i for i, layer in enumerate(config.layers) if layer.window is not None and not _slides(layer)]
    if wrong:
        reasons.append(f"the position encoding of layer {wrong[0]}: llama.cpp has another one there")
    if config.rotary[_GLOBAL].kind != "proportional" or config.rotary[_SLIDING].kind != "default":
        reasons.append("rope_type: llama.cpp has 'proportional' in global layers and 'default' in the others")
    unshared_layers = sum(shape.takes_keys is None for shape in shapes)
    for index, shape in enumerate(shapes):
        # llama.cpp takes the keys and values of the last layer that has its own, or of the one before it.
        giver = unshared_layers - (2 if _slides(config.layers[index]) else 1)
        if shape.takes_keys is not None and (giver < 0 or shapes[giver].gives_keys != shape.takes_keys):
            reasons.append(
                f"num_kv_shared_layers: layer {index} does not take the keys of layer {giver}, as llama.cpp's"
            )
            break
    if config.per_layer_size and config.per_layer_vocab_size != config.vocab_size:
        reasons.append(
            f"vocab_size_per_layer_input = {config.per_layer_vocab_size}: llama.cpp has vocab_size, "
            f"{config.vocab_size}, there"
        )
    return reasons


def hyperparameters(config: DecoderConfig) -> dict[str, Any]:
    """{key: value} without the architecture's name, beyond or instead of what all have. A list has a value a layer."""
    shapes = [_attention(layer) for layer in config.layers]
    wide = next(shape.head_dim for layer, shape in zip(config.layers, shapes, strict=True) if not _slides(layer))
    wide = wide or config.head_dim
    heads = [shape.num_kv_heads or config.num_kv_heads for shape in shapes]
    widths = [_mlp_size(config, layer) for layer in config.layers]
    windows = [layer.window for layer in config.layers if layer.window is not None]
    return {
        "feed_forward_length": widths if len(set(widths)) > 1 else widths[0],
        "embedding_length_per_layer_input": config.per_layer_size or 0,
        "attention.head_count_kv": heads if len(set(heads)) > 1 else heads[0],
        "attention.key_length": wide,
        "attention.value_length": wide,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "attention.shared_kv_layers": sum(shape.takes_keys is not None for shape in shapes),
        "attention.sliding_window": max(windows, default=config.context_length),
        "attention.sliding_window_pattern": [_slides(layer) for layer in config.layers],
        "rope.dimension_count": wide,
        "rope.dimension_count_swa": config.head_dim,
        "rope.freq_base_swa": float(config.rotary[_SLIDING].theta),
        # Without the key llama.cpp caps the logits at 30; with 0 it does not cap them.
        "final_logit_softcapping": float(config.final_soft_cap or 0.0),
    }
