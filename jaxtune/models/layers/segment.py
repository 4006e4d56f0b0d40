"""The words in which a layer describes itself.

A layer is a block around parts: mixers, which look at other tokens, and feed-forwards, which do not. Each part
yields the segments that it is run in: pieces between named residuals. The stack runs the chain and decides by a plan
what becomes of every residual between forward and backward; the planner, generation, adapters and the names of tensors
read the same declaration. None of them knows a segment, a residual or a kind of layer by name.
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

# In a part's own segments: what the block feeds it through its norm; the same without the norm; and what it gives back,
# which the block adds to the residual stream.
INPUT, STREAM, OUTPUT = "input", "stream", "output"


@dataclasses.dataclass(frozen=True)
class Residual:
    """A value that a layer's forward may leave for its backward.

    Args:
      decided_with: another residual of the layer, which this one is always kept, offloaded or recomputed with: nothing
        is won by treating them differently.
      recomputable: whether running earlier segments again may make it anew.
      small: it is so few bytes that no plan is looked for in which it is not kept.
      in_fp8: whether it may be kept in e4m3, each token's numbers by their largest, as a product in FP8 rounds what it
        multiplies: where the segments that read it lose no more by that than by their own rounding.
    """

    name: str
    decided_with: str | None = None
    recomputable: bool = True
    small: bool = False
    in_fp8: bool = False


@dataclasses.dataclass(frozen=True)
class Context:
    """What a segment is given beside its values: what is the same for all layers of a kind, and its dropout key."""

    spec: LayerSpec
    layout: PackedLayout
    key: jax.Array | None = None

    @property
    def rotary(self) -> Any:
        """The rotary table of the layer's base, or None."""
        return None if self.spec.rotary is None else self.layout.rotary[self.spec.rotary]


