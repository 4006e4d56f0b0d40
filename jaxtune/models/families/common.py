"""What the family files share: reading a Hugging Face config with clear refusals, and naming tensors.

A family module has

  from_hf(hf: dict) -> DecoderConfig     from a config.json, in the spelling of transformers 4 or 5
  to_hf(config) -> dict                  what transformers needs to load the model
  NORMS: dict[str, str]                  name of a Block's norm (or router) -> its name in the checkpoint
  EXPERT_FILES: ExpertFiles              where checkpoints hold a linear for each expert and matrix

Our weights are stored as Hugging Face stores them ([out, in]), so tensors map one to one without a transpose.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtune.models.config import (
    POST_NORM,
    PRE_AND_POST_NORM,
    DecoderConfig,
    LayerSpec,
    MoEConfig,
    PartConfig,
    RopeConfig,
)
from jaxtune.models.layers.delta_net import DeltaNetShape
from jaxtune.models.layers.mlp import MLPShape

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_HF_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu"}
_ROPE_KINDS = ("default", "linear", "llama3", "longrope", "yarn")
# Present and true, each changes the mathematics in a way that no family here speaks.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_UNSUPPORTED = (
    "use_mrope",
    "use_bidirectional_attention",
    "is_encoder_decoder",
    "add_cross_attention",
)

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
LLAMA_NORMS = {"mixer_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
POST_NORMS = {"mixer_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
GEMMA_NORMS = {
    "mixer_norm": "input_layernorm",
    "mixer_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


# Of the routers' losses; the same in every family of transformers.
ROUTER_DEFAULTS = {"router_aux_loss_coef": 0.001, "output_router_logits": False}


@dataclasses.dataclass(frozen=True)
class ExpertFiles:
    """Names in a checkpoint: model.layers.N.<module>.experts.<expert>.<gate, up or down>.weight"""

    module: str
    gate: str
    up: str
    down: str


def refuse(hf: Mapping[str, Any], *keys: str) -> None:
    """Raises ValueError where one of the keys is there and set."""
    for key in keys:
        if hf.get(key):
            raise ValueError(f"config.json: {key} = {hf[key]!r} is not supported (model_type {hf.get('model_type')!r})")


def require(hf: Mapping[str, Any], key: str) -> Any:
    """hf[key], or an error that names the key."""
    if hf.get(key) is None:
        raise ValueError(f"config.json of a {hf.get('model_type')!r} model lacks {key!r}")
    return hf[key]


def activation(hf: Mapping[str, Any], key: str = "hidden_act") -> str:
    """Our name of the activation that `key` names; without it, silu, as transformers has it of most classes."""
    name = require({key: "silu", **hf}, key)
    if name not in ACTIVATIONS:
        raise ValueError(f"config.json: {key} {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def layer_kinds(hf: Mapping[str, Any], default: Sequence[str], known: Sequence[str] = (FULL, SLIDING)) -> list[str]:
    """One of `known` for each layer: layer_types, or `default` where the config has none."""
    kinds = list(hf.get("layer_types") or default)
    count = require(hf, "num_hidden_layers")
    if len(kinds) != count:
        raise ValueError(f"config.json: layer_types has {len(kinds)} entries, num_hidden_layers is {count}")
    for kind in set(kinds) - set(known):
        raise ValueError(f"config.json: layer_types {kind!r} is not supported; supported: {', '.join(known)}")
    return kinds


def pattern_kinds(hf: Mapping[str, Any]) -> list[str]:
    """Kinds of layers by sliding_window_pattern: n for n - 1 sliding layers to a full one, or letters as in LLLG, local
    and global layers, which repeat."""
    pattern, count = hf["sliding_window_pattern"], require(hf, "num_hidden_layers")
    if isinstance(pattern, int):
        return [SLIDING if (index + 1) % pattern else FULL for index in range(count)]
    if not pattern or set(pattern) - set("LG"):
        raise ValueError(f"config.json: sliding_window_pattern {pattern!r}: must be a count, or letters L and G")
    return [{"L": SLIDING, "G": FULL}[pattern[index % len(pattern)]] for index in range(count)]


def layer_windows(hf: Mapping[str, Any], kinds: Sequence[str]) -> list[int | None]:
    """The window of each layer: sliding_window in sliding layers.

    A window at least as long as the context is full attention, and said so: full attention has faster kernels.
    """
    window = hf.get("sliding_window")
    if SLIDING in kinds and (not isinstance(window, int) or window < 1):
        raise ValueError(f"config.json: layer_types has {SLIDING}, but sliding_window is {window!r}")
    if window is not None and window >= require(hf, "max_position_embeddings"):
        window = None
    return [window if kind == SLIDING else None for kind in kinds]


def rope_parameters(hf: Mapping[str, Any], layer_type: str | None = None) -> dict[str, Any]:
    """Rotary parameters as one flat dict, from rope_parameters (transformers 5) or rope_theta and rope_scaling (4); of
    both in one config transformers goes by rope_scaling.

    layer_type: which entry, where rope_parameters holds one dict for each kind of layer; rope_scaling then changes that
      of full layers.
    """
    scaling, parameters = (hf.get(key) or {} for key in ("rope_scaling", "rope_parameters"))
    both = scaling or parameters
    if layer_type is not None and isinstance(parameters.get(layer_type), Mapping):
        both = {**parameters[layer_type], **(scaling if layer_type == FULL else {})}
    given = {key: hf[key] for key in ("rope_theta", "partial_rotary_factor") if hf.get(key) is not None}
    given |= {key: value for key, value in both.items() if value is not None}
    given["rope_type"] = given.get("rope_type") or given.get("type") or "default"
    return given


def rope_config(hf: Mapping[str, Any], given: Mapping[str, Any]) -> RopeConfig:
    """RopeConfig from rope_parameters' dict; defaults as in transformers' modeling_rope_utils."""
    kind = given["rope_type"]
    if kind not in _ROPE_KINDS:
        raise ValueError(f"config.json: rope_type {kind!r} is not supported; supported: {', '.join(_ROPE_KINDS)}")
    positions = require(hf, "max_position_embeddings")
    rope: dict[str, Any] = {"theta": float(given.get("rope_theta", 10000.0)), "kind": kind}
    rope["partial_rotary_factor"] = float(given.get("partial_rotary_factor", 1.0))
    dim = int(head_dim(hf) * rope["partial_rotary_factor"])
    if dim < 2 or dim % 2:
        raise ValueError(
            f"config.json: the rotary dimension, head_dim x partial_rotary_factor, is {dim}: it must be even, not 0"
        )
    if kind == "default":
        return RopeConfig(**rope)

    def number(key):
        if given.get(key) is None:
            raise ValueError(f"config.json: rope_type {kind!r} needs {key!r} beside it")
        return float(given[key])

    if kind == "linear":
        return RopeConfig(**rope, factor=number("factor"))
    original = hf.get("original_max_position_embeddings") or given.get("original_max_position_embeddings") or positions
    rope["original_max_position_embeddings"] = int(original)
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        return RopeConfig(**rope, factor=number("factor"), low_freq_factor=low, high_freq_factor=high)
    rope["factor"] = float(given.get("factor") or positions / original)
    rope["attention_factor"] = given.get("attention_factor")
    if kind == "longrope":
        for key in ("short_factor", "long_factor"):
            values = given.get(key)
            if not isinstance(values, list | tuple) or len(values) != dim // 2:
                found = len(values) if isinstance(values, list | tuple) else values
                raise ValueError(f"config.json: longrope's {key} must be {dim // 2} numbers, not {found}")
            rope[key] = tuple(float(value) for value in values)
        return RopeConfig(**rope)
    mscale, mscale_all = given.get("mscale"), given.get("mscale_all_dim")
    if rope["attention_factor"] is None and mscale and mscale_all and rope["factor"] > 1:
        log = 0.1 * math.log(rope["factor"])
        rope["attention_factor"] = (mscale * log + 1) / (mscale_all * log + 1)
    rope |= {key: float(given[key]) for key in ("beta_fast", "beta_slow") if given.get(key)}
    return RopeConfig(**rope, truncate=given.get("truncate", True))


def head_dim(hf: Mapping[str, Any]) -> int:
    """head_dim, or hidden_size / num_attention_heads where the config leaves it out."""
    return hf.get("head_dim") or require(hf, "hidden_size") // require(hf, "num_attention_heads")


def decoder_config(hf: Mapping[str, Any], **features) -> DecoderConfig:
    """The part of from_hf that all families share; `features` are the family's own fields of DecoderConfig, and
    `stages`, what all layers are made of, if not attention and MLP with a norm before each."""
    refuse(hf, *_UNSUPPORTED, *(() if "moe" in features else _EXPERTS))
    heads, dim = require(hf, "num_attention_heads"), head_dim(hf)
    layers = features.pop("layers", None) or (LayerSpec(),) * require(hf, "num_hidden_layers")
    stages = features.pop("stages", None)
    if stages is not None:
        layers = tuple(dataclasses.replace(layer, stages=stages) for layer in layers)
    fields = {
        "family": require(hf, "model_type"),
        "vocab_size": require(hf, "vocab_size"),
        "hidden_size": require(hf, "hidden_size"),
        "intermediate_size": require(hf, "intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": dim,
        "layers": layers,
        "max_position_embeddings": require(hf, "max_position_embeddings"),
        "attention_scale": dim**-0.5,
        "norm_eps": hf.get("rms_norm_eps", 1e-6),
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "initializer_range": hf.get("initializer_range", 0.02),
    }
    if "rotary" not in features:
        features["rotary"] = (rope_config(hf, rope_parameters(hf)),)
    if "activation" not in features:
        features["activation"] = activation(hf)
    return DecoderConfig(**(fields | features))


def rope_to_hf(rope: RopeConfig) -> dict[str, Any] | None:
    """rope_scaling of a RopeConfig; None for the default kind."""
    if rope.kind == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "linear":
        return scaling
    scaling["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.kind == "llama3":
        return scaling | {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.attention_factor is not None:
        scaling["attention_factor"] = rope.attention_factor
    if rope.kind == "longrope":
        return scaling | {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
    return scaling | {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}


def hf_config(config: DecoderConfig, architecture: str, **features) -> dict[str, Any]:
    """The part of to_hf that all families share, in the spelling that transformers 4 and 5 both read."""
    rope = config.rotary[0]
    features |= config.head.hf_config()
    return {
        "architectures": [config.head.architecture_of(architecture)],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": _HF_ACTIVATIONS[config.activation],
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": rope_to_hf(rope),
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": 0.0,
        "use_cache": True,
        # Where a config has no token ids, the Hugging Face class brings its own, past the end of a small vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    } | features


def windows_to_hf(config: DecoderConfig, always: bool = False) -> dict[str, Any]:
    """sliding_window and layer_types of a config.

    always: transformers' class needs a window where no layer has one, too: it is written as long as the context, which
      layer_windows reads as none.
    """
    windows = {layer.window for layer in config.layers if layer.window is not None}
    if len(windows) > 1:
        raise ValueError(f"layers have different windows {sorted(windows)}: Hugging Face configs hold one")
    kinds = [FULL if layer.window is None else SLIDING for layer in config.layers]
    window = config.max_position_embeddings if always else None
    return {"sliding_window": windows.pop() if windows else window, "layer_types": kinds}


def global_nope_layers(hf: Mapping[str, Any], kinds: Sequence[str]) -> tuple[LayerSpec, ...]:
    """Layers of which those with full attention have no position encoding."""
    windows = layer_windows(hf, kinds)
    return tuple(LayerSpec(w, 0 if kind == SLIDING else None) for w, kind in zip(windows, kinds, strict=True))


def global_nope_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """sliding_window and layer_types of global_nope_layers."""
    windows = {layer.window for layer in config.layers if layer.rotary is not None}
    if len(windows) > 1 or any(layer.window for layer in config.layers if layer.rotary is None):
        raise ValueError(
            f"a {config.family} config holds one sliding_window, of all layers with a position encoding and of no other"
        )
    # What layer_windows reads as no window is written as one that is as long as the context.
    window = (windows.pop() if windows else None) or config.max_position_embeddings
    kinds = [FULL if layer.rotary is None else SLIDING for layer in config.layers]
    return {"sliding_window": window, "layer_types": kinds}


def upper_windows(hf: Mapping[str, Any]) -> list[int | None]:
    """Qwen's windows: with use_sliding_window, the layers from max_window_layers up."""
    slides = bool(hf.get("use_sliding_window", False))
    first, count = hf.get("max_window_layers", 28), require(hf, "num_hidden_layers")
    window = hf.get("sliding_window", 4096) if slides else None
    default = [SLIDING if window is not None and index >= first else FULL for index in range(count)]
    return layer_windows({**hf, "sliding_window": window}, layer_kinds(hf, default))


