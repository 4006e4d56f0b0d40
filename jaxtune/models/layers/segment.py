"""The declarations by which a layer describes itself: its segments, residuals and costs.

A layer is a block around parts: mixers, in which a token reads other tokens, and feed-forwards, which treat each token
alone. Each part runs as a chain of segments, functions that read named values and compute named values, the residuals.
The stack (models/stack.py) runs the chain and follows a plan that says for every residual whether it is kept (perhaps
in FP8), offloaded or recomputed. The planner, generation, adapters and the mapping of tensor names read the same
declarations. None of them knows a part's segments or residuals by name; only generation has faster programs for some
kinds of layers (generation/plain_layer.py).

Mixer, GivingMixer and FeedForward are the interfaces of the parts, with LayerPart, what they have in common. A Segment
makes Residuals, is run with a Context, and can have a Backward (a hand-written derivative) and AuxLosses. BackwardOrder
tells the stack in which order a layer's backward runs. The parts tell the planner their memory as Scratch, from Sizes.
`matrix_of` finds a segment's matrices; `weights_per_token` and `multiplications` count its work."""

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
    """A residual: an intermediate value of a layer's forward that its backward may read. A segment declares those that
    it computes (Segment.makes). A plan says whether it is kept in device memory, kept in FP8, offloaded to host memory,
    or recomputed."""

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
    """What a segment, or a mixer's `first_state` or `step` in generation, receives beside its values: its layer's spec,
    the batch's layout and a dropout key. The stack makes one for each segment, and generation one for each layer."""

    spec: LayerSpec  # the layer's kind: its parts, attention window and rotary base
    layout: PackedLayout  # document boundaries and rotary tables (by rotary base) of the batch
    key: jax.Array | None = None  # draws the adapters' dropout masks; None: no dropout
    # in a step of generation: {name: value} of what the layer takes from outside (LayerPart.takes); {} otherwise, where
    # segments read these values by name
    taken: Mapping = dataclasses.field(default_factory=dict)

    @property
    def rotary(self) -> Any:
        """The rotary table of this layer's rotary base: (cos, sin), each float32[B, T, rotary_dim / 2], and for some
        models a third array, the factor on queries by position. None for a layer without rotary embeddings. Attention
        rotates queries and keys by it."""
        return None if self.spec.rotary is None else self.layout.rotary[self.spec.rotary]


class Backward(Protocol):
    """The signature of a segment's hand-written derivative, which the stack calls instead of jax.vjp of the segment's
    `run`.

    Args:
      module_of: builds the segment's module (its part, or the block) from trainable tensors like `trainable`.
      trainable: the trainable tensors, in training those of the whole block.
      context: what `run` received: the layer's spec, the batch's layout and the dropout key.
      inputs: the values that the segment read.
      outputs: the values that the segment computed in the forward or when it was recomputed; None for one that is not
        there, such as layer_output.
      gradients: the gradients of the outputs, only of those that have one.
    Returns:
      (gradients of the trainable tensors, or None where there are none; one gradient for each input)
    """

    def __call__(
        self,
        module_of: Callable[[Any], Any],
        trainable: Any,
        context: Context,
        inputs: tuple[jax.Array, ...],
        outputs: tuple[jax.Array | None, ...],
        gradients: tuple[jax.Array, ...],
    ) -> tuple[Any, tuple[jax.Array, ...]]:
        """Computes the gradients of one segment; the class describes the arguments and the result."""
        ...


@dataclasses.dataclass(frozen=True)
class AuxLoss:
    """An auxiliary loss, which a part of the model computes from its own values and which training may add to the
    objective's loss, such as a router's load-balancing loss. A Segment declares it (Segment.aux); so far only experts
    do."""

    # the name of its metric; the config key `{name}_coef` sets the factor by which training multiplies the loss
    name: str
    title: str  # its name in reports, such as "load-balancing loss"
    # (the segment's output summed over all layers, rows and devices) -> the loss, float32[], a mean over tokens
    value: Callable[..., jax.Array]
    # the factor on the loss that the model's own config sets, used unless the run's config has one; 0: not added
    coefficient: float = 0.0


@dataclasses.dataclass(frozen=True)
class Segment:
    """One step of a layer's computation: a function that reads named values and computes named values, the residuals.
    Residuals exist only between segments, so the segments decide what a plan can keep or recompute.

    Only the first four fields are needed to run a segment. Of the others, `matrices` also lists what adapters and
    quantisation can change, `aux` declares losses for training, and the rest tell the stack how the segment may be run
    and the planner what it costs."""

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
    # the segment that a layer's backward differentiates instead of this one and the one before it, where this is
    # faster. It reads what the one before reads, and the outputs of that, to which it gives no gradient. None:
    # this segment is differentiated alone.
    with_before: Segment | None = None
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
        """Names of the values that it computes, those of the residuals in `makes`, in their order, in which the
        function `run` returns the values."""
        return tuple(residual.name for residual in self.makes)


