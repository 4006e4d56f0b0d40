"""The transposed codes of a run's frozen FP8 weights, which the run's programs get beside the weights if its plan says
so (Stored.transposed). The backward of a product in FP8, and experts' forward if their weights are [E, in, out], then
copies no codes in a step. They are made once, before the first step (`with_copies`), and given up if memory runs out in
it (`without_copies`). Only the layers' weights have them, and nothing but the programs sees them: what is saved,
exported, merged or sampled from are the weights without them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.pallas.formats import Stored


def with_copies(frozen: nnx.State) -> nnx.State:
    """A new state in which the FP8 weights of the layers in `frozen`, a Decoder's state, have their codes transposed
    beside them, on the same devices; all other arrays are the same. They are made one weight at a time, so that nothing
    but the result takes memory. Of shapes with shardings (jax.ShapeDtypeStruct) it gives shapes."""
    return _each(frozen, lambda weight: weight.with_transposed(_transposed))


def without_copies(frozen: nnx.State) -> nnx.State:
    """A new state without the copies that `with_copies` made, whose memory is freed at once, whoever else refers to
    `frozen`. A state that has none is returned as it is."""

    def one(weight: Stored) -> Stored:
        if weight.transposed is not None:
            weight.transposed.delete()
        return weight.with_transposed(lambda _: None)

    return _each(frozen, one)


def _each(frozen: nnx.State, change: Callable[[Stored], Stored]) -> nnx.State:
    """A new state with each quantised weight of the layers in `frozen` replaced by what `change` returns for it."""

    def one(path, variable):
        value = variable.get_value()
        in_layers = getattr(path[0], "key", None) == "layers"
        return variable.replace(change(value)) if in_layers and isinstance(value, Stored) else variable

    return jax.tree_util.tree_map_with_path(one, frozen, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _transposed(codes: jax.Array | jax.ShapeDtypeStruct) -> jax.Array | jax.ShapeDtypeStruct:
    """Returns a copy of `codes` [..., out, in] with the last two axes swapped. It waits until the device has made the
    copy. If `codes` is a shape (jax.ShapeDtypeStruct), it returns the shape of the copy."""
    if isinstance(codes, jax.ShapeDtypeStruct):
        shape = (*codes.shape[:-2], codes.shape[-1], codes.shape[-2])
        return jax.ShapeDtypeStruct(shape, codes.dtype, sharding=codes.sharding)
    copy = jax.jit(jnp.matrix_transpose, out_shardings=codes.sharding)
    return jax.block_until_ready(copy(codes))
