"""The declarations by which a layer describes itself: its segments, residuals and costs.

A layer is a block around parts: mixers, in which a token reads other tokens, and feed-forwards, which treat each token
alone. Each part yields the segments that it is run in, which are pieces between named residuals. The stack
(models/stack.py) runs the chain of segments and follows a plan that says for every residual whether it is kept,
offloaded or recomputed. The planner, generation, adapters and the mapping of tensor names read the same declarations.
None of them knows a segment, a residual or a kind of layer by name.
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
    """A residual: an intermediate value of a layer's forward that its backward may read, placed by a plan."""

    name: str  # the name that plans, configs and reports use
    # another residual of the layer that always has the same placement, because treating the two differently gains
    # nothing
    decided_with: str | None = None
    recomputable: bool = True  # whether running earlier segments again can compute it
    small: bool = False  # it has so few bytes that the planner only considers plans that keep it
    # whether it may be kept in e4m3 with one scale per token: the segments that read it round their inputs to e4m3
    # anyway
    in_fp8: bool = False


@dataclasses.dataclass(frozen=True)
class Context:
    """What a segment receives beside its values: its layer's spec, the batch's layout and a dropout key."""

    spec: LayerSpec  # the layer's kind: its parts, attention window and rotary base
    layout: PackedLayout  # document boundaries and rotary tables of the batch
    key: jax.Array | None = None  # draws the adapters' dropout masks; None: no dropout
    # in generation: {name: value} of what the part takes from outside of its layer (LayerPart.takes)
    taken: Mapping = dataclasses.field(default_factory=dict)

    @property
    def rotary(self) -> Any:
        """The rotary table of this layer's rotary base, (cos, sin) as rope.rotary_table gives it; None for a layer
        without rotary embeddings."""
        return None if self.spec.rotary is None else self.layout.rotary[self.spec.rotary]


class Backward(Protocol):
    """The signature of a segment's hand-written derivative, which is called instead of jax.vjp of its `run`.

    Args:
      module_of: builds the segment's module from trainable tensors like `trainable`.
      trainable: the module's trainable tensors.
      context: what `run` received: the layer's spec, the batch's layout and the dropout key.
      inputs: the values that the segment read.
      outputs: the values that the segment made in the forward; None for one that was not saved.
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
        outputs: tuple[jax.Array, ...],
        gradients: tuple[jax.Array, ...],
    ) -> tuple[Any, tuple[jax.Array, ...]]: ...


@dataclasses.dataclass(frozen=True)
class AuxLoss:
    """A loss that a part of the model computes about itself and that training may add, such as a router's balancing
    loss."""

    name: str  # of the metric; the config key `{name}_coef` sets the factor by which training multiplies the loss
    title: str  # what reports call it
    # float32[] mean over tokens, computed from the segment's output summed over all layers, rows and devices
    value: Callable[..., jax.Array]
    # the factor that the model's own config sets, used unless the run's config has one; 0: not added
    coefficient: float = 0.0


@dataclasses.dataclass(frozen=True)
class Segment:
    """A piece of a layer's computation between named residuals.

    Only the first four fields are needed to run a segment; the others tell the stack how it may be run and tell the
    planner what it costs.
    """

    name: str  # its name in profiles and among the dropout keys
    reads: tuple[str, ...]  # names of the values it takes; INPUT and STREAM are what the block feeds the part
    makes: tuple[Residual, ...]  # the residuals it computes; one that is named OUTPUT is the end of the part
    run: Callable[..., tuple]  # (module, context, *values) -> a tuple with one value for each of `makes`
    # dotted names of the module's matrices that it multiplies by ("experts.down_proj"), in the order in which the keys
    # of adapters are drawn
    matrices: tuple[str, ...] = ()
    backward: Backward | None = None  # its hand-written derivative; None: jax.vjp of `run`
    differentiable: bool = True  # whether any gradient flows through it
    # the losses that are computed from its one output. That output is no residual: if a loss is wanted, it is returned
    # beside the layer's output, summed over the layers that compute it.
    aux: tuple[AuxLoss, ...] = ()
    experts_per_token: int = 0  # for matrices with experts: how many experts each token is multiplied by
    separable: bool = False  # each of its outputs can be computed without the others
    tokenwise: bool = False  # it may run over tiles of tokens, as one with neighbouring segments that also may
    # when it is run again in the backward, the weights that it decodes also serve its gradients
    decodes_once: bool = False
    # Sizes -> bytes that its derivative keeps. If set, a recomputed segment is differentiated when it is recomputed,
    # and these bytes are kept until its gradient arrives. None: the segment runs once more when its gradient arrives,
    # and takes no memory before.
    derivative_bytes: Callable[[Sizes], float] | None = None
    scoped: bool = True  # its kernels have its name as their scope in profiles
    # query heads times head dim of an attention, which costs 4 FLOPs per visible key for each of them
    attention_width: int = 0
    # (forward, backward): its attention's duration over that of usual head dims with as many FLOPs
    attention_slower: tuple[float, float] = (1.0, 1.0)
    token_flops: float = 0.0  # FLOPs of its forward for one token, without its matrices and without attention
    # (forward, derivative): time per token of its own kernels beyond token_flops and beyond moving inputs and outputs,
    # in bytes that a device copy moves in that time
    kernel_bytes: tuple[float, float] = (0.0, 0.0)
    # (tokens of the batch, tokens of a row, backward) -> its duration, in multiplications that a large matrix product
    # does in that time; None: computed from its matrices and token_flops
    multiplications: Callable[[int, int, bool], float] | None = None

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the values that it computes."""
        return tuple(residual.name for residual in self.makes)


