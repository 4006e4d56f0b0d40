"""DecoderConfig, a frozen dataclass that describes a decoder of any supported family. It has a RopeConfig for each
rotary base and a LayerSpec for each layer; a layer is a sequence of Stages, each with one or more Parts (a mixer or
feed-forward and its norms).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from flax import nnx

from jaxtune.models import values
from jaxtune.models.heads import TEXT, Head


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Settings of one rotary position embedding. Names are those of Hugging Face's rope_scaling, except theta
    (rope_theta) and kind (rope_type). Raises ValueError for a value out of range.
    """

    theta: float = 10000.0  # the base of the frequencies
    # "default" does not extend the context; "linear" divides positions by `factor`; "longrope" has a factor per
    # rotated pair; "llama3" and "yarn" scale frequencies by wavelength; "proportional" spreads the frequencies of the
    # rotated share over the whole head: number i of its first half and number i of its second half are a pair
    kind: Literal["default", "linear", "llama3", "longrope", "proportional", "yarn"] = "default"
    partial_rotary_factor: float = 1.0  # the share of a head's dimensions that is rotated
    # by which the context is extended; scaled frequencies are divided by it (longrope: attention_factor alone uses it)
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3: wavelengths above original context / this are scaled fully
    high_freq_factor: float = 4.0  # llama3: wavelengths below original context / this are not scaled
    original_max_position_embeddings: int = 0  # the context before the extension, in tokens; 0: max_position_embeddings
    # longrope: divisors of the frequencies, one for each rotated pair, for documents within the original context
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()  # longrope: the same for documents that are longer
    # factor on cos and sin; None: the kind's own formula in `factor` (longrope, yarn)
    attention_factor: float | None = None
    beta_fast: float = 32.0  # yarn: dimensions that turn more often than this in the original context are not scaled
    beta_slow: float = 1.0  # yarn: dimensions that turn less often than this are scaled fully
    truncate: bool = True  # yarn: whether the dimensions that beta_fast and beta_slow give are rounded to whole ones
    head_dim: int | None = None  # size of the heads that it rotates; None: the decoder's head_dim
    # queries are multiplied by 1 + beta ln(1 + floor(position / original context)) (Llama 4, Ministral 3)
    llama_4_scaling_beta: float = 0.0
    # where positions have several axes, how many rotated pairs turn by each, interleaved (mrope_section of Qwen: time,
    # height, width); (): positions have one axis. Positions that are equal on all axes, as in text, turn as with one.
    sections: tuple[int, ...] = ()

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
        values.items("mrope_section", self.sections, functools.partial(values.whole, least=0))
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor = {self.high_freq_factor}: must be above low_freq_factor = {self.low_freq_factor}"
            )
        original = self.original_max_position_embeddings
        if self.kind == "longrope" and original == 1:
            raise ValueError(
                "original_max_position_embeddings = 1: longrope's attention factor divides by its logarithm"
            )


def context_length(positions: int, rotary: Sequence[RopeConfig]) -> int:
    """The positions that a model supports: max_position_embeddings (`positions`), or factor times the original context
    of a yarn base if that is more.
    """
    stretched = (
        int(rope.factor * (rope.original_max_position_embeddings or positions))
        for rope in rotary
        if rope.kind == "yarn"
    )
    return max(positions, *stretched, 0)


