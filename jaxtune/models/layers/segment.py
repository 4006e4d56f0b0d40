"""The declarations by which a layer describes itself: segments, residuals and costs.

A layer is a block around parts: mixers, in which a token reads other tokens, and feed-forwards, which treat each token
alone. A part runs as a chain of segments, functions from named values to named values, the residuals. All code outside
reads these declarations, and knows no part's segments by name (only generation/plain_layer.py does).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.config import LayerSpec
from jaxtune.pallas.attention import PackedLayout

# Names of values in a part's own segments. INPUT is the residual stream after the block's norm for this part, STREAM is
# the residual stream without that norm, and OUTPUT is the part's result, which the block adds to the residual stream.
INPUT, STREAM, OUTPUT = "input", "stream", "output"


@dataclasses.dataclass(frozen=True)
class Residual:
    """An intermediate value of a layer's forward that its backward may read. A plan keeps it in device memory, perhaps
    in FP8, offloads it to host memory, or recomputes it.
    """

    name: str  # the name that plans, configs and reports use
    # the name of another residual of the layer to which the planner always gives the same placement, because treating
    # the two differently gains nothing (a user's plan may do it); None: the planner places it alone
    decided_with: str | None = None
    # whether a plan may drop it, so that earlier segments run again to compute it; False: it must be kept or offloaded
    recomputable: bool = True
    # True: the planner only considers plans that keep it, because it has few bytes or later layers take it
    small: bool = False
    # whether it may be kept in e4m3 with one scale per token, because the segments that read it round their inputs to
    # e4m3 anyway; False: it is only kept in the compute dtype
    in_fp8: bool = False


@dataclasses.dataclass(frozen=True)
class Context:
    """What a segment, or a mixer in generation, receives beside its values."""

    spec: LayerSpec  # the layer's kind: its parts, attention window and rotary base
    layout: PackedLayout  # document boundaries and rotary tables (by rotary base) of the batch
    key: jax.Array | None = None  # draws the adapters' dropout masks; None: no dropout
    # in a step of generation: {name: value} of what the layer takes from outside (LayerPart.takes); {} otherwise, where
    # segments read these values by name
    taken: Mapping = dataclasses.field(default_factory=dict)

    @property
    def rotary(self) -> Any:
        """(cos, sin), each float32[B, T, rotary_dim / 2], and for some models a factor on queries; None for a layer
        without rotary embedding.
        """
        return None if self.spec.rotary is None else self.layout.rotary[self.spec.rotary]


class Backward(Protocol):
    """A segment's hand-written derivative, in place of jax.vjp of its `run`: (gradients of the trainable tensors,
    None where they are zero; one gradient for each input).

      module_of: builds the segment's module (part or block) from trainable tensors.
      outputs: None for one that is not there, such as layer_output.
      gradients: only of the outputs that have one.
    """

    def __call__(
        self,
        module_of: Callable[[Any], Any],
        trainable: Any,
        context: Context,
        inputs: tuple[jax.Array, ...],
        outputs: tuple[jax.Array | None, ...],
        gradients: tuple[jax.Array, ...],
    ) -> tuple[Any, tuple[jax.Array, ...]]: ...


@dataclasses.dataclass(frozen=True)
class AuxLoss:
    """A loss that a part computes from its own values, such as a router's load-balancing loss, and that training may
    add to the objective's.
    """

    # the name of its metric; the config key `{name}_coef` sets the factor by which training multiplies the loss
    name: str
    title: str  # its name in reports, such as "load-balancing loss"
    # (the segment's output summed over all layers, rows and devices) -> the loss, float32[], a mean over tokens
    value: Callable[..., jax.Array]
    # the factor on the loss that the model's own config sets, used unless the run's config has one; 0: not added
    coefficient: float = 0.0


@dataclasses.dataclass(frozen=True)
class Segment:
    """One step of a layer's computation. Residuals exist only between segments, so the segments decide what a plan can
    keep or recompute. The first four fields run a segment; the others tell how it may be run and what it costs.
    """

    name: str  # its name in profiles and among the dropout keys, unique within a part
    # names of the values it takes: residuals of earlier segments, values from outside the layer (LayerPart.takes), and
    # INPUT and STREAM, the residual stream with and without the block's norm
    reads: tuple[str, ...]
    # the residuals it computes; one named OUTPUT is the part's result, which the block adds to the residual stream
    makes: tuple[Residual, ...]
    # (module, context, *values) -> a tuple with one value for each of `makes`; module is the part or block that the
    # segment belongs to, and `values` are those that it reads
    run: Callable[..., tuple]
    # dotted names of the module's weight matrices that it multiplies by ("experts.down_proj"), in the order in which
    # the keys of adapters are drawn
    matrices: tuple[str, ...] = ()
    backward: Backward | None = None  # its hand-written derivative; None: jax.vjp of `run`
    # the segment that a layer's backward differentiates instead of this one and the one right before it, which must be
    # differentiable, where this is faster. It reads what the one before reads, and the outputs of that, to which it
    # gives no gradient. None: this segment is differentiated alone.
    joined_with_previous: Segment | None = None
    # whether any gradient flows through it; False for one with integer outputs, such as a choice of experts
    differentiable: bool = True
    # the losses that are computed from its one output. That output is no residual: if it is wanted, the layer returns
    # it beside layer_output, and the stack sums it over the layers; otherwise the segment does not run.
    aux: tuple[AuxLoss, ...] = ()
    experts_per_token: int = 0  # for matrices with experts: how many experts each token is multiplied by
    # True: each of its outputs can be computed without the others, so recomputing one of them costs only its share;
    # False: all are computed at once
    separable: bool = False
    # True: it treats each token alone and may run over tiles of tokens, as one with neighbouring segments that also
    # may; False: it runs on whole rows
    tokenwise: bool = False
    # True: when it is run again in the backward, the quantised weights that it decodes also serve its gradients; False:
    # they are decoded again
    decodes_once: bool = False
    # Sizes -> bytes that its derivative keeps. If set, a recomputed segment is differentiated when it is recomputed,
    # and these bytes are kept until its gradient arrives. None: the layer's BackwardOrder.derivatives_at_once decides;
    # if that is False too, the segment runs once more when its gradient arrives, and takes no memory before.
    derivative_bytes: Callable[[Sizes], float] | None = None
    # True: what it reads as INPUT is only the input of linears, by apply_fused, and may be a Normed (models/norm.py)
    norms: bool = False
    # True: its kernels have its name as their scope in profiles; False: it sets no scope, because it runs others that
    # do
    scoped: bool = True
    # query heads times head dim of an attention, whose forward costs 4 FLOPs per visible key of a token for each of
    # them; 0: the segment is no attention
    attention_width: int = 0
    head_dim: int = 128  # of an attention
    # (forward, backward): its attention's duration over that of usual head dims with as many FLOPs
    attention_slower: tuple[float, float] = (1.0, 1.0)
    token_flops: float = 0.0  # FLOPs of its forward for one token, without its matrices and without attention
    # (forward, derivative): the time that its own kernels take for one token, beyond token_flops and beyond moving
    # inputs and outputs, stated as the bytes that a device copy moves in that time
    kernel_bytes: tuple[float, float] = (0.0, 0.0)
    # (tokens of the micro-batch on one device, tokens of a row, True for the backward) -> its duration for the stack's
    # schedules, stated as the number of multiplications that a large matrix product does in that time; None: computed
    # from its matrices and token_flops (the function `multiplications`)
    multiplications: Callable[[int, int, bool], float] | None = None

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(residual.name for residual in self.makes)


@dataclasses.dataclass(frozen=True)
class BackwardOrder:
    """When a recomputed segment is differentiated in a layer's backward, and what waits for what, where XLA's own order
    costs memory or time. The defaults suit an MLP.
    """

    # True: a recomputed segment that has no backward of its own is differentiated when it is recomputed, and what its
    # derivative reads is kept until its gradient arrives. Experts have it: their thin products and sorted rows would
    # otherwise be computed once more. False: it runs once more when its gradient arrives, unless it has
    # derivative_bytes.
    derivatives_at_once: bool = False
    # names of values that several segments read and that do not wait for a segment's gradient, so that XLA may compute
    # what derivatives need of them (such as a norm) earlier, and once for all these segments
    shared: tuple[str, ...] = ()
    # True: a segment's backward waits for the weight gradients of the segments after it. Otherwise XLA puts the
    # adapters' gradients off to the end of the layer, and keeps the wide operands of these thin products until then.
    # False: it does not wait.
    weights_first: bool = True
    # names of residuals that, where they are kept, are not tied to the layer's gradient unless memory is short, so that
    # XLA may keep what the forward computed from them alone, and does not compute it again
    free: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes from which a part computes its scratch bytes for one micro-batch on one device."""

    residuals: Mapping[str, float]  # bytes of each residual by name; for tiled segments, of one tile
    # names of the residuals that the backward makes anew: those that the plan recomputes, and those that it keeps in
    # FP8; in forecasts of passes without a backward, all
    recomputed: frozenset[str]
    tiles: int  # number of tiles that tokenwise segments run over; 1: they run whole
    dtype: jnp.dtype  # compute dtype
    length: int  # number of tokens of a row
    # whether the device runs kernels for compute capability 9.0 (Hopper); False: other implementations run
    hopper: bool
    device: str  # the device's name, which selects numbers in models/fitted.py

    def __getitem__(self, name: str) -> float:
        """0.0 if the layer does not have the residual."""
        return self.residuals.get(name, 0.0)