@dataclasses.dataclass(frozen=True)
class BackwardOrder:
    """The order in which a layer's backward computes, declared by feed-forwards where XLA's own order costs memory or
    time. The stack follows it in layer_backward."""

    # differentiate a recomputed segment when it is recomputed, and keep what its derivative reads. For thin products
    # and rows sorted by expert, computing them twice takes longer than recomputing more of other layers.
    derivatives_at_once: bool = False
    # values that several segments read, and that may be computed before a segment's gradient arrives
    shared: tuple[str, ...] = ()
    # a segment waits for the weight gradients of the segments after it. Otherwise XLA puts the adapters' gradients off
    # to the end of the layer, and keeps the wide operands of these thin products until then.
    weights_first: bool = True
    # residuals that are not tied to the layer's gradient unless memory is short, so that XLA may keep what the forward
    # computed from them alone, and does not compute it again
    free: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes from which a layer computes how many scratch bytes one micro-batch takes on one device. sizes[name]
    gives the bytes of the residual of that name."""

    residuals: Mapping[str, float]  # bytes of each residual by name; for tiled segments, of one tile
    recomputed: frozenset[str]  # names of the residuals that are recomputed
    tiles: int  # number of tiles that tokenwise segments run over; 1: they run whole
    dtype: jnp.dtype  # compute dtype
    length: int  # tokens of a row
    hopper: bool  # whether the device runs kernels for compute capability 9.0
    device: str  # the device's name, which selects numbers in models/fitted.py

    def __getitem__(self, name: str) -> float:
        """Bytes of a residual; 0 for one that the layer does not have."""
        return self.residuals.get(name, 0.0)


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Bytes that the backward of a part, usually a feed-forward, takes in addition to the residuals."""

    own: float  # for its own computation
    around: float  # of partial gradients of other segments that exist at the same time
    # these bytes were fitted to the backward of the whole layer, so that the mixer's need not be added
    covers_mixer: bool


class LayerPart(Protocol):
    """What the block requires of every mixer and feed-forward, which are nnx modules.

    A part may also read values that are not computed in its layer, and give values to later layers. It says so by two
    attributes, which most parts do not have:

    - `takes`, {name of a value: its shape for one token}: the value is given to the layer from outside, [B, T, *shape]
      in the compute dtype, and its segments name it among what they read. It comes from an earlier layer that gives it,
      or from the decoder, which computes it for each layer (Decoder.given).
    - `gives`, {name of one of its residuals: name of the value for other layers}: every later layer that takes the
      value gets this residual, until another layer gives the same. Such a residual is always kept (`small`), and its
      gradient is the sum over the layers that read it. A mixer that gives values has a method `step_giving`.
    """

    def segments(self) -> tuple[Segment, ...]:
        """The part's computation from INPUT (or STREAM) to OUTPUT, in the order in which it runs."""
        ...


