"""The keys of config.json that all families have (COMMON), and keys, defaults and fields that several have."""

from __future__ import annotations

import functools
from typing import Any, Literal

from jaxtune.models import values
from jaxtune.models.config import LayerSpec, MoEConfig
from jaxtune.models.families.common import rope
from jaxtune.models.families.common.key import REQUIRED, Conversion, Entry, Key, Record
from jaxtune.models.families.common.layers import LayerType, LayerTypes, any_count
from jaxtune.models.layers.delta_net import DeltaNetShape

ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh", "gelu"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}
_HF_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu"}
ACTIVATION = Conversion(ACTIVATIONS.__getitem__, _HF_ACTIVATIONS.__getitem__)


def check_activation(key: str, value: Any) -> None:
    """Raises ValueError unless ACTIVATIONS has the name."""
    values.text(key, value)
    if value not in ACTIVATIONS:
        raise ValueError(f"{key} {value!r} is not supported; supported: {', '.join(ACTIVATIONS)}")


def check_window_pattern(key: str, value: Any) -> None:
    """Raises ValueError unless it is a number of layers, or repeated letters L and G, as in EXAONE 4 ("LLLG")."""
    if not isinstance(value, str):
        values.whole(key, value)
    elif not value or set(value) - set("LG"):
        raise ValueError(f"{key} {value!r}: must be a count, or letters L and G")


def _token(name: str) -> Key:
    """A special token's id or ids, only checked. Null is written, or the Hugging Face class takes its default."""
    return Key(name, (), values.token_ids, None, written=lambda config: None)


