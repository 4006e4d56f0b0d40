"""Bytes of weights, from shapes alone, for forecasts before anything is loaded: of a tree of arrays (`nbytes`), of
frozen weights on each device (`weight_bytes`), and what the allocator loses on quantised ones (`packed_slack`)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxtune.models.placement import partition
from jaxtune.pallas.fitted import device_name
from jaxtune.pallas.formats import Stored, format_of


def nbytes(tree) -> float:
    """Bytes of all arrays of a tree, which may be abstract (jax.ShapeDtypeStruct), counted whole and not per device:
    shape times item size, 0 for a tree without arrays. It is a float, as all bytes of the planner's forecasts are.
    Trained weights, optimizer states and a layer's values are counted by it."""
    return float(sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree)))


def packed_slack(frozen) -> float:
    """Device bytes that the allocator loses on a model's quantised weights, because the 16-bit originals, which are
    freed after encoding, leave gaps of other sizes: a share of the quantised weights' bytes, fitted for each format and
    device. `frozen` is the nnx.State of the weights that do not train; 0 if none is quantised. Weights that are divided
    over devices count whole here; callers divide the result by the number of parts."""
    stored = [leaf for leaf in jax.tree.leaves(frozen, is_leaf=_is_stored) if isinstance(leaf, Stored)]
    return sum(format_of(leaf).slack.of("xla", device_name()) * nbytes(leaf) for leaf in stored)


def weight_bytes(frozen, parts: int) -> float:
    """Bytes of frozen weights on each device, with what the allocator loses on quantised ones, for the forecast of a
    step, and of all the student's weights, which do not train meanwhile, for that of a teacher's pass. frozen: their
    nnx.State. parts: the number of devices over which weights are divided; those that cannot be divided count in
    full."""
    return partition.bytes_per_device(frozen, parts) + packed_slack(frozen) / parts


def _is_stored(leaf) -> bool:
    """Whether `leaf`, any node of a pytree, is a quantised weight. As `is_leaf` of jax.tree functions it keeps them
    from looking into the weight's own arrays: `packed_slack` finds whole quantised weights so, because the share that
    the allocator loses depends on a weight's format."""
    return isinstance(leaf, Stored)
