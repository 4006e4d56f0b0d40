"""One frozen dataclass that can say every supported family."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from flax import nnx

from jaxtune.models import values
from jaxtune.models.heads import TEXT, Head


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """A rotary base and how it is stretched; field names as in Hugging Face's rope_scaling.

    kind: "default"; "linear" (positions divided by factor); "llama3"; "longrope" (per-dimension factors, the long
    ones for a document that goes past the original context); "yarn". attention_factor multiplies cos and sin; None is
    the kind's own formula in factor (longrope, yarn). head_dim: of the heads that it rotates; None: the decoder's.
    llama_4_scaling_beta: queries are multiplied by 1 + beta ln(1 + floor(position / the original context)) (Llama 4,
    Ministral 3).
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "longrope", "yarn"] = "default"
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    head_dim: int | None = None
    llama_4_scaling_beta: float = 0.0

    def __post_init__(self):
        values.number("rope_theta", self.theta, above=1)
        for key in ("partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            values.positive(key, getattr(self, key))
        if self.partial_rotary_factor > 1:
            raise ValueError(f"partial_rotary_factor = {self.partial_rotary_factor}: must be at most 1, the whole head")
        values.whole("original_max_position_embeddings", self.original_max_position_embeddings, least=0)
        for key in ("short_factor", "long_factor"):
            values.items(key, getattr(self, key), values.positive)
        if self.attention_factor is not None:
            values.positive("attention_factor", self.attention_factor)
        values.boolean("truncate", self.truncate)
        values.not_negative("llama_4_scaling_beta", self.llama_4_scaling_beta)
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor = {self.high_freq_factor}: must be above low_freq_factor = {self.low_freq_factor}"
            )
        original = self.original_max_position_embeddings
        if self.kind == "longrope" and original == 1:
            raise ValueError(
                "original_max_position_embeddings = 1: longrope's attention factor divides by its logarithm"
            )


class PartConfig(Protocol):
    """A frozen, hashable description of a mixer or a feed-forward; see models/layers.

    hf_name: what Hugging Face calls it in a layer, such as self_attn; "" where its tensors are the layer's own.
    """

    @property
    def hf_name(self) -> str: ...

    def make(self, config: DecoderConfig, key: Any, dtype: Any) -> nnx.Module:
        """The module, with random weights."""
        ...


@dataclasses.dataclass(frozen=True)
class Part:
    """A mixer or a feed-forward of a layer, and the norms around it.

    name: the attribute of the Block that holds the module; tensors in our checkpoints and plans are named by it.
    config: what makes the module. None: of the part "mixer" attention of the decoder's shape; of the part "mlp" the
      decoder's experts, or where it has none an MLP of its shape.
    norm: True: the part reads what its stage is given through a norm of its own, `{name}_norm`. False: it reads that as
      it is. A name: it reads through the norm of that earlier part of its stage.
    post_norm: whether a norm of its own, `{name}_post_norm`, follows it.
    """

    name: str
    config: PartConfig | None = None
    norm: bool | str = True
    post_norm: bool = False


@dataclasses.dataclass(frozen=True)
class Stage:
    """Parts that all read the same value, which what they give is added to.

    post_norm: whether their sum passes a norm, `{name of the first part}_sum_norm`, before it is added.
    """

    parts: tuple[Part, ...]
    post_norm: bool = False

    def __post_init__(self):
        names = [part.name for part in self.parts]
        for index, part in enumerate(self.parts):
            if isinstance(part.norm, str) and part.norm not in names[:index]:
                raise ValueError(f"part {part.name!r}: norm = {part.norm!r}: must be an earlier part of its stage")


def in_sequence(*parts: Part) -> tuple[Stage, ...]:
    """Stages of one part each: every part reads what the ones before it left."""
    return tuple(Stage((part,)) for part in parts)


