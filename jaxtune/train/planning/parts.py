"""What a step consists of, under any plan: its shape, its layers, its head, its update, weights divided over devices,
and what is elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Self

import jax.numpy as jnp

from jaxtune.models.fitted import FLOAT32_HEAD_TIME
from jaxtune.models.layers.segment import Residual
from jaxtune.train.planning.devices import Device, float32_time
from jaxtune.train.planning.exchange import NO_EXCHANGE, SYNC_ERRORS, Exchange
from jaxtune.train.planning.layer_costs import LayerKind, Work
from jaxtune.train.planning.sums_memory import NO_SUMS, SumsMemory

# Names of bytes in StepParts.fixed.
TEACHER = "teacher's weights"
FROZEN = "frozen weights"
PICTURES = "pictures of two steps"
STATES = "optimizer states"


@dataclasses.dataclass(frozen=True)
class SegmentCost:
    """Cost of one segment, a function of a layer's computation such as the q, k and v products."""

    name: str  # the segment's name
    outputs: tuple[str, ...]  # names of the residuals that it makes, and LAYER_OUTPUT if it makes the layer's output
    work: Work  # FLOPs and bytes; layers without the segment count as zero in the mean
    in_mixer: bool  # whether it belongs to a mixer, such as attention; False: to a feed-forward
    first: bool  # whether it is the first segment of a mixer
    ends: bool  # whether it makes the layer's output
    separable: bool  # whether each of its outputs can be computed without the others; False: only all at once
    tokenwise: bool  # whether it may run over tiles of a row's tokens; False: it needs whole rows
    # if it is run again in the backward: whether the weights that it decodes also serve its gradients, or (False) the
    # gradients decode them once more
    decodes_once: bool
    # True: its backward always runs its forward once more, which also recomputes its outputs; False: it does not
    runs_again: bool = False
    low_rank: float = 0.0  # bytes per token of its low-rank inputs
    low_rank_with: tuple[str, ...] = ()  # the residuals of which none may be recomputed if these are kept


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a step and of its model."""

    rows: int  # of the step, on all devices
    length: int  # tokens of a row
    document: float  # tokens of the document in which a token attends, on average
    devices: int  # of the run's mesh; they share the rows
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: jnp.dtype  # the compute dtype

    def tokens(self, micro_batches: int) -> float:
        """Tokens of a micro-batch on one device, padding included; may be a fraction."""
        return self.rows / micro_batches / self.devices * self.length


@dataclasses.dataclass(frozen=True)
class Layers:
    """The layers, on one device."""

    all_residuals: tuple[Residual, ...]  # of all layers, each name once: what a plan can place
    residuals: Mapping[str, float]  # {residual: bytes per token}, the mean over all layers
    padding: Mapping[str, float]  # {residual: bytes that do not depend on the tokens}, the mean over all layers
    # the pieces of the layers' computation between residuals; their work is the mean over all layers
    segments: tuple[SegmentCost, ...]
    kinds: tuple[LayerKind, ...]  # the different layers of the model
    kind_counts: tuple[int, ...]  # the number of layers of each kind
    cast_bytes: float  # trained matrices in the compute dtype, which live from forward to backward
    # residuals of which only one tile exists at a time if tokenwise segments run over tiles of tokens
    tiled: tuple[str, ...] = ()
    # experts' adapters in the kernels' layout, if every residual is kept: XLA copies them once for forward and backward
    shared: float = 0.0
    given_bytes: float = 0.0  # per token: values that layers take from outside, with their gradients
    dropout_bytes: float = 0.0  # per token: the largest adapter input with dropout, masked, and its mask
    has_experts: bool = False  # whether any layer has a mixture of experts

    def residual_bytes(self, name: str, tokens: float) -> float:
        """Bytes of a residual of the mean layer."""
        return self.residuals[name] * tokens + self.padding[name]


@dataclasses.dataclass(frozen=True)
class Head:
    """The output head, on one device."""

    bytes: float  # at the loss: gradient and compute-dtype copies of a trained head, and a head padded by the loss
    # at the loss: of a logit, while its chunk exists: in float32, and its gradient in `dtype` or, capped, in float32
    logit_bytes: float
    # after the loss: gradient of a trained head, and the copy in 16 bits of one that is stored in float32
    gradient_bytes: float
    trains: bool  # False: it has no gradient
    dtype: jnp.dtype  # in which it multiplies: the compute dtype, or its own by a precision map

    def time(self, compute: jnp.dtype, device: Device) -> float:
        """How many times as long a product with the head takes as one in the compute dtype; above 1 for a float32 head
        beside 16 bits.
        """
        if self.dtype != jnp.float32 or compute.itemsize == 4:
            return 1.0
        return FLOAT32_HEAD_TIME.of("xla", device.name) if device.hopper else float32_time(device.name)

    def parts_bytes(self, shape: Shape, device: Device) -> tuple[float, float]:
        """(bytes, bytes per logit of a chunk) of the parts into which XLA divides operands of a float32 head on Hopper
        (linear_cross_entropy's `precision_of`); else 0.
        """
        if self.dtype != jnp.float32 or not device.hopper:
            return 0.0, 0.0
        return 8.0 * shape.vocab_size * shape.hidden_size, 4.0


@dataclasses.dataclass(frozen=True)
class Update:
    """Gradient sums and the update, on one device."""

    trained: float  # number of trained parameters
    trained_here: float  # those that this device updates
    bytes: float = 0.0  # taken by the update in addition to `StepParts.fixed`
    sync_bytes: float = 0.0  # taken by the update for a quantised sync of gradients
    # the part of `StepParts.fixed` that a step of one micro-batch does not need: its gradient sums are not in float32
    # but in the dtype in which the trained weights are stored. 0 if the config sets one micro-batch.
    less_sums: float = 0.0
    sums: SumsMemory = NO_SUMS  # the memory of gradient sums in which other values lie before
    hosted_bytes: float = 0.0  # optimizer states in host memory


@dataclasses.dataclass(frozen=True)
class Divided:
    """Weights that are divided over devices, gathered on one; 0 if undivided."""

    layer_bytes: float = 0.0  # of the largest layer
    head_bytes: float = 0.0  # of the head
    gradient_bytes: float = 0.0  # gradients of a layer's trained matrices, computed and summed
    frozen_layer_bytes: float = 0.0  # the part of `layer_bytes` that does not train
    resident_layer_bytes: float = 0.0  # added by each layer whose frozen weights are whole for the whole run
    resident_around_bytes: float = 0.0  # added by frozen embedding and head that are whole for the whole run
    exchange: Exchange = NO_EXCHANGE  # bytes that this device receives from other devices
    whole: int = 0  # layers whose weights stay gathered from forward to backward
    resident: int = 0  # layers whose frozen weights are whole for the whole run

    def resident_bytes(self, layers: int, num_layers: int) -> float:
        """Device bytes added if the frozen weights of `layers` layers stay whole for the run, each as large as the
        largest; with all layers, embedding's and head's, too. The whole weights replace the device's share, unless the
        given model stays in memory.
        """
        return layers * self.resident_layer_bytes + (self.resident_around_bytes if layers == num_layers else 0.0)

    def gathered_bytes(self, num_layers: int, head_trains: bool) -> tuple[float, float, float]:
        """Bytes of gathered weights (at the loss, in a layer's forward, in its backward with gradients). The loss has
        one layer's and the head's, the others two layers' (the next ones arrive), or those of `whole` layers if more.
        Resident weights do not count.
        """

        def of(layers: int) -> float:
            frozen = min(layers, num_layers - self.resident) * self.frozen_layer_bytes
            return layers * (self.layer_bytes - self.frozen_layer_bytes) + frozen

        head = 0.0 if self.resident == num_layers and not head_trains else self.head_bytes
        layers = of(max(self.whole, 2))
        return of(max(self.whole, 1)) + head, layers, layers + self.gradient_bytes


@dataclasses.dataclass(frozen=True)
class Moved:
    """What is elsewhere in these parts, and what it takes beside residuals."""

    levels: Mapping[str, int] = dataclasses.field(default_factory=dict)  # {movable: how much of it is moved}, from 1 on
    pinned_bytes: float = 0.0  # pinned host memory for one device
    pageable_bytes: float = 0.0  # other host memory
    copied_bytes: float = 0.0  # device memory of further copies of frozen weights
    batch_bytes: float = 0.0  # device memory that comes with a batch
    link_bytes: float = 0.0  # that arrive in each pass of the mean layer, forward and backward, beside its residuals
    # Bytes of a layer's weights that stream, of the next one's beside them, and of these what comes at once.
    streaming: tuple[float, float, float] = (0.0, 0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Tower:
    """The tower of a model that reads pictures, on one device."""

    parts: StepParts  # its layers over the rows' patches, in place of tokens
    trains: bool  # False: it has no backward
    merger_flops: float  # of a patch, in the forward
    kept: float  # bytes of a patch that the backward reads, or of a frozen tower the reference
    of_merger: float  # the part of `kept` that only the merger's reads, which comes first
    both_ways: int = 0  # layers of the text model in which a picture's tokens see each other

    @property
    def patches(self) -> int:
        """For which a row has room."""
        return self.parts.shape.length


@dataclasses.dataclass(frozen=True)
class StepParts:
    """Bytes and work of a step on one of the devices that share the rows."""

    shape: Shape
    layers: Layers
    head: Head
    update: Update
    divided: Divided
    fixed: Mapping[str, float]  # {what: device bytes} in memory during the whole step
    moved: Moved = Moved()
    reference_runs: int = 0  # forward passes of a frozen model in each micro-batch
    teacher: StepParts | None = None  # of the forward passes of the teacher, if the frozen model is one
    tower: Tower | None = None  # None: rows have no pictures
    held_out: Tower | None = None  # over the patches of held-out rows
    held_out_bytes: float = 0.0  # of the arrays of two steps' pictures of held-out rows

    def level(self, word: str) -> int:
        """How much of a movable is moved in these parts."""
        return self.moved.levels.get(word, 0)

    def reshaped(self, **sizes: int) -> Self:
        """With other fields of `shape`."""
        return dataclasses.replace(self, shape=dataclasses.replace(self.shape, **sizes))

    @property
    def frozen_bytes(self) -> float:
        """Device bytes of frozen weights, a teacher's included."""
        return self.fixed[FROZEN] + self.fixed.get(TEACHER, 0.0)

    @property
    def trained_bytes(self) -> float:
        """Bytes of the trained parameters on one device, in their stored dtype."""
        return sum(size for name, size in self.fixed.items() if name.startswith("trainable parameters"))

    @property
    def saved_bytes(self) -> float:
        """Bytes of one device that a checkpoint copies to host memory."""
        states = self.fixed[STATES] + self.fixed.get(SYNC_ERRORS, 0.0)
        return self.trained_bytes + states + self.update.hosted_bytes

    @property
    def gathered_bytes(self) -> tuple[float, float, float]:
        """As Divided.gathered_bytes."""
        return self.divided.gathered_bytes(self.shape.num_layers, self.head.trains)

    def fixed_bytes(self, micro_batches: int) -> float:
        """Device bytes in memory during the whole step. With one micro-batch gradient sums have the stored dtype of the
        weights, not float32.
        """
        return sum(self.fixed.values()) - (self.update.less_sums if micro_batches == 1 else 0.0)