@dataclasses.dataclass(frozen=True)
class BackwardOrder:
    """Settings of the backward of a layer: at which moment a recomputed segment is differentiated, and what waits for
    what. Feed-forwards declare them where XLA's own order costs memory or time, and Block.order combines them to those
    of all segments of the layer, which the stack follows (layer_backward; `free` in _stack_bwd). The defaults suit an
    MLP."""

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
    """The sizes from which a part of a layer computes how many scratch bytes one micro-batch takes on one device. The
    planner makes it; sizes[name] gives the bytes of the residual of that name."""

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
        """The bytes of the residual of this name; 0.0 if the layer does not have it."""
        return self.residuals.get(name, 0.0)


@dataclasses.dataclass(frozen=True)
class Scratch:
    """The scratch memory, in bytes, that the backward of one part of a layer (a feed-forward, or a mixer such as
    attention) needs in addition to the residuals: `own` plus `around`. For the peak, the planner takes the largest need
    of a layer's parts. A part runs as several segments."""

    own: float  # bytes that the computation of the part's own gradients needs
    # bytes of partial gradients from other segments of the layer that are in memory while this part's backward runs
    # (for experts, with their own rows); 0 for a mixer
    around: float
    # True: `own` and `around` were fitted to measurements of the whole layer's backward, so they include the mixer's
    # scratch memory, and the planner does not add that; False: the mixer's is counted on its own
    covers_mixer: bool


class LayerPart(Protocol):
    """What the block requires of every mixer and feed-forward, which are nnx modules: `segments`, the chain of
    functions in which the part runs.

    A part may also read values that are not computed in its layer, and give values to later layers. It says so by two
    attributes, which most parts do not have:

    - `takes`, {name of a value: its shape for one token}: the value is given to the layer from outside, [B, T, *shape]
      in the compute dtype, and its segments name it among what they read. It comes from an earlier layer that gives it,
      or from the decoder, which computes it for each layer (Decoder.given).
    - `gives`, {name of one of its residuals: name of the value for other layers}: every later layer that takes the
      value gets this residual, until another layer gives the same. Such a residual is always kept (`small`), and its
      gradient is the sum over the layers that read it. A mixer that gives values has a method `step_giving`."""

    def segments(self) -> tuple[Segment, ...]:
        """The chain of segments that computes OUTPUT, the part's result, from INPUT (the normed residual stream) or
        STREAM (without the norm), in the order in which they run; the last one makes OUTPUT. The block connects them to
        the residual stream."""
        ...


class Mixer(LayerPart, Protocol):
    """A part of a layer in which a token reads other tokens, such as attention. `first_state` and `step` run it in
    generation. `backward_bytes` and `waiting_bytes` are estimates by which the planner predicts the peak memory of
    training.

    To add one, write a file with the module and with a frozen dataclass that has `hf_name` and whose `make(config, key,
    dtype)` builds it (PartConfig in models/config.py). A LayerSpec has an instance of it as the `config` of a Part.
    Having `state_reads` is what marks a part as a mixer."""

    state_reads: tuple[str, ...]  # names of the residuals from which the state for generation is built after a prompt

    def backward_bytes(self, sizes: Sizes) -> float:
        """An estimate of the bytes that the mixer's own backward needs in addition to the residuals, for the planner's
        forecast of the peak. It is not counted if a later feed-forward covers the mixer (Scratch.covers_mixer).

        sizes: of one micro-batch on one device, by the mixer's own names of residuals."""
        ...

    def waiting_bytes(self, sizes: Sizes) -> float:
        """An estimate of the bytes of the mixer's partial results that stay in memory while the backward of a later
        feed-forward of the layer runs, which comes before the mixer's own backward. The planner adds it to what that
        backward needs if the feed-forward covers the mixer (Scratch.covers_mixer).

        sizes: of one micro-batch on one device, by the mixer's own names of residuals."""
        ...

    def first_state(
        self, values: Mapping[str, jax.Array], lengths: jax.Array, new_tokens: int, context: Context
    ) -> Any:
        """The mixer's state for generation (such as caches of keys and values) after prompts, any pytree of arrays
        whose first axis is rows. Block.first_state calls it, when prompts are prefilled and when sizes of states are
        traced.

        Args:
          values: {name: value} of the residuals that `state_reads` names, computed from the prompts.
          lengths: int32[B], tokens of each prompt.
          new_tokens: for how many more tokens than `values` have positions the state must have room.
          context: the layer's spec, and a layout of rows with one prompt each, with their rotary tables.
        """
        ...

    def step(self, x: jax.Array, state: Any, at: jax.Array, context: Context) -> tuple[jax.Array, Any]:
        """Runs the next N tokens of each row in generation: (the part's output [B, N, hidden], the state after them).
        Block.step calls it, unless the mixer gives values to later layers (GivingMixer).

        N is 1 while rows decode; a long prompt is prefilled in chunks of more tokens.

        Args:
          x: [B, N, hidden], the part's input after the norm.
          state: from `first_state` or the previous step.
          at: int32[B], the position of the first of the N tokens, which is also the number of tokens in the state. A
            negative number marks a row that is not decoding; its output and state are ignored.
          context: the layer's spec, a layout with the rotary tables of these positions, and in `taken` what the layer
            takes: from earlier layers as their `step_giving` returned it, and from the decoder.
        """
        ...