@dataclasses.dataclass(frozen=True)
class Scratch:
    """The bytes that the backward of one part needs beyond the residuals, the sum of both numbers. A layer's peak
    has the largest need of its parts.
    """

    own_bytes: float  # bytes that the computation of the part's own gradients needs
    # bytes of partial gradients from other segments of the layer that are in memory while this part's backward runs
    # (for experts, with their own rows); 0 for a mixer
    other_segments_bytes: float
    # True: both numbers were fitted to measurements of the whole layer's backward, so they include the mixer's
    # scratch memory, and the planner does not add that; False: the mixer's is counted on its own
    covers_mixer: bool
    # True: a mixer of which the plan saves the last output alone is recomputed after this backward
    mixer_later: bool = False


class LayerPart(Protocol):
    """A mixer or feed-forward, an nnx module. It may have two more attributes:

    - `takes`, {name of a value: its shape for one token}: the value, [B, T, *shape] in the compute dtype, comes from an
      earlier layer that gives it or from the decoder, and segments read it by this name.
    - `gives`, {name of a residual: the value's name for other layers}: later layers that take the value get this
      residual, until another layer gives the same. It is always kept (`small`), and its gradient is summed over all
      that read it.
    """

    def segments(self) -> tuple[Segment, ...]:
        """The chain that computes OUTPUT, in its last segment, from INPUT or STREAM."""
        ...


