"""Bytes of weights on a device, from shapes alone: for forecasts before anything is loaded."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxtune.models.placement import partition
from jaxtune.pallas import dispatch
from jaxtune.pallas.formats import Stored, format_of


def nbytes(tree) -> float:
    """Bytes of the arrays of a tree, which may be abstract."""
    return float(sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree)))


def packed_slack(frozen) -> float:
    """Device bytes that the allocator loses on a model's quantised weights, because the 16-bit originals, which are
    freed after encoding, leave gaps of other sizes. `frozen` is the nnx.State of the weights that do not train."""
    stored = [leaf for leaf in jax.tree.leaves(frozen, is_leaf=_is_stored) if isinstance(leaf, Stored)]
    return sum(format_of(leaf).slack.of("xla", dispatch.device_kind() or "") * nbytes(leaf) for leaf in stored)


def weight_bytes(frozen, parts: int) -> float:
    """Bytes on each device of `frozen`, an nnx.State of frozen weights, of which `parts` devices divide those that can
    be divided; with what the allocator loses on quantised ones."""
    return partition.bytes_per_device(frozen, parts) + packed_slack(frozen) / parts


def _is_stored(leaf) -> bool:
    """Whether `leaf`, of a tree of arrays, is a quantised weight, which is not looked into as a tree of its own."""
    return isinstance(leaf, Stored)
