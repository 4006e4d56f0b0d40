"""What LFM2's families share: keys, defaults, names of modules and norms."""

from __future__ import annotations

import functools

from jaxtune.models import values
from jaxtune.models.families.common.key import Config, Fields, Key, Record
from jaxtune.models.families.common.layers import LayerType, LayerTypes, any_count
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


def tied(hf: Config) -> Fields:
    """tie_word_embeddings by its earlier name, too."""
    return dict(hf) if hf["tie_embedding"] is None else {**hf, "tie_word_embeddings": hf["tie_embedding"]}


KEYS = (
    Key("norm_eps", "norm_eps", values.positive, 1e-5),
    Key("tie_embedding", (), values.boolean, None, null=None, written=lambda config: config.tie_embeddings),
    Key("conv_bias", (), _check_bias, False),
    Key("full_attn_idxs", (), functools.partial(values.items, check=any_count), None, null=None),
    LayerTypes(_types, (LayerType(FULL), LayerType("conv", rotary=0, mixer=_CONVOLUTION))),
)
DEFAULTS = {
    "num_key_value_heads": 8,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 128_000,
    "tie_word_embeddings": True,
}
MODULES = (
    ("mlp", "feed_forward"),
    ("gate_proj", "w1"),
    ("up_proj", "w3"),
    ("down_proj", "w2"),
    ("o_proj", "out_proj"),
    ("q_norm", "q_layernorm"),
    ("k_norm", "k_layernorm"),
)
NORMS = {"mixer_norm": "operator_norm", "mlp_norm": "ffn_norm", "norm": "embedding_norm"}