def upper_windows_to_hf(config: DecoderConfig) -> dict[str, Any]:
    windows = windows_to_hf(config)
    kinds = windows["layer_types"]
    return windows | {
        "use_sliding_window": SLIDING in kinds,
        "max_window_layers": kinds.index(SLIDING) if SLIDING in kinds else len(kinds),
    }


def gemma_features(hf: Mapping[str, Any]) -> dict[str, Any]:
    """What Gemma 2 and 3 have in common, as fields of DecoderConfig."""
    bias = bool(hf.get("attention_bias", False))
    return {
        "attention_scale": hf["query_pre_attn_scalar"] ** -0.5,
        "final_soft_cap": hf["final_logit_softcapping"],
        "activation": activation(hf, "hidden_activation"),
        "embedding_scale": require(hf, "hidden_size") ** 0.5,
        "norm_offset": 1.0,
        "stages": PRE_AND_POST_NORM,
        "qkv_bias": bias,
        "out_bias": bias,
    }


def olmo_features(hf: Mapping[str, Any]) -> dict[str, Any]:
    """What OLMo 2 and 3 have in common, as fields of DecoderConfig."""
    bias = bool(hf.get("attention_bias", False))
    norms = {"stages": POST_NORM, "qk_norm": "projection", "float32_norm": True}
    return {"qkv_bias": bias, "out_bias": bias, **norms}


