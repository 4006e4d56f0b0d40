"""The keys of config.json that all families have (COMMON; WRITTEN for those that are only written; REFUSED for those
that must not be set unless an entry of the family reads them), and keys, defaults and fields that several families
have, of which their files choose. `experts`, `local_experts` (Mixtral, gpt-oss) and `shared_experts` (Qwen) make the
entry for a family's experts, `delta_net` makes entries of Qwen3-Next and Qwen3.5, and `_token` the Key of a special
token. The functions with `check` in their names are checks of keys (Key.check)."""

from __future__ import annotations

import functools
from typing import Any

from jaxtune.models import values
from jaxtune.models.config import LayerSpec, MoEConfig
from jaxtune.models.families.common import rope
from jaxtune.models.families.common.key import Conversion, Entry, Key, Record
from jaxtune.models.families.common.layers import LayerType, LayerTypes, any_count
from jaxtune.models.layers.delta_net import DeltaNetShape

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_HF_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu"}
_ACTIVATION = Conversion(ACTIVATIONS.__getitem__, _HF_ACTIVATIONS.__getitem__)


def check_activation(key: str, value: Any) -> None:
    """Raises ValueError unless `value` is the name of a supported activation in config.json: "silu", "swish" (the
    same), "gelu_pytorch_tanh" or "gelu" (ACTIVATIONS). It is the Key.check of the common hidden_act and of Gemma's
    hidden_activation. key: what the error calls the value."""
    values.text(key, value)
    if value not in ACTIVATIONS:
        raise ValueError(f"{key} {value!r} is not supported; supported: {', '.join(ACTIVATIONS)}")


def check_window_pattern(key: str, value: Any) -> None:
    """Raises ValueError unless `value` is a sliding_window_pattern: a number of layers of at least 1, or a string of
    one or more letters L and G that is repeated over the layers, as in EXAONE 4 ("LLLG"). It is the Key.check of that
    key. key: what the error calls the value."""
    if not isinstance(value, str):
        values.whole(key, value)
    elif not value or set(value) - set("LG"):
        raise ValueError(f"{key} {value!r}: must be a count, or letters L and G")


def _token(name: str) -> Key:
    """The Key of a special token's id, or list of ids, named `name` in config.json (such as "eos_token_id"). Its value
    is only checked: the decoder computes nothing with it, so no field of DecoderConfig has it. Family.to_hf writes
    null, because without the key the Hugging Face class has a default that may exceed the vocabulary. models/hf.py puts
    the id in its place if the model's source or tokenizer gives it."""
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
    Key("hidden_act", "activation", check_activation, "silu", conversion=_ACTIVATION),
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
    Key("hidden_activation", "activation", check_activation, "gelu_pytorch_tanh", conversion=_ACTIVATION),
    Key("hidden_act", (), values.text, None, written=lambda config: _HF_ACTIVATIONS[config.activation]),
)
SOFT_CAP = Key("final_logit_softcapping", "final_soft_cap", values.positive, None, null=None)


def _whole(number: float) -> float:
    """A number that is whole as an int, any other one as it is. query_pre_attn_scalar is computed back from
    attention_scale as a float, and written by it as published files have it (256 and not 256.0)."""
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
    """The Record of a family's experts, for its table (Family.keys), which sets DecoderConfig.moe.

    Args:
      keys: the keys of config.json that differ between families, such as the number and size of experts;
        num_experts_per_tok and the keys of the router's losses are added.
      fixed: {field of MoEConfig: its value in all models of the family}.
    """
    return Record(MoEConfig, (*keys, EXPERTS_PER_TOKEN, *_ROUTER), fixed, field="moe")


def local_experts(*keys: Key, **fixed) -> Record:
    """The Record, for a family's table, of experts as in Mixtral and gpt-oss, whose number is the key num_local_experts
    and whose size is intermediate_size. keys: further keys of the family's experts. fixed: {field of MoEConfig: its
    value in all models of the family}."""
    count = Key("num_local_experts", "num_experts", any_count)
    return experts(count, Key("intermediate_size", "expert_size", values.whole), *keys, **fixed)


def shared_experts(*keys: Key, **fixed) -> Record:
    """The Record, for a family's table, of experts as in Qwen's families that have a shared expert. Their number is the
    key num_experts, their size moe_intermediate_size, and the shared one's size shared_expert_intermediate_size. keys:
    further keys of the family's experts. fixed: {field of MoEConfig: its value in all models of the family}."""
    shared = Key("shared_expert_intermediate_size", "shared_size", values.whole)
    return experts(Key("num_experts", "num_experts", any_count), EXPERT_SIZE, shared, *keys, **fixed)


def _check_silu(key: str, value: Any) -> None:
    """Raises ValueError unless the activation (`value`) is "silu", the only one that a gated delta net's convolution
    supports. It is the Key.check of hidden_act in models with delta nets. key: what the error calls the value."""
    values.text(key, value)
    if value != "silu":
        raise ValueError(f"{key} {value!r}: a gated delta net's convolution ends in silu")


def _check_gate(key: str, value: Any) -> None:
    """Raises ValueError unless attn_output_gate (`value`), by which q_proj gives each head a gate, is true, as in every
    known model of Qwen3-Next and Qwen3.5. It is the Key.check of that key. key: what the error calls the value."""
    values.boolean(key, value)
    if not value:
        raise ValueError(
            f"{key} = {value!r} is not supported: q_proj has a gate for each head in every model of this family that "
            "transformers knows"
        )


def _every_fourth_full(hf) -> list[str]:
    """The type of each layer ("full_attention" or "linear_attention") where each full_attention_interval-th layer has
    full attention and the others delta nets, by the config.json `hf`. It is declared as LayerTypes.default, for a file
    without layer_types."""
    every = hf["full_attention_interval"]
    return [rope.LINEAR if (index + 1) % every else rope.FULL for index in range(hf["num_hidden_layers"])]


def delta_net(fused: bool = False) -> tuple[Entry, ...]:
    """Returns the entries of Qwen3-Next and Qwen3.5 for layers with gated delta nets ("linear_attention" in
    layer_types) and layers with attention ("full_attention"), which the families' DELTA_FIELDS make gated. Without
    layer_types, every full_attention_interval-th layer has attention (every fourth one, if the file does not say). A
    family with experts adds their entries.

    fused: whether one matrix gives queries, keys, values and gates of a delta net, and another both rates (a and b, of
    which decay and beta are computed), as in Qwen3-Next; otherwise queries, keys and values have one matrix, and gates
    and each rate have one of their own, as in Qwen3.5.
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
        Key("hidden_act", "activation", _check_silu, "silu"),
        Key("attn_output_gate", (), _check_gate, True),
        Key("full_attention_interval", (), values.whole, 4),
        LayerTypes(_every_fourth_full, types),
        ATTENTION_BIAS,
        rope.PARTIAL_ROTARY,
    )


DELTA_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25}
QWEN_PASSTHROUGH = ("model.visual.", "visual.", "mtp.")  # of a vision tower, and of multi-token prediction layers
DELTA_FIELDS = {"attention_gate": True, "qk_norm": "head", "norm_offset": 1.0}