class GivingMixer(Mixer, Protocol):
    """A mixer that gives values, such as its keys and values, to later layers (LayerPart.gives). In generation the
    block calls `step_giving` instead of `step`, to pass these values on."""

    def step_giving(
        self, x: jax.Array, state, at: jax.Array, context: Context
    ) -> tuple[jax.Array, object, dict[str, object]]:
        """Runs the next N tokens of each row as Mixer.step does, with the same arguments (x: [B, N, hidden]; state:
        from the step before; at: int32[B], the first position; context), and returns (output, state, a third result):
        {name: value} of what later layers take in this step, each any pytree. Block.step returns them to its caller
        (generation/slots.py), which passes them to the steps of later layers, where they are in Context.taken."""
        ...


class FeedForward(LayerPart, Protocol):
    """A part of a layer that treats each token alone, such as an MLP. `order` has settings of the stack's backward of
    the layer, such as whether it waits for weight gradients; `forward_bytes` and `backward_bytes` are estimates by
    which the planner predicts the peak memory of training.

    One is added like a mixer: by a file with the module and a frozen dataclass that has `hf_name` and whose
    `make(config, key, dtype)` builds it, and of which a LayerSpec has an instance as the `config` of a Part. The module
    must not have `state_reads`.
    """

    order: BackwardOrder  # what it wants of the layer's backward; Block.order combines those of all feed-forwards

    def forward_bytes(self, sizes: Sizes) -> float:
        """An estimate of the bytes in memory at the end of the layer's forward in addition to the residuals, for the
        planner's forecasts of a training step's forward and of passes without a backward.

        sizes: of one micro-batch on one device, by the feed-forward's own names of residuals."""
        ...

    def backward_bytes(self, sizes: Sizes) -> Scratch:
        """An estimate of the bytes that the feed-forward's backward needs in addition to the residuals, for the
        planner's forecast of the peak.

        sizes: of one micro-batch on one device, by the feed-forward's own names of residuals."""
        ...


def matrix_of(module: nnx.Module, name: str) -> Any:
    """Looks up the Linear or ExpertLinear of a part or block (`module`) by its dotted name, such as
    "experts.down_proj", as Segment.matrices has it ("mlp.experts.down_proj" in a block). The result is the module's own
    matrix, not a copy. Block.matrices and the counts of work per segment call it."""
    for part in name.split("."):
        module = getattr(module, part)
    return module


def weights_per_token(segment: Segment, matrix: Any) -> int:
    """How many numbers of a segment's matrix one token is multiplied by, from which work and FLOPs are counted: all of
    a linear's weight, and of a matrix of experts only the weights of the experts that the token is routed to
    (segment.experts_per_token). segment: a segment that multiplies by the matrix. matrix: a Linear or ExpertLinear."""
    if not matrix.num_experts:
        return math.prod(matrix.sizes)
    return math.prod(matrix.sizes[1:]) * segment.experts_per_token


def multiplications(segment: Segment, module: nnx.Module, tokens: int, length: int, backward: bool = False) -> float:
    """The duration of a segment for `tokens` tokens in rows of `length`, stated as the number of multiplications (not
    FLOPs) that large matrix products do in that time. By these durations the stack distributes copies and collectives
    over the segments that they run beside; the planner forecasts seconds in another way.

    Args:
      segment: of a block, or of a part.
      module: that block or part, which has the segment's matrices.
      tokens: of the whole micro-batch on this device.
      length: tokens of a row.
      backward: True: the duration of the derivative, if the segment has a formula of its own for it; a segment without
        one is counted as in the forward. False: that of the forward.
    """
    if segment.multiplications is not None:
        return segment.multiplications(tokens, length, backward)
    active = sum(weights_per_token(segment, matrix_of(module, name)) for name in segment.matrices)
    return float(tokens * (active + segment.token_flops / 2))