class Mixer(LayerPart, Protocol):
    """A part in which a token reads other tokens, such as attention.

    To add one, write a file with the module and with a frozen dataclass whose `make(config, key, dtype)` builds it. A
    LayerSpec names that dataclass as the `config` of a Part. Having `state_reads` is what marks a part as a mixer.
    """

    state_reads: tuple[str, ...]  # names of the residuals from which the state for generation is built after a prompt

    def backward_bytes(self, sizes: Sizes) -> float:
        """Bytes that the mixer's own backward takes in addition to the residuals, for the planner's peak.

        sizes: of one micro-batch on one device, by the mixer's own names of residuals.
        """
        ...

    def waiting_bytes(self, sizes: Sizes) -> float:
        """Bytes of the mixer's partial results that exist while the feed-forward's backward runs.

        The planner adds them to what that backward needs. sizes: of one micro-batch on one device, by the mixer's own
        names of residuals.
        """
        ...

    def first_state(
        self, values: Mapping[str, jax.Array], lengths: jax.Array, new_tokens: int, context: Context
    ) -> Any:
        """The state for generation after prompts, any pytree.

        Args:
          values: the residuals that `state_reads` names, computed from the prompts.
          lengths: int32[B], tokens of each prompt.
          new_tokens: how many more tokens the state must have room for.
          context: the layer's spec, and the layout that the prompts ran in.
        """
        ...

    def step(self, x: jax.Array, state: Any, at: jax.Array, context: Context) -> tuple[jax.Array, Any]:
        """Runs the next N tokens of each row: (the part's output [B, N, hidden], the state after them).

        N is 1 while rows decode; a long prompt is prefilled in chunks of more tokens.

        Args:
          x: [B, N, hidden].
          state: from `first_state` or the previous step.
          at: int32[B], the position of the first of the N tokens, which is also the number of tokens in the state. A
            negative number marks a row that is not decoding; its output and state are ignored.
          context: the layer's spec, a layout with the rotary tables of these positions, and what the part takes from
            earlier layers, as their `step_giving` returned it.
        """
        ...


class GivingMixer(Mixer, Protocol):
    """A mixer that gives values to later layers (LayerPart.gives)."""

    def step_giving(
        self, x: jax.Array, state, at: jax.Array, context: Context
    ) -> tuple[jax.Array, object, dict[str, object]]:
        """`Mixer.step`, with the same arguments (x, state, at, context), and with a third result: {name: value} of
        what later layers take in this step, any pytrees."""
        ...


class FeedForward(LayerPart, Protocol):
    """A part that treats each token alone, such as an MLP. One is added like a mixer: by a file with the module and a
    frozen dataclass whose `make(config, key, dtype)` builds it, which a LayerSpec names as the `config` of a Part."""

    order: BackwardOrder  # how its layer's backward is ordered

    def forward_bytes(self, sizes: Sizes) -> float:
        """Bytes at the end of the layer's forward in addition to the residuals, for the planner's peak.

        sizes: of one micro-batch on one device, by the feed-forward's own names of residuals.
        """
        ...

    def backward_bytes(self, sizes: Sizes) -> Scratch:
        """Bytes of its backward in addition to the residuals, for the planner's peak.

        sizes: of one micro-batch on one device, by the feed-forward's own names of residuals.
        """
        ...


def matrix_of(module: nnx.Module, name: str) -> Any:
    """The Linear or ExpertLinear of a module under this dotted name, such as "experts.down_proj" (Segment.matrices)."""
    for part in name.split("."):
        module = getattr(module, part)
    return module


def weights_per_token(segment: Segment, matrix: Any) -> int:
    """How many numbers of a segment's matrix one token is multiplied by: all of a linear's weight, and of a matrix of
    experts only the weights of the experts that the token is routed to. matrix: a Linear or ExpertLinear."""
    if not matrix.num_experts:
        return math.prod(matrix.sizes)
    return math.prod(matrix.sizes[1:]) * segment.experts_per_token


def multiplications(segment: Segment, module: nnx.Module, tokens: int, length: int, backward: bool = False) -> float:
    """The duration of a segment for `tokens` tokens in rows of `length`, in multiplications that large products do in
    that time. The stack spreads copies and collectives over segments by it.

    Args:
      segment: of a block, or of a part.
      module: that block or part, which has the segment's matrices.
      tokens: of the whole micro-batch on this device.
      length: tokens of a row.
      backward: whether it is the duration of the derivative, where the segment has a formula of its own; others are
        counted as in the forward.
    """
    if segment.multiplications is not None:
        return segment.multiplications(tokens, length, backward)
    active = sum(weights_per_token(segment, matrix_of(module, name)) for name in segment.matrices)
    return float(tokens * (active + segment.token_flops / 2))