class Mixer(LayerPart, Protocol):
    """A part in which a token reads other tokens; `state_reads` marks it. To add one, write the module and a frozen
    dataclass whose `make(config, key, dtype)` builds it (PartConfig); a LayerSpec has an instance as the `config` of a
    Part.
    """

    state_reads: tuple[str, ...]  # names of the residuals from which the state for generation is built after a prompt
    # whether the state's arrays are caches [rows, heads, capacity, D] with the token at position p at index p %
    # capacity; else they do not grow, and cannot be cut
    has_cache: bool

    def backward_bytes(self, sizes: Sizes) -> float:
        """Bytes that the mixer's own backward needs beyond the residuals. Sizes are by the mixer's own names of
        residuals.
        """
        ...

    def waiting_bytes(self, sizes: Sizes) -> float:
        """Bytes of the mixer's partial results that exist while the backward of a later feed-forward runs, which comes
        before its own. They count only if that feed-forward covers the mixer (Scratch.covers_mixer).
        """
        ...

    def first_state(
        self, values: Mapping[str, jax.Array], lengths: jax.Array, new_tokens: int, context: Context
    ) -> Any:
        """The state for generation (such as caches) after prompts, a pytree of arrays whose first axis is rows.

        values: {name: value} of the residuals that `state_reads` names.
        lengths: int32[B], tokens of each prompt.
        new_tokens: for how many tokens beyond those of `values` there must be room.
        context: its layout has one prompt a row, with rotary tables.
        """
        ...

    def step(self, x: jax.Array, state: Any, positions: jax.Array, context: Context) -> tuple[jax.Array, Any]:
        """Runs the next N tokens of each row in generation: (output [B, N, hidden], the state after them). N is 1 while
        rows decode; a long prompt is prefilled in pieces, of which the last may end in padding, which changes no state.

          x: [B, N, hidden], the part's input after the norm.
          state: from first_state or an earlier step.
          positions: int32[B], the position of the first of them, also the number of tokens in the state; negative for a
            row that is not decoding, whose results are ignored.
          context: its layout has the rotary tables of these positions; `taken` what the layer takes.
        """
        ...