COMMON: tuple[Entry, ...] = (
    Key("model_type", "family", values.text),
    Key("vocab_size", "vocab_size", values.whole),
    Key("hidden_size", "hidden_size", values.whole),
    Key("intermediate_size", "intermediate_size", values.whole),
    Key(
        "num_hidden_layers",
        "layers",
        functools.partial(values.whole, most=values.MOST_LAYERS),
        conversion=Conversion(lambda count: (LayerSpec(),) * count, len),
    ),
    Key("num_attention_heads", "num_heads", values.whole),
    Key(
        "num_key_value_heads",
        "num_kv_heads",
        values.whole,
        lambda hf: hf["num_attention_heads"],
        null=lambda hf: hf["num_attention_heads"],
    ),
    Key("head_dim", "head_dim", values.whole, lambda hf: hf["hidden_size"] // hf["num_attention_heads"]),
    Key("hidden_act", "activation", check_activation, "silu", conversion=ACTIVATION, null=REQUIRED),
    Key("max_position_embeddings", "max_position_embeddings", values.whole),
    Key("rms_norm_eps", "norm_eps", values.positive, 1e-6),
    Key("initializer_range", "initializer_range", values.not_negative, 0.02),
    Key("tie_word_embeddings", "tie_embeddings", values.boolean, False),
    rope.Rotary(),
    Key("architectures", (), values.texts, ()),
    Key("id2label", (), values.mapping, None),
    _token("bos_token_id"),
    _token("eos_token_id"),
    _token("pad_token_id"),
)
WRITTEN = {"attention_dropout": 0.0, "use_cache": True}
# If one of these is set, it changes what the model computes in a way that is not supported. A family whose entries read
# one of them checks it itself (Gemma 4: use_bidirectional_attention).
REFUSED = ("use_mrope", "use_bidirectional_attention", "is_encoder_decoder", "add_cross_attention")
REFUSED_WITHOUT_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")

ATTENTION_BIAS = Key("attention_bias", ("qkv_bias", "out_bias"), values.boolean, False)
MLP_BIAS = Key("mlp_bias", "mlp_bias", values.boolean, False)
WINDOW_PATTERN = Key("sliding_window_pattern", (), check_window_pattern)

# Of Gemma 2 to 4.
GEMMA_ACTIVATION = (
    Key("hidden_activation", "activation", check_activation, "gelu_pytorch_tanh", conversion=ACTIVATION),
    Key("hidden_act", (), values.text, None, written=lambda config: _HF_ACTIVATIONS[config.activation]),
)
SOFT_CAP = Key("final_logit_softcapping", "final_soft_cap", values.positive, None, null=None)


def _whole(number: float) -> float:
    """256.0 -> 256, as published files have it."""
    return int(number) if number == int(number) else number


# Of Gemma 2 and 3.
GEMMA = (
    *GEMMA_ACTIVATION,
    Key(
        "query_pre_attn_scalar",
        "attention_scale",
        values.positive,
        256,
        conversion=Conversion(lambda scalar: scalar**-0.5, lambda scale: _whole(round(scale**-2, 6))),
    ),
    SOFT_CAP,
    ATTENTION_BIAS,
)
GEMMA_DEFAULTS = {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "tie_word_embeddings": True}
GEMMA_FIELDS = {"embedding_scale": lambda hf: hf["hidden_size"] ** 0.5, "norm_offset": 1.0}

# The keys of the routers' losses, which are the same in every family of transformers.
_ROUTER = (
    Key("router_aux_loss_coef", "router_aux_loss_coef", values.not_negative, 0.001),
    Key("output_router_logits", "output_router_logits", values.boolean, False),
)
EXPERTS_PER_TOKEN = Key("num_experts_per_tok", "experts_per_token", values.whole)
NORM_TOPK_PROB = Key("norm_topk_prob", "renormalize", values.boolean, False)
EXPERT_SIZE = Key("moe_intermediate_size", "expert_size", values.whole)


def experts(*keys: Key, **fixed) -> Record:
    """The entry for a family's experts; num_experts_per_tok and the keys of the router's losses are added.

    fixed: {field of MoEConfig: its value in all models}.
    """
    return Record(MoEConfig, (*keys, EXPERTS_PER_TOKEN, *_ROUTER), fixed, field="moe")


def local_experts(*keys: Key, **fixed) -> Record:
    """Experts as in Mixtral and gpt-oss: num_local_experts of intermediate_size."""
    count = Key("num_local_experts", "num_experts", any_count)
    return experts(count, Key("intermediate_size", "expert_size", values.whole), *keys, **fixed)


def shared_experts(*keys: Key, **fixed) -> Record:
    """Experts as in Qwen's families with a shared expert."""
    shared = Key("shared_expert_intermediate_size", "shared_size", values.whole)
    return experts(Key("num_experts", "num_experts", any_count), EXPERT_SIZE, shared, *keys, **fixed)


def _check_silu(key: str, value: Any) -> None:
    values.text(key, value)
    if value != "silu":
        raise ValueError(f"{key} {value!r}: a gated delta net's convolution ends in silu")


def _check_gate(key: str, value: Any) -> None:
    values.boolean(key, value)
    if not value:
        raise ValueError(
            f"{key} = {value!r} is not supported: q_proj has a gate for each head in every model of this family that "
            "transformers knows"
        )


def _every_fourth_full(hf) -> list[str]:
    every = hf["full_attention_interval"]
    return [rope.LINEAR if (index + 1) % every else rope.FULL for index in range(hf["num_hidden_layers"])]


def delta_net(fused: bool = False) -> tuple[Entry, ...]:
    """The entries of Qwen3-Next and Qwen3.5 for layers with gated delta nets ("linear_attention") and with attention.

    fused: DeltaNetShape.fused.
    """
    shape = Record(
        DeltaNetShape,
        (
            Key("linear_num_key_heads", "key_heads", values.whole, 16),
            Key("linear_num_value_heads", "heads", values.whole, 32),
            Key("linear_key_head_dim", "key_dim", values.whole, 128),
            Key("linear_value_head_dim", "value_dim", values.whole, 128),
            Key("linear_conv_kernel_dim", "taps", values.whole, 4),
        ),
        {"fused": fused},
    )
    types = (LayerType(rope.FULL), LayerType(rope.LINEAR, mixer=shape))
    return (
        Key("hidden_act", "activation", _check_silu, "silu", null=REQUIRED),
        Key("attn_output_gate", (), _check_gate, True),
        Key("full_attention_interval", (), values.whole, 4),
        LayerTypes(_every_fourth_full, types),
        ATTENTION_BIAS,
        rope.PARTIAL_ROTARY,
    )


DELTA_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25}
QWEN_TOWER = ("model.visual.", "visual.")
QWEN_PASSTHROUGH = (*QWEN_TOWER, "mtp.")  # and of multi-token prediction layers
DELTA_FIELDS = {"attention_gate": True, "qk_norm": "head", "norm_offset": 1.0}