def gemma_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": round(config.attention_scale**-2),
        "final_logit_softcapping": config.final_soft_cap,
        "hidden_activation": _HF_ACTIVATIONS[config.activation],
        "attention_bias": config.qkv_bias,
    }


DELTA_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_act": "silu",
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_DELTA_KEYS = {
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
    "linear_conv_kernel_dim": "taps",
}


def delta_config(
    hf: Mapping[str, Any], feed_forwards: Mapping[int, PartConfig] | None = None, together: bool = False, **features
) -> DecoderConfig:
    """decoder_config of Qwen3-Next and Qwen3.5, gated delta nets with gated attention in every fourth layer.

    Args:
      hf: with DELTA_DEFAULTS. feed_forwards: of the layers that have one of their own.
      together: see DeltaNetShape.
    """
    count, every = require(hf, "num_hidden_layers"), hf["full_attention_interval"]
    default = [FULL if (index + 1) % every == 0 else LINEAR for index in range(count)]
    kinds = layer_kinds(hf, default, (FULL, LINEAR))
    shape = DeltaNetShape(**{ours: hf[theirs] for theirs, ours in _DELTA_KEYS.items()}, fused=together)
    mixers = {FULL: None, LINEAR: shape}
    layers = tuple(
        LayerSpec().replaced(mixer=mixers[kind], mlp=(feed_forwards or {}).get(index))
        for index, kind in enumerate(kinds)
    )
    if hf["hidden_act"] != "silu":
        raise ValueError(f"config.json: hidden_act {hf['hidden_act']!r}: a gated delta net's convolution ends in silu")
    if not hf.get("attn_output_gate", True):
        raise ValueError(
            f"config.json: attn_output_gate = {hf['attn_output_gate']!r} is not supported: q_proj has a gate for each "
            f"head in every {hf.get('model_type')!r} model that transformers knows"
        )
    bias = bool(hf.get("attention_bias", False))
    given = dict(attention_gate=True, qk_norm="head", norm_offset=1.0, qkv_bias=bias, out_bias=bias)
    return decoder_config(hf, layers=layers, **given, **features)


