"""Gathers and scatters of tensors that devices divide, with derivatives: `gather` makes the whole tensor of all
devices' Shards, `scatter` sums gradients and leaves each device its part. Call them inside `partition.divided`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import optimization_barrier

from jaxtune.models.placement import low_format
from jaxtune.models.placement.partition import TENSORS, Shard, shards, with_whole


def rows_of(variable: nnx.Variable, index: jax.Array, lookup: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """The rows of a table, which the devices may divide; its gradient is a Shard then.

    Devices exchange rows of a divided table: each takes its own rows for the indices of all. It is gathered instead if
    all look up more rows than it has, or if it is divided along another axis than the first.

      variable: the table, [n, ...].
      index: int32[...] in [0, n), this device's.
      lookup: (table, index) -> table[index], with its derivative. Where rows are exchanged, it gets this device's part
        and row numbers in it, int32[devices, ...].
    """
    value = variable.get_value()
    if not isinstance(value, Shard):
        return lookup(variable[...], index)
    if value.axis != 0 or value.count * index.size > value.shape[0]:
        return lookup(_gathered(value), index)
    return _rows_of(lookup, value, index)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows_of(take, shard: Shard, index: jax.Array) -> jax.Array:
    """Rows of a table that devices divide along its first axis."""
    return _rows_of_fwd(take, shard, index)[0]


def _rows_of_fwd(take, shard: Shard, index: jax.Array):
    """(rows, (pullback of `take` on this part, bool[devices, ...]: indices that are rows of this part, shard))."""
    size = shard.array.shape[0]
    all_index = (
        jax.lax.all_gather(index, TENSORS) - jax.lax.axis_index(TENSORS) * size
    )  # of all devices, relative to this device's first row
    is_own = (all_index >= 0) & (all_index < size)
    rows, back = jax.vjp(lambda table: take(table, jnp.clip(all_index, 0, size - 1)), shard.array)
    is_own = is_own.reshape(*is_own.shape, *[1] * (rows.ndim - is_own.ndim))
    rows = jax.lax.psum_scatter(jnp.where(is_own, rows, 0), TENSORS)  # all but one term of each sum are zero
    return rows, (back, is_own, shard)


def _rows_of_bwd(take, residuals, gradient):
    back, is_own, shard = residuals
    (gradients,) = back(jnp.where(is_own, jax.lax.all_gather(gradient, TENSORS), 0))
    return dataclasses.replace(shard, array=gradients), None


_rows_of.defvjp(_rows_of_fwd, _rows_of_bwd)


def gathered_after(variable: nnx.Variable, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(whole array, x), for a variable such as the head's weight that is not needed before x. A Shard is gathered after
    x is there, and its gradient scattered before x's is passed on; otherwise XLA keeps the whole array and gradient for
    as long as it can combine collectives.
    """
    value = variable.get_value()
    if not isinstance(value, Shard):
        return variable[...], x
    if isinstance(variable, nnx.Param):
        return _gathered_beside(value, x)
    value, _ = optimization_barrier((value, jax.lax.stop_gradient(x)))
    return gather(value), x


@jax.custom_vjp
def _gathered_beside(shard: Shard, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`gathered_after` for a Shard that trains."""
    shard, x = optimization_barrier((shard, x))
    return gather(shard), x


_gathered_beside.defvjp(
    lambda shard, x: (_gathered_beside(shard, x), shard),
    lambda shard, gradients: optimization_barrier((scatter(shard, gradients[0]), gradients[1])),
)


@jax.custom_vjp
def _gathered(shard: Shard) -> jax.Array:
    """`gather` whose derivative is `scatter`."""
    return gather(shard)


_gathered.defvjp(lambda shard: (gather(shard), shard), lambda shard, gradient: (scatter(shard, gradient),))


def gather(shard: Shard) -> jax.Array:
    """The whole array of a Shard. It has no derivative that sums gradients."""
    return jax.lax.all_gather(shard.array, TENSORS, axis=shard.axis, tiled=True)


def scatter(shard: Shard, gradient: jax.Array) -> Shard:
    """Sums the devices' gradients of a divided tensor: this device's part, a Shard in the gradient's dtype. They are
    sent in the format `sync` and added in float32, or sent in float32. Two devices send 16-bit gradients as they are,
    because a sum of two numbers is rounded only once either way.
    """
    if shard.sync is not None:
        total = low_format.sum_shard(gradient, TENSORS, shard.axis, shard.count, shard.sync)
    else:
        wide = gradient if shard.count == 2 else gradient.astype(jnp.float32)
        total = jax.lax.psum_scatter(wide, TENSORS, scatter_dimension=shard.axis, tiled=True)
    return dataclasses.replace(shard, array=total.astype(gradient.dtype))


def gather_all(module: nnx.Module | None) -> None:
    """Gathers all divided variables of a module, in place."""
    if module is not None:
        state = nnx.state(module)
        nnx.update(module, with_whole(state, list(map(gather, shards(state)))))


def rows_of_all(x: jax.Array) -> jax.Array:
    """The rows, along the first axis, of all devices that divide tensors."""
    return jax.lax.all_gather(x, TENSORS, tiled=True)


def own_of_all(x: jax.Array, rows: int) -> jax.Array:
    """This device's `rows` of `rows_of_all`."""
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(TENSORS) * rows, rows)


def own_rows(parts: jax.Array) -> jax.Array:
    """Of the rows of all devices this one's, [N, ..., columns], from the part of the columns that each has computed."""
    return jax.lax.all_to_all(parts, TENSORS, 0, parts.ndim - 1, tiled=True)


def own_rows_sharded(columns: jax.Array) -> jax.Array:
    """`own_rows` in the shards of devices, [devices, N, ..., columns of a shard]."""
    count = jax.lax.axis_size(TENSORS)
    return jax.lax.all_to_all(columns.reshape(count, -1, *columns.shape[1:]), TENSORS, 0, 0)


def shards_of_all(shard: jax.Array) -> jax.Array:
    """[devices, ...]"""
    return jax.lax.all_gather(shard, TENSORS)


def shards_of_layer(trainables, frozens, index: int) -> list[Shard]:
    """The Shards of a layer in the order of leaves, trained ones first; [] if there is no such layer.

    trainables, frozens: a state for each layer.
    index: of the layer, from 0; -1, before the first layer, and the number of layers are allowed.
    """
    return shards((trainables[index], frozens[index])) if 0 <= index < len(trainables) else []


def first_gathered(trainables, frozens) -> list[jax.Array]:
    """The whole arrays of the first layer's Shards."""
    return [gather(shard) for shard in shards_of_layer(trainables, frozens, 0)]


def with_gradients(trainable, gradients) -> list[tuple[Shard, jax.Array]]:
    """Pairs each Shard with the gradient of its whole tensor, in the order of leaves; other tensors are left out."""
    pairs = jax.tree.map(
        lambda leaf, gradient: (leaf, gradient) if isinstance(leaf, Shard) else None,
        trainable,
        gradients,
        is_leaf=lambda leaf: isinstance(leaf, Shard),
    )
    return jax.tree.leaves(pairs, is_leaf=lambda leaf: isinstance(leaf, tuple))