class PartConfig(Protocol):
    """Settings of one mixer or feed-forward, frozen and hashable, which also build its module."""

    @property
    def hf_name(self) -> str:
        """The part's name within a layer in Hugging Face's tensor names, such as self_attn; "" if its tensors have no
        prefix.
        """
        ...

    def make(self, config: DecoderConfig, key: Any, dtype: Any) -> nnx.Module:
        """Builds the module with random weights.

        config: the whole decoder's.
        key: a key of jax.random, which draws the weights.
        dtype: of the weights as stored.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Part:
    """A mixer (such as attention) or feed-forward (MLP or experts) of a layer, and the norms around it."""

    name: str  # the attribute of the Block that is the module; plans and residuals use it too
    # builds the module; None: "mixer" is attention of the decoder's shape, "mlp" the decoder's experts or else its MLP
    config: PartConfig | None = None
    # True: the part reads its stage's input through its own norm, `{name}_norm`; False: without a norm; a name: through
    # the norm of that earlier part of its stage
    norm: bool | str = True
    post_norm: bool = False  # whether its output passes its own norm, `{name}_post_norm`


@dataclasses.dataclass(frozen=True)
class Stage:
    """Parts that all read the same value of the residual stream, and whose outputs are added to it. Raises ValueError
    if a part's `norm` names no earlier part of the stage.
    """

    parts: tuple[Part, ...]  # in the order in which they run
    # whether the sum of their outputs passes a norm, `{name of the first part}_sum_norm`, before it is added
    post_norm: bool = False

    def __post_init__(self):
        names = [part.name for part in self.parts]
        for index, part in enumerate(self.parts):
            if isinstance(part.norm, str) and part.norm not in names[:index]:
                raise ValueError(f"part {part.name!r}: norm = {part.norm!r}: must be an earlier part of its stage")


def in_sequence(*parts: Part) -> tuple[Stage, ...]:
    """One stage for each part, so that every part reads the residual stream after the parts before it."""
    return tuple(Stage((part,)) for part in parts)


MIXER, FEED_FORWARD = Part("mixer"), Part("mlp")
# Layers that several families have: with a norm before attention and MLP, only after them, before and after them; and
# with attention and MLP in parallel on one norm (Command R).
PRE_NORM = in_sequence(MIXER, FEED_FORWARD)
POST_NORM = in_sequence(Part("mixer", norm=False, post_norm=True), Part("mlp", norm=False, post_norm=True))
PRE_AND_POST_NORM = in_sequence(Part("mixer", post_norm=True), Part("mlp", post_norm=True))
PARALLEL = (Stage((MIXER, Part("mlp", norm="mixer"))),)


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What may differ between the layers of a model. Layers with equal specs are traced once. Raises ValueError for a
    window below 1, no parts, two parts of one name, or a part without a config that is neither "mixer" nor "mlp".
    """

    # sliding window in tokens (a query sees itself and the window - 1 keys before it); None: full attention
    window: int | None = None
    rotary: int | None = 0  # index of its rotary base in DecoderConfig.rotary; None: no position encoding
    stages: tuple[Stage, ...] = PRE_NORM  # the parts of the layer, in the order in which they run
    # whether the layer's output is multiplied by `layer_scalar`, a number of the checkpoint that is never trained
    # (Gemma 4)
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
        """The parts of all stages, in the order in which they run."""
        return tuple(part for stage in self.stages for part in stage.parts)

    def config_of(self, name: str) -> PartConfig | None:
        """The config of the part `name`; None if it follows from the decoder's config, or no part has the name."""
        return next((part.config for part in self.parts if part.name == name), None)

    @property
    def hf_names(self) -> dict[str, str]:
        """{part's name: its name within a layer in Hugging Face's tensor names, "" if its tensors have no prefix}."""
        usual = {"mixer": "self_attn", "mlp": "mlp"}
        return {part.name: part.config.hf_name if part.config else usual[part.name] for part in self.parts}

    def replaced(self, **configs: PartConfig | None) -> LayerSpec:
        """A spec in which the named parts (mixer=...) have other configs. None leaves a config as it is; a name that no
        part has is ignored.
        """

        def with_config(part: Part) -> Part:
            return dataclasses.replace(part, config=configs.get(part.name) or part.config)

        stages = (dataclasses.replace(stage, parts=tuple(map(with_config, stage.parts))) for stage in self.stages)
        return dataclasses.replace(self, stages=tuple(stages))


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts, in place of a layer's MLP or beside it (Gemma 4). Raises ValueError for a value out of
    range, or features that exclude each other.
    """

    num_experts: int  # experts of a layer
    experts_per_token: int  # experts that the router chooses for each token
    expert_size: int  # intermediate size of an expert
    renormalize: bool = True  # whether the weights of a token's experts are scaled to sum to one
    router_bias: bool = False  # whether the router has a bias
    expert_bias: bool = False  # whether the experts' matrices have biases
    transposed: bool = False  # experts' weights are [E, in, out], as in Hugging Face's class, and not [E, out, in]
    interleaved: bool = False  # gate and up are the even and odd columns of gate_up_proj, not its halves
    # gpt-oss's activation: gate and up are clipped to this limit (gate only from above), and the result is (up + 1) *
    # gate * sigmoid(swiglu_alpha * gate); None: activation(gate) * up
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702  # see swiglu_limit
    # intermediate size of a shared expert, an MLP that every token passes and whose output is multiplied by the sigmoid
    # of a learned gate (shared_expert, shared_expert_gate); None: there is none
    shared_size: int | None = None
    router_aux_loss_coef: float = 0.001  # factor on the load-balancing loss, from Hugging Face's config
    # whether training adds the load-balancing loss by default, from Hugging Face's config; layers/experts.py reads it
    # and the factor, and declares the loss with its default factor for training (AuxLoss)
    output_router_logits: bool = False
    # the router reads the residual stream through a norm and a scale of its own, and multiplies each expert's weight by
    # a number that it learns (Gemma 4)
    scaled_router: bool = False
    shared_gate: bool = True  # whether the shared expert has a gate
    # experts are chosen, and weighted, by the sigmoids of the logits (GLM-4.5, LFM2); the next fields belong to it
    sigmoid: bool = False
    selection_bias: bool = False  # a number for each expert, which no training changes, is added before they are chosen
    groups: int = 1  # the experts are in groups of equal size, and a token's are of the `best_groups`
    best_groups: int = 1
    weight_scale: float = 1.0  # factor on a token's weights
    sum_eps: float = 1e-20  # added to the sum that renormalised weights are divided by

    def __post_init__(self):
        for key in ("num_experts", "experts_per_token", "expert_size", "groups", "best_groups"):
            values.whole(key, getattr(self, key))
        if self.num_experts % self.groups or not self.best_groups <= self.groups:
            raise ValueError(f"n_group {self.groups}, topk_group {self.best_groups} of {self.num_experts} experts")
        if self.best_groups < self.groups and self.num_experts < 2 * self.groups:
            raise ValueError(f"n_group {self.groups} of {self.num_experts} experts: a group needs two")
        if not self.sigmoid and (self.selection_bias or self.groups > 1 or self.weight_scale != 1):
            raise ValueError("selection_bias, groups and weight_scale need sigmoid")
        if self.swiglu_limit is not None:
            values.positive("swiglu_limit", self.swiglu_limit)
        if self.shared_size is not None:
            values.whole("shared_expert_intermediate_size", self.shared_size)
        values.number("swiglu_alpha", self.swiglu_alpha)
        values.not_negative("router_aux_loss_coef", self.router_aux_loss_coef)
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"num_experts_per_tok {self.experts_per_token} of {self.num_experts} experts")
        if self.scaled_router and (self.router_bias or self.shared_size is not None or not self.renormalize):
            raise ValueError("scaled_router: it has no bias, no shared expert, and the weights of a token sum to one")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape and features of a decoder. Parts with a config of their own (Part.config) can differ from it. Raises
    ValueError for a value out of range, or features that exclude each other.
    """

    family: str  # the model_type of its family, a key of FAMILIES in models/registry.py, such as "llama"
    vocab_size: int  # rows of the embedding
    hidden_size: int  # size of the residual stream
    intermediate_size: int  # width of the MLP
    num_heads: int  # query heads
    num_kv_heads: int  # key and value heads; divides num_heads
    head_dim: int  # size of a head
    layers: tuple[LayerSpec, ...]  # the kind of each layer
    max_position_embeddings: int  # positions of the model's context; yarn's can be more (context_length)
    attention_scale: float  # factor on query . key
    rotary: tuple[RopeConfig, ...] = (RopeConfig(),)  # the rotary bases, to which LayerSpec.rotary is an index
    norm_eps: float = 1e-6  # added to the mean square in norms
    norm_offset: float = 0.0  # norms multiply by norm_offset + weight in fp32 (1.0 in Gemma, whose weights start at 0)
    float32_norm: bool = False  # norms multiply by their weight in fp32 too, and round once (OLMo 2, gpt-oss)
    centred_norm: bool = False  # norms subtract the mean first: LayerNorm (Command R)
    norm_bias: bool = False  # centred norms have a bias
    residual_scale: float = 1.0  # factor on the output of each part before it is added to the residual stream (Granite)
    # RMSNorm of queries and keys over each head, or over the whole projection (OLMo 2)
    qk_norm: Literal["head", "projection"] | None = None
    # (part of a layer or module within one, its name in Hugging Face's tensor names), where that is not Llama's (LFM2)
    module_names: tuple[tuple[str, str], ...] = ()
    value_norm: bool = False  # RMSNorm of values over each head, without a weight (Gemma 4)
    # values are the projected keys before their norm, and there is no v_proj (Gemma 4)
    values_are_keys: bool = False
    activation: Literal["silu", "gelu_tanh", "gelu"] = "silu"  # of the feed-forwards' gates
    qkv_bias: bool = False  # whether the query, key and value projections have biases
    out_bias: bool = False  # whether the attention's output projection has a bias
    mlp_bias: bool = False  # whether the MLP's matrices have biases
    # query, key and value are one matrix in the checkpoint and here (Phi-3), so that adapters match PEFT's
    fused_qkv: bool = False
    fused_gate_up: bool = False  # gate and up are one matrix, for the same reason
    # neighbouring numbers of a head are rotated as pairs, not its two halves (GLM, Command R)
    interleaved_rotary: bool = False
    rotary_parts: int = 1  # equal parts of a head, of each of which the two halves are rotated (Gemma 4's tower: 2)
    attention_soft_cap: float | None = None  # attention scores s become cap * tanh(s / cap)
    final_soft_cap: float | None = None  # logits become cap * tanh(logit / cap)
    embedding_scale: float = 1.0  # factor on the embedding, which is cast to the compute dtype first (Gemma)
    logit_scale: float = 1.0  # factor on the logits before final_soft_cap (Granite, Command R)
    tie_embeddings: bool = False  # whether the head is the embedding
    # q_proj gives each head a gate after its query, whose sigmoid multiplies the head's output (Qwen3-Next)
    attention_gate: bool = False
    # each head has a learned logit that takes part in its softmax and has no value (gpt-oss)
    attention_sinks: bool = False
    # numbers of the embedding that every token has in each layer beside the first one's (layers/per_layer.py, Gemma 4);
    # None: there are none
    per_layer_size: int | None = None
    per_layer_vocab_size: int = 0  # rows of the table of these embeddings
    # the experts of the layers; they replace the MLP unless the layers' stages say otherwise. None: there are none
    moe: MoEConfig | None = None
    head: Head = TEXT  # what the model computes for a token: logits, or a number such as a reward (models/heads.py)
    initializer_range: float = 0.02  # standard deviation of random initial weights

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
        if self.per_layer_size is not None:
            values.whole("hidden_size_per_layer_input", self.per_layer_size)
            values.whole("vocab_size_per_layer_input", self.per_layer_vocab_size, least=self.vocab_size)
        values.number("norm_offset", self.norm_offset)
        values.not_negative("initializer_range", self.initializer_range)
        for key, cap in (
            ("attn_logit_softcapping", self.attention_soft_cap),
            ("final_logit_softcapping", self.final_soft_cap),
        ):
            if cap is not None:
                values.positive(key, cap)
        if self.tie_embeddings and not self.head.is_text:
            raise ValueError(f"tie_embeddings: {self.head.description}, and its head is no embedding")
        if self.centred_norm and self.norm_offset:
            raise ValueError(f"norm_offset = {self.norm_offset}: a centred norm has none")
        if self.fused_qkv and self.attention_gate:
            raise ValueError("attention_gate: a fused qkv_proj has no gates")
        if self.fused_qkv and self.values_are_keys:
            raise ValueError("values_are_keys: a fused qkv_proj has values")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        for index, layer in enumerate(self.layers):
            if layer.rotary is not None and not 0 <= layer.rotary < len(self.rotary):
                raise ValueError(f"layer {index} names rotary base {layer.rotary}; there are {len(self.rotary)}")

    @property
    def context_length(self) -> int:
        """The positions that the model supports, more than max_position_embeddings with yarn. Longer documents and
        prompts are refused; longer packed rows are not, because positions restart with each document.
        """
        return context_length(self.max_position_embeddings, self.rotary)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def query_size(self) -> int:
        """How many numbers a token's queries have over all heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """How many numbers a token's keys have over all heads; its values have as many."""
        return self.num_kv_heads * self.head_dim


