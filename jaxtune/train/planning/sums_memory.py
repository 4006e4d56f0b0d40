"""What lies in the memory of gradient sums before gradients are written. A step of one micro-batch does not read its
first sums, so XLA places other values there: one at a time in each tensor's, if it fits. Forecasts subtract them.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.stack.residual_plan import LayerPlan, Residual, ResidualPlan
from jaxtune.train.planning.layer_costs import LayerKind, nbytes

type _Values = list[tuple[float, float]]  # (bytes of a value, number of such values)


@dataclasses.dataclass(frozen=True)
class SumsMemory:
    """Bytes of the gradient sums of trained matrices. Empty with an adapter, whose sums are small, and on several
    devices, which exchange gradients first.
    """

    layers: tuple[tuple[float, ...], ...] = ()  # of each matrix of each layer
    around: tuple[float, ...] = ()  # of embedding and head, if they are in bfloat16
    head: float = 0.0  # of a head in float32: from the loss on, its gradient is added up where its sum is

    def bytes(self, values: _Values, layers: int, backward: bool) -> float:
        """Bytes of `values` that XLA places there, largest first. layers: first layers whose sums have no gradients
        yet. backward: the last of these is in its backward, when the head's sum has its gradient.
        """
        around_sizes = sorted(self.around)[: -1 if backward else None]  # the head's gradient is there in the backward
        free = np.sort([*around_sizes, *(size for layer in self.layers[:layers] for size in layer)])
        used_sums = placed_bytes = 0.0
        for size, number in sorted(values, reverse=True):
            fit = min(number, max(len(free) - np.searchsorted(free, size) - used_sums, 0.0))
            used_sums, placed_bytes = used_sums + fit, placed_bytes + fit * size
        return float(placed_bytes)

    def copies(self, layers: int, bytes_of_all: float) -> _Values:
        """Copies of the first `layers` layers' weights in the compute dtype. bytes_of_all: of all layers."""
        share = bytes_of_all / max(sum(map(sum, self.layers)), 1.0)
        return [(share * size, 1.0) for layer in self.layers[:layers] for size in layer] if share else []


NO_SUMS = SumsMemory()


def sums_memory(model: Decoder, trained: nnx.State) -> SumsMemory:
    """The sums of `trained`, all weights in stored dtypes, on one device."""

    def sizes(tree) -> list[float]:
        return [nbytes(leaf) for leaf in jax.tree.leaves(tree) if leaf.ndim > 1]

    layers = tuple(tuple(sizes(layer)) for layer in trained.get("layers", {}).values())
    around_sizes = sizes({name: weights for name, weights in trained.items() if name != "layers"})
    in_bf16 = any(leaf.dtype.itemsize < 4 for leaf in jax.tree.leaves(trained))
    if in_bf16:
        return SumsMemory(layers, tuple(around_sizes))
    head = model.head_variable
    return SumsMemory(layers, head=4.0 * math.prod(head.shape) if isinstance(head, nnx.Param) else 0.0)


def in_sums(
    sums: SumsMemory,
    kinds: Sequence[LayerKind],
    counts: Sequence[int],
    known: Sequence[Residual],
    cast_bytes: float,
    plan: ResidualPlan,
    micro_batches: int,
    tokens: float,
) -> Callable[[int, bool], float]:
    """A function of (first layers whose backward is not done, whether the backward runs) -> bytes in sums: kept
    residuals, copies of weights, the head's gradient. 0 with several micro-batches, which read their sums.

      kinds, counts: kinds of layers, and their numbers.
      cast_bytes: copies of all layers' weights in the compute dtype.
      known: the layers' residuals. tokens: of a micro-batch on one device.
    """
    if micro_batches > 1 or not sums.layers:
        return lambda layers, backward: 0.0
    residuals_of = {layer: _kept(kinds, counts, layer, known, tokens) for layer in set(plan.layers)}

    def found(layers: int, backward: bool) -> float:
        groups = collections.Counter(plan.layers[:layers])
        values = [(size, count * number) for layer, count in groups.items() for size, number in residuals_of[layer]]
        return sums.bytes(values + sums.copies(layers, cast_bytes), layers, backward) + sums.head

    return found


def _kept(
    kinds: Sequence[LayerKind], counts: Sequence[int], plan: LayerPlan, residuals: Sequence[Residual], tokens: float
) -> _Values:
    """Residuals on the device under `plan`: each one's largest size in any kind, and how many the mean layer has."""
    values = []
    for name in plan.named("keep", residuals):
        sizes = [
            (kind.residual_bytes(name, tokens), count)
            for kind, count in zip(kinds, counts, strict=True)
            if name in kind.residuals
        ]
        if (largest := max((size for size, _ in sizes), default=0.0)) > 0:
            values.append((largest, sum(size * count for size, count in sizes) / largest / sum(counts)))
    return values