class Backward(Protocol):
    """A derivative of a segment's own, in place of jax.vjp's.

    Args:
      module_of: the segment's module with these trainable tensors. trainable: the tensors there are.
      inputs, outputs: the segment's arrays, outputs as they were saved. gradients: of the outputs that have one.
    Returns:
      (gradients of the trainable tensors, or None where there are none; a gradient for each input)
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
    """A loss of a part's own that training may add to an objective's, such as the one that balances a router.

    Args:
      name: of the metric. Training adds `coefficient` times the loss, or the value of the run's config key
        `{name}_coef` where that is set.
      title: what reports call it.
      value: of what the segment makes, summed over all layers, rows and devices: float32[], a mean over tokens.
      coefficient: what the model's own config says; 0: training adds nothing unless the run asks for it.
    """

    name: str
    title: str
    value: Callable[..., jax.Array]
    coefficient: float = 0.0


@dataclasses.dataclass(frozen=True)
class Segment:
    """A piece of a layer between named residuals.

    Args:
      reads: names of the values it takes; INPUT and STREAM are what the block feeds the part.
      makes: what it gives; a residual named OUTPUT is the end of the part.
      run: (module, context, *values) -> a tuple, one value for each of `makes`.
      matrices: the module's matrices that it multiplies by, as dotted names ("experts.down_proj"), in the order in
        which adapters are drawn.
      backward: its own derivative; None: jax.vjp of `run`.
      differentiable: whether anything has a gradient through it.
      aux: the losses made of its one output, which is no residual: where one of them is wanted it leaves the stack
        beside the layers' output, summed over the layers that make it.
      experts_per_token: experts that a token is multiplied by, of each matrix that has experts.
      separable: its outputs can be computed each alone.
      tokenwise: it may run over tiles of tokens, together with its neighbours that may.
      decodes_once: where it runs again in the backward, what it decodes serves its gradients too.
      held_bytes: Sizes -> bytes that its derivative holds: where it runs again in the backward, it is differentiated
        then; None: it is made once more when its gradient is there, which takes no memory before.
      scoped: its kernels carry its name in profiles.
      attention_width: query heads times head dim, where it is an attention: it costs 4 FLOPs of these a visible key.
      token_flops: of its forward for one token, beside its matrices and beside attention.
      kernel_bytes: (of its forward, of its derivative) for one token: what its own kernels take beside token_flops and
        beside moving what it reads and makes, in bytes that a copy moves in that time.
      multiplications: (tokens of a batch, tokens of a row, backward) -> how long it takes, in multiplications of large
        products; None: those of its matrices.
    """

    name: str
    reads: tuple[str, ...]
    makes: tuple[Residual, ...]
    run: Callable[..., tuple]
    matrices: tuple[str, ...] = ()
    backward: Backward | None = None
    differentiable: bool = True
    aux: tuple[AuxLoss, ...] = ()
    experts_per_token: int = 0
    separable: bool = False
    tokenwise: bool = False
    decodes_once: bool = False
    held_bytes: Callable[[Sizes], float] | None = None
    scoped: bool = True
    attention_width: int = 0
    token_flops: float = 0.0
    kernel_bytes: tuple[float, float] = (0.0, 0.0)
    multiplications: Callable[[int, int, bool], float] | None = None

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(residual.name for residual in self.makes)


@dataclasses.dataclass(frozen=True)
class BackwardOrder:
    """In which order a layer's backward computes, where XLA's own choice costs memory or time. Feed-forwards say it.

    Args:
      derivatives_at_once: a segment that runs again is differentiated then, and what its derivative needs is kept. To
        make thin products and sorted rows twice takes longer than all that other layers would make twice.
      shared: values that several segments read and that may be there before a segment's gradient is.
      weights_first: a segment waits for the weights' gradients of those after it. XLA puts the adapters' off to the
        layer's end, and keeps the wide operands of these thin products.
      free: residuals that are not tied to the layer's gradient where memory is not short: what the forward made of them
        alone is kept, and not made again.
    """

    derivatives_at_once: bool = False
    shared: tuple[str, ...] = ()
    weights_first: bool = True
    free: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a layer's scratch bytes depend on, for one micro-batch on one device.

    Args:
      residuals: {name: bytes}, for tiled segments those of a tile. recomputed: names of those that are.
      tiles: that tokenwise segments run over. dtype: of the compute. length: tokens of a row.
      hopper: the device runs kernels for compute capability 9.0. device: its name, for models/fitted.py.
    """

    residuals: Mapping[str, float]
    recomputed: frozenset[str]
    tiles: int
    dtype: jnp.dtype
    length: int
    hopper: bool
    device: str

    def __getitem__(self, name: str) -> float:
        return self.residuals.get(name, 0.0)


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Bytes that a feed-forward's backward takes beside the residuals there are: its own, and around it.

    covers_mixer: fitted to the whole layer's backward, so that the mixer's own moment need not be looked at.
    """

    own: float
    around: float
    covers_mixer: bool


class LayerPart(Protocol):
    """What the block asks of a mixer and of a feed-forward, both nnx modules."""

    def segments(self) -> tuple[Segment, ...]: ...


class Mixer(LayerPart, Protocol):
    """A part that looks at other tokens.

    To add one: a file with the module and a frozen dataclass whose `make(config, key, dtype)` gives it, which a Part of
    a LayerSpec has as its `config`. `state_reads` is what makes a part a mixer.
    """

    state_reads: tuple[str, ...]  # residuals that the state of generation begins from

    def backward_bytes(self, sizes: Sizes) -> float:
        """Bytes of its own backward beside the residuals there are."""
        ...

    def waiting_bytes(self, sizes: Sizes) -> float:
        """Bytes of what is half ready of it while the feed-forward's backward runs."""
        ...

    def first_state(
        self, values: Mapping[str, jax.Array], lengths: jax.Array, new_tokens: int, context: Context
    ) -> Any:
        """The state after prompts of `lengths` int32[B], with room for so many tokens more; values: of state_reads;
        context: of the prompts."""
        ...

    def step(self, x: jax.Array, state: Any, at: jax.Array, context: Context) -> tuple[jax.Array, Any]:
        """The next N tokens of each row, x [B, N, hidden]: (what the block adds, the state with them).

        While rows decode, N is 1; a long prompt is prefilled by chunks of more. `at` int32[B] is the position of the
        first of them, which is the number of tokens in the state; a negative number marks a row that is not decoding,
        whose output does not matter, and whose state does not either. context.layout has the rotary tables of these
        positions."""
        ...


class FeedForward(LayerPart, Protocol):
    """A part that looks at one token at a time; see Mixer for how to add one."""

    order: BackwardOrder

    def forward_bytes(self, sizes: Sizes) -> float:
        """Bytes at the end of the layer's forward beside the residuals there are."""
        ...

    def backward_bytes(self, sizes: Sizes) -> Scratch: ...


def matrix_of(module: nnx.Module, name: str) -> Any:
    """The matrix of a dotted name."""
    for part in name.split("."):
        module = getattr(module, part)
    return module


def numbers_met(segment: Segment, matrix: Any) -> int:
    """Numbers of a segment's matrix that one token is multiplied by."""
    if not matrix.num_experts:
        return math.prod(matrix.sizes)
    return math.prod(matrix.sizes[1:]) * segment.experts_per_token


def multiplications(segment: Segment, module: nnx.Module, tokens: int, length: int, backward: bool = False) -> float:
    """How long a segment takes for `tokens` tokens in rows of `length`, in multiplications of large products."""
    if segment.multiplications is not None:
        return segment.multiplications(tokens, length, backward)
    met = sum(numbers_met(segment, matrix_of(module, name)) for name in segment.matrices)
    return float(tokens * (met + segment.token_flops / 2))
