"""Bytes that the devices of a mesh receive from each other in a step."""

from __future__ import annotations

import dataclasses
import math

import jax

from jaxtune.models.placement import partition
from jaxtune.models.placement.low_format import bytes_per_number
from jaxtune.train.program.gradient_sync import GradientSync

SYNC_ERRORS = "errors of the gradient sync"  # a name of bytes in StepCost.fixed


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Bytes that one device receives from the others; `sums` once a step, the rest once in each micro-batch."""

    weights: float = 0.0  # of all layers' divided weights, gathered once; the backward may gather them again
    gradients: float = 0.0  # of the layers' trained weights that are divided over devices, in the backward
    around: float = 0.0  # weights and gradients of embedding and head, during whose transfer nothing is computed
    sums: float = 0.0  # gradients, added over the devices that have the same weight or the same part of it, once a step
    frozen: float = 0.0  # the part of `weights` that does not train
    frozen_around: float = 0.0  # the part of `around` that does not train


NO_EXCHANGE = Exchange()  # of a single device


def exchange_of(trained, frozen, shape: partition.MeshShape, sync: GradientSync | None) -> Exchange:
    """What one device receives. trained, frozen: nnx.States, in stored dtypes. sync: None: gradients in float32, but in
    the weights' dtype for divided weights in two parts (gathers.scatter). shape: the mesh's.
    """
    weight_shards = shape.shard_count

    def of_layers(tree) -> float:
        return partition.divided_sizes(tree["layers"], weight_shards)[0] if "layers" in tree else 0.0

    received, weights = 1 - 1 / weight_shards, of_layers(trained) + of_layers(frozen)
    _, gradients = partition.divided_sizes(trained["layers"], weight_shards) if "layers" in trained else (0.0, 0.0)
    every, (_, divided) = (
        partition.divided_sizes((trained, frozen), weight_shards)[0],
        partition.divided_sizes(trained, weight_shards),
    )
    whole_numbers = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(trained)) - divided
    # Bytes of a gradient as gathers.scatter sends it, and in sums of whole weights' gradients.
    width = 4.0 if weight_shards > 2 else partition.divided_sizes(trained, weight_shards)[0] / max(divided, 1.0)
    width, summed = (width, 4.0) if sync is None else [bytes_per_number(sync.format)] * 2
    return Exchange(
        weights=received * weights,
        gradients=received * width * gradients,
        around=received * (every - weights + width * (divided - gradients)),
        sums=2 * summed * (whole_numbers * (1 - 1 / shape.size) + divided / weight_shards * (1 - 1 / shape.copies)),
        frozen=received * of_layers(frozen),
        frozen_around=received * (partition.divided_sizes(frozen, weight_shards)[0] - of_layers(frozen)),
    )


def sync_bytes(masters, sync: GradientSync | None, shape: partition.MeshShape) -> tuple[dict[str, float], float]:
    """({name: bytes of a quantised sync's errors on a device}, bytes that it takes in the update); ({}, 0.0) in
    float32. masters: shapes of the trained weights. shape: the mesh's.
    """
    error_bytes, update_bytes = (0.0, 0.0) if sync is None else sync.bytes_on_device(masters, shape)
    return {SYNC_ERRORS: error_bytes} if error_bytes else {}, update_bytes
