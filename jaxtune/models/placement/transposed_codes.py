"""Transposed codes beside a run's frozen FP8 weights, which the backward of an FP8 product reads, and experts' forward
if weights are [E, in, out], so that a step copies none. They are given up if memory runs out; what is saved, exported
or sampled from lacks them.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.pallas.formats import Stored


def with_copies(frozen: nnx.State) -> nnx.State:
    """A new state in which the layers' FP8 weights have transposed codes, made one at a time to take no further memory;
    those that are there stay. Shapes give shapes.
    """
    return _each(frozen, lambda weight: weight.with_transposed(_transposed) if weight.transposed is None else weight)


def without_copies(frozen: nnx.State) -> nnx.State:
    """A new state without these copies, whose memory is freed at once, whoever else refers to `frozen`."""

    def without_copy(weight: Stored) -> Stored:
        if weight.transposed is not None:
            weight.transposed.delete()
        return weight.with_transposed(lambda _: None)

    return _each(frozen, without_copy)


def _each(frozen: nnx.State, change: Callable[[Stored], Stored]) -> nnx.State:

    def changed(path, variable):
        value = variable.get_value()
        in_layers = getattr(path[0], "key", None) == "layers"
        return variable.replace(change(value)) if in_layers and isinstance(value, Stored) else variable

    return jax.tree_util.tree_map_with_path(changed, frozen, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _transposed(codes: jax.Array | jax.ShapeDtypeStruct) -> jax.Array | jax.ShapeDtypeStruct:
    """Waits for the device. A shape gives a shape."""
    if isinstance(codes, jax.ShapeDtypeStruct):
        shape = (*codes.shape[:-2], codes.shape[-1], codes.shape[-2])
        return jax.ShapeDtypeStruct(shape, codes.dtype, sharding=codes.sharding)
    copy = jax.jit(jnp.matrix_transpose, out_shardings=codes.sharding)
    return jax.block_until_ready(copy(codes))