class GivingMixer(Mixer, Protocol):
    """A mixer that gives values, such as keys and values, to later layers."""

    def step_giving(
        self, x: jax.Array, state, positions: jax.Array, context: Context
    ) -> tuple[jax.Array, object, dict[str, object]]:
        """`step` with a third result: {name: value, any pytree} of what later layers take in this step.

        x: [B, N, hidden], the part's input after the norm.
        state: from first_state or an earlier step.
        positions: int32[B], the position of each row's first token; negative for a row that does not decode.
        context: its layout has the rotary tables of these positions.
        """
        ...


class FeedForward(LayerPart, Protocol):
    """A part that treats each token alone, such as an MLP. Added like a mixer, but without `state_reads`."""

    order: BackwardOrder  # what it wants of the layer's backward; Block.order combines those of all feed-forwards

    def forward_bytes(self, sizes: Sizes) -> float:
        """Bytes in memory at the end of the layer's forward beyond the residuals. Sizes are by the feed-forward's own
        names.
        """
        ...

    def backward_bytes(self, sizes: Sizes) -> Scratch: ...


def matrix_of(module: nnx.Module, name: str) -> Any:
    """The module's own Linear or ExpertLinear of a dotted name such as "experts.down_proj" ("mlp.experts.down_proj" in
    a block).
    """
    for attribute in name.split("."):
        module = getattr(module, attribute)
    return module


def weights_per_token(segment: Segment, matrix: Any) -> int:
    """How many numbers of a matrix one token is multiplied by; of experts, those that it is routed to."""
    if not matrix.num_experts:
        return math.prod(matrix.sizes)
    return math.prod(matrix.sizes[1:]) * segment.experts_per_token


def multiplications(segment: Segment, module: nnx.Module, tokens: int, length: int, backward: bool = False) -> float:
    """The duration of a segment, as the number of multiplications (not FLOPs) that large matrix products do in that
    time.

      segment: of the layer, with the block's names.
      module: the layer, which has the weights.
      tokens: of the whole micro-batch on this device.
      length: tokens of a row.
      backward: of the derivative, if the segment has a formula for it, else of the forward.
    """
    if segment.multiplications is not None:
        return segment.multiplications(tokens, length, backward)
    active = sum(weights_per_token(segment, matrix_of(module, name)) for name in segment.matrices)
    return float(tokens * (active + segment.token_flops / 2))