MIXER, FEED_FORWARD = Part("mixer"), Part("mlp")
# Layers that several families have: a norm before attention and MLP, only after them, and both; and both reading the
# layer's input through one norm (Command R).
PRE_NORM = in_sequence(MIXER, FEED_FORWARD)
POST_NORM = in_sequence(Part("mixer", norm=False, post_norm=True), Part("mlp", norm=False, post_norm=True))
PRE_AND_POST_NORM = in_sequence(Part("mixer", post_norm=True), Part("mlp", post_norm=True))
PARALLEL = (Stage((MIXER, Part("mlp", norm="mixer"))),)


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What one layer does differently from its neighbours. Static: equal specs share one trace.

    window: sliding window in tokens (a query sees itself and window - 1 keys before it), or None for full attention.
    rotary: which of the model's rotary bases, or None for no position encoding.
    stages: what the layer is made of, in the order in which it runs.
    output_scale: whether the layer's output is multiplied by a number of the checkpoint that does not train,
      `layer_scalar` (Gemma 4).
    """

    window: int | None = None
    rotary: int | None = 0
    stages: tuple[Stage, ...] = PRE_NORM
    output_scale: bool = False

    def __post_init__(self):
        if self.window is not None:
            values.whole("sliding_window", self.window)
        names = [part.name for part in self.parts]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"the parts of a layer are {names}: there must be one, and no name twice")
        for part in self.parts:
            if part.config is None and part.name not in ("mixer", "mlp"):
                raise ValueError(f"part {part.name!r} has no config: only 'mixer' and 'mlp' follow from the decoder's")

    @property
    def parts(self) -> tuple[Part, ...]:
        """Those of all stages, in the order in which they run."""
        return tuple(part for stage in self.stages for part in stage.parts)

    def config_of(self, name: str) -> PartConfig | None:
        """The config of the part of that name; None where it follows from the decoder's, or there is no such part."""
        return next((part.config for part in self.parts if part.name == name), None)

    @property
    def their_names(self) -> dict[str, str]:
        """{name of a part: what Hugging Face calls it in a layer}"""
        usual = {"mixer": "self_attn", "mlp": "mlp"}
        return {part.name: part.config.hf_name if part.config else usual[part.name] for part in self.parts}

    def replaced(self, **configs: PartConfig | None) -> LayerSpec:
        """The same layer with these configs of parts, by name; of a part whose value is None, the one that it has."""

        def one(part: Part) -> Part:
            return dataclasses.replace(part, config=configs.get(part.name) or part.config)

        stages = (dataclasses.replace(stage, parts=tuple(map(one, stage.parts))) for stage in self.stages)
        return dataclasses.replace(self, stages=tuple(stages))


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """The mixture of experts that every layer has in place of an MLP.

    expert_size: intermediate size of an expert. renormalize: a token's weights sum to one.
    transposed: experts' weights are [E, in, out], as in Hugging Face's class, and not [E, out, in].
    interleaved: gate and up are the even and odd columns of gate_up_proj, not its halves.
    swiglu_limit: gpt-oss's activation, (up + 1) * gate * sigmoid(swiglu_alpha * gate), of gate cut off above the limit
      and up cut off above and below; None: activation(gate) * up.
    shared_size: intermediate size of an MLP that every token takes beside its experts, times the sigmoid of a number of
      its own (shared_expert, shared_expert_gate); None: there is none.
    router_aux_loss_coef, output_router_logits: as in Hugging Face's config: training adds that many times the
      load-balancing loss where the second is true.
    """

    num_experts: int
    experts_per_token: int
    expert_size: int
    renormalize: bool = True
    router_bias: bool = False
    expert_bias: bool = False
    transposed: bool = False
    interleaved: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    shared_size: int | None = None
    router_aux_loss_coef: float = 0.001
    output_router_logits: bool = False

    def __post_init__(self):
        for key in ("num_experts", "experts_per_token", "expert_size"):
            values.whole(key, getattr(self, key))
        if self.swiglu_limit is not None:
            values.positive("swiglu_limit", self.swiglu_limit)
        if self.shared_size is not None:
            values.whole("shared_expert_intermediate_size", self.shared_size)
        values.number("swiglu_alpha", self.swiglu_alpha)
        values.not_negative("router_aux_loss_coef", self.router_aux_loss_coef)
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"num_experts_per_tok {self.experts_per_token} of {self.num_experts} experts")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape and features of a decoder.

    layers: one LayerSpec a layer. rotary: the model's rotary bases, named by LayerSpec.rotary.
    norm_offset: the norm multiplies by norm_offset + weight in fp32 (1.0 in Gemma, where weights start at 0).
    float32_norm: the norm multiplies by its weight in fp32, too, and rounds once (OLMo 2, gpt-oss).
    centred_norm: the norm takes the mean off first: a LayerNorm without bias (Command R).
    residual_scale: factor on what each part of a layer adds to the layer's input (Granite).
    qk_norm: RMSNorm of queries and keys over each head, or over the whole projection (OLMo 2).
    fused_qkv, fused_gate_up: they are one matrix, in the checkpoint and here (both in Phi-3), so adapters match PEFT's.
    interleaved_rotary: neighbouring numbers of a head are rotated against each other, not its halves (GLM, Command R).
    attention_scale: factor on query . key.
    embedding_scale: factor on the embedding, cast to the compute dtype first (Gemma).
    logit_scale: factor on the logits, before final_soft_cap (Granite, Command R).
    attention_gate: q_proj gives each head a gate beside its query, whose sigmoid multiplies the head's output
      (Qwen3-Next).
    attention_sinks: one more logit a head, learned, in every softmax of attention (gpt-oss).
    moe: experts in place of the MLP, in every layer.
    head: what the model gives for a token: logits, or a number such as a reward (models/heads.py).
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    max_position_embeddings: int
    attention_scale: float
    rotary: tuple[RopeConfig, ...] = (RopeConfig(),)
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    float32_norm: bool = False
    centred_norm: bool = False
    residual_scale: float = 1.0
    qk_norm: Literal["head", "projection"] | None = None
    activation: Literal["silu", "gelu_tanh", "gelu"] = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    interleaved_rotary: bool = False
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    tie_embeddings: bool = False
    attention_gate: bool = False
    attention_sinks: bool = False
    moe: MoEConfig | None = None
    head: Head = TEXT
    initializer_range: float = 0.02

    def __post_init__(self):
        counts = {"num_attention_heads": self.num_heads, "num_key_value_heads": self.num_kv_heads}
        for key in ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings"):
            counts[key] = getattr(self, key)
        for key, value in counts.items():
            values.whole(key, value)
        values.whole("num_hidden_layers", len(self.layers), least=0, most=values.MOST_LAYERS)
        for key in ("attention_scale", "embedding_scale", "residual_scale", "logit_scale"):
            values.positive(key, getattr(self, key))
        values.positive("rms_norm_eps", self.norm_eps)
        values.number("norm_offset", self.norm_offset)
        values.not_negative("initializer_range", self.initializer_range)
        for key, cap in (
            ("attn_logit_softcapping", self.attention_soft_cap),
            ("final_logit_softcapping", self.final_soft_cap),
        ):
            if cap is not None:
                values.positive(key, cap)
        if self.tie_embeddings and not self.head.is_text:
            raise ValueError(f"tie_embeddings: {self.head.what}, and its head is no embedding")
        if self.centred_norm and self.norm_offset:
            raise ValueError(f"norm_offset = {self.norm_offset}: a centred norm has none")
        if self.fused_qkv and self.attention_gate:
            raise ValueError("attention_gate: a fused qkv_proj has no gates")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        for index, layer in enumerate(self.layers):
            if layer.rotary is not None and not 0 <= layer.rotary < len(self.rotary):
                raise ValueError(f"layer {index} names rotary base {layer.rotary}; there are {len(self.rotary)}")

    @property
    def context_length(self) -> int:
        """Positions that the model was made for: max_position_embeddings, or more where a rotary base is stretched
        beyond it (yarn: factor times the original context)."""
        stretched = (
            int(rope.factor * (rope.original_max_position_embeddings or self.max_position_embeddings))
            for rope in self.rotary
            if rope.kind == "yarn"
        )
        return max(self.max_position_embeddings, *stretched, 0)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclasses.dataclass(frozen=True)
class Carried:
    """What belongs to a model that is not its text part: it is left where it lies, and saved again as it is.

    tensors: where they lie (shards.TensorEntry): a vision tower, layers that predict further tokens.
    config: config.json of the whole as text, where the text part is nested in it; then the names of the text part's
      tensors have the prefix of families with a vision tower, model.language_model.
    processors: (name, content) of the files that say how images and videos become the tower's inputs.
    """

    tensors: tuple[Any, ...]
    config: str | None
    processors: tuple[tuple[str, bytes], ...] = ()


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a model's weights came from; kept with the model so that it can be saved as it was found.

    path: folder, or folder of the local Hugging Face cache. config: config.json as text.
    generation_config: generation_config.json as text, or None. carried: what else the folder holds, or None.
    nested: whether the text model is `model.language_model` of what transformers makes of the folder.
    """

    path: str
    config: str
    generation_config: str | None = None
    carried: Carried | None = None
    nested: bool = False

    @property
    def companions(self) -> tuple[tuple[str, bytes], ...]:
        """(name, content) of the files beside weights and config.json that are saved as they were."""
        own = () if self.generation_config is None else (("generation_config.json", self.generation_config.encode()),)
        return own if self.carried is None else own + self.carried.processors
