"""Gathers and scatters of tensors that devices divide. A Shard (partition.py) is one device's part of such a tensor.
`gather` makes the whole tensor of all devices' parts; `scatter` sums the devices' gradients of it, and leaves each
device its part of the sum. Functions with a derivative of their own combine the two: embeddings are read by `rows_of`,
and the head's weight by `whole_beside`. The stack writes its derivative itself: `shards_of_layer` and `with_gradients`
list what it gathers and scatters beside a layer (collectives.py), and `first_gathered` gathers the first layer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import optimization_barrier

from jaxtune.models.placement import low_format
from jaxtune.models.placement.partition import TENSORS, Shard, shards


def rows_of(variable: nnx.Variable, index: jax.Array, take: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """Looks up rows of a table: take(table, index), for a variable whose array is [n, ...], which the devices may
    divide. Token embeddings and per-layer embeddings are looked up by it.

    A divided table is not gathered for a few of its rows: each device takes the rows that it has for the indices of all
    devices, and receives those for its own indices from the others. It is gathered whole if the devices that divide it
    look up more rows in all than it has, or if it is divided along another axis than the first.

    Args:
      variable: the table, such as an embedding's weight.
      index: int32[...] in [0, n), this device's row numbers.
      take: (table, index) -> table[index], with the derivative that the lookup is to have. Where rows are exchanged, it
        gets this device's part and row numbers in it, int32[devices, ...].
    Returns:
      take(table, index) of the whole table, [*index.shape, ...], complete on this device. The table's gradient is a
        Shard if the table is divided.
    """
    value = variable.get_value()
    if not isinstance(value, Shard):
        return take(variable[...], index)
    if value.axis != 0 or value.count * index.size > value.shape[0]:
        return take(_gathered(value), index)
    return _rows_of(take, value, index)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows_of(take, shard: Shard, index: jax.Array) -> jax.Array:
    """Looks up rows of a table that the devices divide along its first axis: the rows of `index`, complete on this
    device. `rows_of` calls it for few rows.

    The derivative is written by hand, because it exchanges gradients between devices as the forward exchanges rows.

    Args:
      take: (part of the table, row numbers within it, int32[devices, ...]) -> those rows.
      shard: this device's part of the table.
      index: int32[...], numbers of the rows in the whole table that this device wants; other devices want others.
    """
    return _rows_of_fwd(take, shard, index)[0]


def _rows_of_fwd(take, shard: Shard, index: jax.Array):
    """The forward rule of `_rows_of`, with its arguments: (the rows for this device's `index`, residuals). take: (part
    of the table, row numbers within it) -> those rows.

    The residuals are the pullback of `take` on this device's part of the table, `shard`, a bool array whose first axis
    is the devices (which of every device's indices are rows of this part), and `shard` itself.
    """
    size = shard.array.shape[0]
    all_index = (
        jax.lax.all_gather(index, TENSORS) - jax.lax.axis_index(TENSORS) * size
    )  # of all devices, relative to this device's first row
    mine = (all_index >= 0) & (all_index < size)
    rows, back = jax.vjp(lambda table: take(table, jnp.clip(all_index, 0, size - 1)), shard.array)
    mine = mine.reshape(*mine.shape, *[1] * (rows.ndim - mine.ndim))
    rows = jax.lax.psum_scatter(jnp.where(mine, rows, 0), TENSORS)  # all but one term of each sum are zero
    return rows, (back, mine, shard)


def _rows_of_bwd(take, residuals, gradient):
    """The backward rule of `_rows_of`: (this device's part of the table's gradient, as a Shard; None for the indices).

    take: that of the forward, which is not needed. residuals: from `_rows_of_fwd`. gradient: that of the rows which
    this device looked up."""
    back, mine, shard = residuals
    (gradients,) = back(jnp.where(mine, jax.lax.all_gather(gradient, TENSORS), 0))
    return dataclasses.replace(shard, array=gradients), None


_rows_of.defvjp(_rows_of_fwd, _rows_of_bwd)


def whole_beside(variable: nnx.Variable, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (the whole array of a variable, x unchanged), for a variable such as the head's weight, which is not
    needed before the hidden states x are computed (Decoder.head_operands).

    A Shard is gathered only after x is there, and if it trains, its gradient is scattered before x's gradient is passed
    on. Otherwise XLA keeps the whole array and its gradient in memory for as long as it can combine several
    collectives. A variable that is not divided is returned as it is."""
    value = variable.get_value()
    if not isinstance(value, Shard):
        return variable[...], x
    if isinstance(variable, nnx.Param):
        return _gathered_beside(value, x)
    value, _ = optimization_barrier((value, jax.lax.stop_gradient(x)))
    return gather(value), x


@jax.custom_vjp
def _gathered_beside(shard: Shard, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`whole_beside` for a Shard that trains: (the whole array of `shard`, x unchanged), where the gather waits for x.
    The hand-written derivative scatters the gradient of the whole array before it passes on the gradient of x."""
    shard, x = optimization_barrier((shard, x))
    return gather(shard), x


_gathered_beside.defvjp(
    lambda shard, x: (_gathered_beside(shard, x), shard),
    lambda shard, gradients: optimization_barrier((scatter(shard, gradients[0]), gradients[1])),
)


@jax.custom_vjp
def _gathered(shard: Shard) -> jax.Array:
    """Gathers `shard`, this device's part of a tensor, with a derivative: returns the whole array. The gradient of the
    Shard is this device's part of the sum of all devices' gradients (`scatter`). `rows_of` calls it for a table whose
    rows are not exchanged one by one."""
    return gather(shard)


_gathered.defvjp(lambda shard: (gather(shard), shard), lambda shard, gradient: (scatter(shard, gradient),))


def gather(shard: Shard) -> jax.Array:
    """Gathers `shard`, this device's part of a tensor, from the devices along the mesh axis `fsdp`: returns the whole
    array. It has no derivative that sums gradients as `scatter` does; for Shards that train, the callers `_gathered`,
    `_gathered_beside` and the stack write their own. Call it inside `partition.divided`."""
    return jax.lax.all_gather(shard.array, TENSORS, axis=shard.axis, tiled=True)


def scatter(shard: Shard, gradient: jax.Array) -> Shard:
    """Sums the gradients that the devices along the mesh axis `fsdp` have computed of a divided tensor, and returns
    this device's part of the sum as a Shard, in the gradient's dtype. Call it inside `partition.divided`.

    If the Shard names a format (`sync`), the gradients are sent in it and added in float32 (low_format.py). Otherwise
    they are sent and added in float32, but between two devices in their own dtype, which is half the bytes with 16
    bits, because a sum of two numbers is rounded only once in either case.

    Args:
      shard: this device's part of the tensor, of which only the axis, the number of parts and `sync` are read.
      gradient: this device's gradient of the whole tensor.
    """
    if shard.sync is not None:
        total = low_format.part_of_sum(gradient, TENSORS, shard.axis, shard.count, shard.sync)
    else:
        wide = gradient if shard.count == 2 else gradient.astype(jnp.float32)
        total = jax.lax.psum_scatter(wide, TENSORS, scatter_dimension=shard.axis, tiled=True)
    return dataclasses.replace(shard, array=total.astype(gradient.dtype))


def shards_of_layer(trainables, frozens, index: int) -> list[Shard]:
    """The Shards of layer number `index` (from 0), which the stack must gather before that layer runs, in the order of
    leaves (trained tensors first); [] if no layer has that number, as after the last one or before the first, or if
    nothing in it is divided. trainables, frozens: for each layer its trained tensors, and its other tensors."""
    return shards((trainables[index], frozens[index])) if 0 <= index < len(trainables) else []


def first_gathered(trainables, frozens) -> list[jax.Array]:
    """Gathers the Shards of the first layer, which no earlier layer can gather while it computes: returns their whole
    arrays, in the order of shards_of_layer. The stack's forward begins with it. trainables, frozens: for each layer its
    trained tensors, and its other tensors."""
    return [gather(shard) for shard in shards_of_layer(trainables, frozens, 0)]


def with_gradients(trainable, gradients) -> list[tuple[Shard, jax.Array]]:
    """Pairs each Shard of a layer's trainable tensors with the gradient of its whole tensor, for CollectiveSchedule's
    scatters: a list in order of leaves. Tensors that are not divided are left out. trainable: a tree whose leaves are
    arrays and Shards. gradients: a tree with the same structure, with an array for each of them."""
    pairs = jax.tree.map(
        lambda leaf, gradient: (leaf, gradient) if isinstance(leaf, Shard) else None,
        trainable,
        gradients,
        is_leaf=lambda leaf: isinstance(leaf, Shard),
    )
    return jax.tree.leaves(pairs, is_leaf=lambda leaf: isinstance(leaf, tuple))