def delta_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """What delta_config reads beside decoder_config's keys."""
    mixers = [layer.config_of("mixer") for layer in config.layers]
    shapes = {mixer for mixer in mixers if isinstance(mixer, DeltaNetShape)}
    if len(shapes) > 1:
        raise ValueError(f"layers have different gated delta nets {shapes}: Hugging Face configs hold one")
    given = {theirs: getattr(shape, ours) for shape in shapes for theirs, ours in _DELTA_KEYS.items()}
    return given | {
        "attention_bias": config.qkv_bias,
        "layer_types": [FULL if mixer is None else LINEAR for mixer in mixers],
        "partial_rotary_factor": config.rotary[0].partial_rotary_factor,
    }


def shared_experts(hf: Mapping[str, Any], renormalize: bool) -> MoEConfig:
    """The experts of Qwen's families with a shared expert."""
    return MoEConfig(
        hf["num_experts"],
        hf["num_experts_per_tok"],
        hf["moe_intermediate_size"],
        renormalize=renormalize,
        shared_size=hf["shared_expert_intermediate_size"],
        router_aux_loss_coef=hf["router_aux_loss_coef"],
        output_router_logits=hf["output_router_logits"],
    )


def shared_experts_to_hf(moe: MoEConfig) -> dict[str, Any]:
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.expert_size,
        "shared_expert_intermediate_size": moe.shared_size,
        "router_aux_loss_coef": moe.router_aux_loss_coef,
        "output_router_logits": moe.output_router_logits,
    }


