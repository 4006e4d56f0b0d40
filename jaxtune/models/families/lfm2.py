"""LFM2 and LFM2.5: gated short convolutions, attention with normed queries and keys in some layers, and MLPs."""

from __future__ import annotations

import functools

from jaxtune.models import values
from jaxtune.models.families.common import Config, Family, Fields, Key, LayerType, LayerTypes, Record
from jaxtune.models.families.common.layers import any_count
from jaxtune.models.families.common.rope import FULL
from jaxtune.models.layers.short_convolution import ShortConvolutionShape

_CONVOLUTION = Record(ShortConvolutionShape, (Key("conv_L_cache", "taps", values.whole, 3),))


def _types(hf: Config) -> list[str]:
    attends = hf["full_attn_idxs"]
    layers = range(hf["num_hidden_layers"])
    return [FULL if attends is None or index in attends else "conv" for index in layers]


def _check_bias(key: str, value: object) -> None:
    values.boolean(key, value)
    if value:
        raise ValueError(f"{key} = {value!r} is not supported: no published LFM2 has biases in its convolutions")


def _prepared(hf: Config) -> Fields:
    """intermediate_size as the MLP has it: two thirds of it, times a factor, up to a multiple, unless it is said to be
    right as it stands.
    """
    size = hf["intermediate_size"] if hf["block_ff_dim"] is None else hf["block_ff_dim"]
    if hf["block_auto_adjust_ff_dim"]:
        size, multiple = int(int(2 * size / 3) * hf["block_ffn_dim_multiplier"]), hf["block_multiple_of"]
        size = -(-size // multiple) * multiple
    tied = hf["tie_word_embeddings"] if hf["tie_embedding"] is None else hf["tie_embedding"]
    return {**hf, "intermediate_size": size, "tie_word_embeddings": tied}


FAMILY = Family(
    "lfm2",
    "Lfm2ForCausalLM",
    (
        Key("norm_eps", "norm_eps", values.positive, 1e-5),
        Key("tie_embedding", (), values.boolean, None, null=None, written=lambda config: config.tie_embeddings),
        Key("conv_bias", (), _check_bias, False),
        Key("block_ff_dim", (), values.whole, None, null=None),
        Key("block_multiple_of", (), values.whole, 256),
        Key("block_ffn_dim_multiplier", (), values.positive, 1.0),
        Key("block_auto_adjust_ff_dim", (), values.boolean, True, written=lambda config: False),
        Key("full_attn_idxs", (), functools.partial(values.items, check=any_count), None, null=None),
        LayerTypes(_types, (LayerType(FULL), LayerType("conv", rotary=0, mixer=_CONVOLUTION))),
    ),
    defaults={
        "intermediate_size": 12288,
        "num_key_value_heads": 8,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 128_000,
        "tie_word_embeddings": True,
    },
    fields={
        "qk_norm": "head",
        "activation": "silu",
        "module_names": (
            ("mlp", "feed_forward"),
            ("gate_proj", "w1"),
            ("up_proj", "w3"),
            ("down_proj", "w2"),
            ("o_proj", "out_proj"),
            ("q_norm", "q_layernorm"),
            ("k_norm", "k_layernorm"),
        ),
    },
    prepare=_prepared,
    norms={"mixer_norm": "operator_norm", "mlp_norm": "ffn_norm", "norm": "embedding_norm"},
)