@dataclasses.dataclass(frozen=True)
class Passthrough:
    """The parts of a checkpoint that are not the text model, such as a vision tower: they are not loaded, but copied
    when the model is saved.
    """

    # where each tensor is (headers.TensorEntry), such as a vision tower's or a multi-token prediction layer's
    tensors: tuple[Any, ...]
    # text of the folder's config.json if the text model is nested in it; the text model's tensors then have the prefix
    # model.language_model. in files. None: the folder's config describes a text model
    config: str | None
    # (name, content) of the files that describe how images and videos become the tower's inputs
    processors: tuple[tuple[str, bytes], ...] = ()


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a model's weights came from, kept so that the model can be saved in the same form."""

    # the folder or hub name, as the caller named it; for random weights the path of the config, or "a config"
    path: str
    config: str  # JSON text of config.json of the text model
    generation_config: str | None = None  # text of generation_config.json; None: the folder has none
    passthrough: Passthrough | None = None  # the parts of the checkpoint that are not loaded; None: there are none
    # whether the text model is `model.language_model` in the class that transformers builds for the folder
    nested: bool = False
    # JSON of rope_scaling and max_position_embeddings, where `config` has others than the file; None: it has the file's
    positions: str | None = None
    dropped: tuple[str, ...] = ()  # names of tensors that are neither loaded nor copied, such as Gemma 3's tower

    @property
    def companions(self) -> tuple[tuple[str, bytes], ...]:
        """(file name, bytes) of the files that are saved unchanged: generation_config.json and processors' configs."""
        files = () if self.generation_config is None else (("generation_config.json", self.generation_config.encode()),)
        return files if self.passthrough is None else files + self.passthrough.processors