def mlp_layers(hf: Mapping[str, Any]) -> dict[int, PartConfig]:
    """The MLPs of a model with experts in only some layers, by layer: mlp_only_layers, decoder_sparse_step."""
    listed, step = hf.get("mlp_only_layers") or [], hf.get("decoder_sparse_step", 1)
    mlp = MLPShape(require(hf, "intermediate_size"))
    count = require(hf, "num_hidden_layers")
    return {index: mlp for index in range(count) if index in listed or (index + 1) % step}


def mlp_layers_to_hf(config: DecoderConfig) -> dict[str, Any]:
    listed = [index for index, layer in enumerate(config.layers) if layer.config_of("mlp") is not None]
    return {"mlp_only_layers": listed, "decoder_sparse_step": 1}


def tensor_name(
    path: Sequence[Any], norms: dict[str, str], layers: Sequence[LayerSpec] = (), head: str = "lm_head"
) -> str:
    """Hugging Face's name of the tensor at `path` in a Decoder: ("layers", 0, "mlp", "up_proj", "weight") -> ...

    layers: the decoder's, where any has parts of its own. head: the name of its head.
    """
    if path[0] == "layers":
        _, index, part, *rest = map(str, path)
        spec = layers[int(index)] if layers else LayerSpec()
        part = (spec.hf_names | {"layer_scalar": "layer_scalar"} | norms)[part]
        if rest[:1] == ["experts"]:  # all experts' matrices are tensors of one module, not modules
            rest = ["experts", rest[1] + ("_bias" if rest[2] == "bias" else "")]
        if rest[:1] == ["router"]:
            rest[0] = norms.get("router", "router")
        return ".".join(name for name in ("model.layers", index, part, *rest) if name)
    return {"embedding": "model.embed_tokens", "norm": "model.norm", "head": head}[str(path[0])] + f".{path[1]}"
