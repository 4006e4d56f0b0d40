"""Gathers and scatters of tensors that devices divide (`Shard`), as functions with a derivative."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import optimization_barrier

from jaxtune.models.placement.partition import TENSORS, Shard, shards


def rows_of(variable: nnx.Variable, index: jax.Array, take: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """take(table, index) for a variable's array [n, ...] and index int32[...] in [0, n); differentiable as `take` is.

    `take` looks up rows as table[index] does; its derivative is used. A divided table is not gathered for a few of its
    rows: each device takes the rows that it has for the indices of all devices, and receives those for its own indices
    from the others.
    """
    value = variable.get_value()
    if not isinstance(value, Shard):
        return take(variable[...], index)
    if value.axis != 0 or value.count * index.size > value.shape[0]:
        return take(_gathered(value), index)
    return _rows_of(take, value, index)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows_of(take, shard: Shard, index: jax.Array) -> jax.Array:
    """Looks up rows of a table that the devices divide along its first axis: the rows of `index`, whole on this device.

    The derivative is written by hand, because it exchanges gradients between devices as the forward exchanges rows.

    Args:
      take: (part of the table, row numbers within it) -> those rows.
      shard: this device's part of the table.
      index: int32[...], numbers of the rows in the whole table that this device wants; other devices want others.
    """
    return _rows_of_fwd(take, shard, index)[0]


def _rows_of_fwd(take, shard: Shard, index: jax.Array):
    """The forward rule of `_rows_of`, with its arguments: (the rows for this device's `index`, residuals).

    The residuals are the pullback of `take` on this device's part of the table, `shard`, and a bool array whose first
    axis is the devices: which of every device's indices are rows of this part.
    """
    size = shard.array.shape[0]
    all_index = (
        jax.lax.all_gather(index, TENSORS) - jax.lax.axis_index(TENSORS) * size
    )  # of all devices, relative to this device's first row
    mine = (all_index >= 0) & (all_index < size)
    rows, back = jax.vjp(lambda table: take(table, jnp.clip(all_index, 0, size - 1)), shard.array)
    mine = mine.reshape(*mine.shape, *[1] * (rows.ndim - mine.ndim))
    rows = jax.lax.psum_scatter(jnp.where(mine, rows, 0), TENSORS)  # all but one term of each sum are zero
    return rows, (back, mine)


def _rows_of_bwd(take, residuals, gradient):
    """The backward rule of `_rows_of`: (this device's part of the table's gradient, as a Shard; None for the indices).
    residuals: from `_rows_of_fwd`; `take` is not needed. gradient: that of the rows which this device looked up."""
    back, mine = residuals
    (gradients,) = back(jnp.where(mine, jax.lax.all_gather(gradient, TENSORS), 0))
    return Shard(gradients, 0, mine.shape[0]), None


_rows_of.defvjp(_rows_of_fwd, _rows_of_bwd)


def whole_beside(variable: nnx.Variable, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the whole array of a variable, x unchanged), for a variable that is not needed before x, such as the head.

    A Shard is gathered after x is there, and its gradient is scattered before x's gradient is passed on. Otherwise XLA
    keeps both whole for as long as it can combine several collectives.
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
    """`whole_beside` for a Shard that trains: (the whole array of `shard`, x). Its hand-written derivative scatters
    the gradient of the whole array before it passes on the gradient of x."""
    shard, x = optimization_barrier((shard, x))
    return gather(shard), x


_gathered_beside.defvjp(
    lambda shard, x: (_gathered_beside(shard, x), shard),
    lambda shard, gradients: optimization_barrier((scatter(shard, gradients[0]), gradients[1])),
)


@jax.custom_vjp
def _gathered(shard: Shard) -> jax.Array:
    """The whole array of a Shard (`shard`); its gradient is this device's part of the sum of all devices' gradients
    (`scatter`)."""
    return gather(shard)


_gathered.defvjp(lambda shard: (gather(shard), shard), lambda shard, gradient: (scatter(shard, gradient),))


def gather(shard: Shard) -> jax.Array:
    """The whole array of a Shard (`shard`), gathered from the devices along `fsdp`; call it inside
    `partition.divided`."""
    return jax.lax.all_gather(shard.array, TENSORS, axis=shard.axis, tiled=True)


def scatter(shard: Shard, gradient: jax.Array) -> Shard:
    """This device's part of the sum, over the devices that divide it, of their gradients of a Shard's whole array.

    shard: the Shard; only how it is divided is read. gradient: this device's gradient of the whole array.

    The sum is computed in float32. With two devices the gradients are sent in their own dtype, which are half the
    bytes, because a sum of two numbers is rounded only once in either case.
    """
    wide = gradient if shard.count == 2 else gradient.astype(jnp.float32)
    total = jax.lax.psum_scatter(wide, TENSORS, scatter_dimension=shard.axis, tiled=True)
    return Shard(total.astype(gradient.dtype), shard.axis, shard.count)


def shards_of_layer(trainables, frozens, index: int) -> list[Shard]:
    """The Shards, which must be gathered, of layer `index`; none if no layer has that index. trainables, frozens: the
    trained and the other tensors of each layer."""
    return shards((trainables[index], frozens[index])) if 0 <= index < len(trainables) else []


def first_gathered(trainables, frozens) -> list[jax.Array]:
    """The whole arrays of the Shards in trainables[0] and frozens[0], which no earlier layer can gather."""
    return [gather(shard) for shard in shards_of_layer(trainables, frozens, 0)]


def with_gradients(trainable, gradients) -> list[tuple[Shard, jax.Array]]:
    """The Shards in a layer's trainable tensors, each with its whole tensor's gradient, from the tree `gradients`."""
    pairs = jax.tree.map(
        lambda leaf, gradient: (leaf, gradient) if isinstance(leaf, Shard) else None,
        trainable,
        gradients,
        is_leaf=lambda leaf: isinstance(leaf, Shard),
    )
    return jax.tree.leaves(pairs, is_leaf=lambda leaf: isinstance(leaf, tuple))
