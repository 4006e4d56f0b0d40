"""Functions over all the tensors of a step, for step.py. `of_all_devices` adds sums over devices. `zeros_after` and
`with_zeros` make the zeros with which a step's sums start. `rounded_like` rounds new weights. `of_each` reduces each
tensor to a number. `trainable_names` gives the names of the trained tensors for metrics and checkpoints."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import optimization_barrier

from jaxtune.models.placement import partition
from jaxtune.pallas.rounding import stochastic_round


def of_all_devices(sums):
    """The sums of one device (a step's gradients, losses and counts, a tree of float arrays) added over all devices of
    the mesh, in the same tree: in float32, so that gradient sums in bf16 are not rounded once for each device, then
    cast back to their own dtypes. A partition.Shard, which is summed over the axis fsdp already, is added over the
    other axes. It is called in functions that `partition.divided` runs on each device. With a quantised sync of
    gradients it gets only the other sums."""
    wide = partition.total(jax.tree.map(lambda a: a.astype(jnp.float32), sums))
    return jax.tree.map(lambda new, old: new.astype(old.dtype), wide, sums)


def zeros_after(done, given, read: bool, waits: bool):
    """Makes the zeros with which the next step's sums start, at the end of a step's update: (`done` with the same
    values, zeros of the shapes and dtypes of `given`). The caller must use the returned `done` in place of its own.

    XLA writes the zeros into the donated arrays of `given`. Where it may write them at any time, it first copies each
    array that is read later. With `waits` the zeros depend on `done`, the results for which `given` was read, so that
    there is no copy, and temporary arrays of the same size can be in the memory of `given` meanwhile.

    Args:
      done: a tree of arrays, the updated weights and the new errors of a quantised sync of gradients.
      given: a tree of arrays, the step's sums, which are not read after `done` is computed.
      read: whether zeros are needed; if not, as the next step does not read its first sums (with_zeros), `given` is
        returned in place of them.
      waits: whether the zeros wait for `done`. They do with a quantised sync of gradients, whose update would otherwise
        take copies of all gradients beside its own buffers; in other steps XLA chooses when it writes them.
    """
    if not read:
        return done, given
    if not waits:
        return done, jax.tree.map(jnp.zeros_like, given)
    done, zero = optimization_barrier((done, jnp.zeros((), jnp.float32)))
    return done, jax.tree.map(lambda array: jnp.full(array.shape, zero, array.dtype), given)


def with_zeros(batch, sums):
    """(batch, zeros like `sums`) for a step with one micro-batch, whose sums begin with it. XLA then leaves the
    additions to zeros out, and writes gradients into the donated memory of `sums`, where other values lie before (the
    planner's sums_memory.py): the barrier, which costs nothing, makes them an argument of the program although nothing
    reads them."""
    batch, sums = optimization_barrier((batch, sums))
    return batch, jax.tree.map(jnp.zeros_like, sums)


def rounded_like(old, wide, seed: jax.Array, stream: int):
    """The tree `wide` of float32 weights, with those rounded stochastically that are in bfloat16 in `old`, a tree of
    the same structure. seed: of the random numbers, of which tensor i uses the stream number `stream` + i."""
    leaves, structure = jax.tree.flatten(wide)
    pairs = enumerate(zip(leaves, jax.tree.leaves(old), strict=True), stream)
    return jax.tree.unflatten(
        structure, [stochastic_round(new, seed, i) if kept.dtype == jnp.bfloat16 else new for i, (new, kept) in pairs]
    )


# Tensors with more elements are reduced one by one: their launches are cheap, and a stack of them would be too large.
_STACKED_ELEMENTS = 1 << 20


def of_each(reduce, tensors: list[jax.Array]) -> jax.Array:
    """[n]: `reduce` of each of the n tensors, at least one, in order; reduce maps a stack of k tensors, [k, ...], to a
    number for each, [k]. The update computes the gradients' norms by it, and whether new weights are finite.

    Tensors of one shape with at most 2**20 elements are reduced as one stack, larger ones as a stack of one. There are
    hundreds of adapter matrices, and on a GPU two launches for each would be most of the optimizer's time.
    """
    groups: dict[object, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(tensor.shape if tensor.size <= _STACKED_ELEMENTS else index, []).append(index)
    order = [index for indices in groups.values() for index in indices]
    values = [reduce(jnp.stack([tensors[i] for i in indices])) for indices in groups.values()]
    return jnp.concatenate(values)[np.argsort(order)]


def trainable_names(trainable) -> list[str]:
    """Dotted names, such as "head.weight", of the tensors of `trainable`, an nnx.State of arrays or shapes, in the
    order of jax.tree.leaves and so of metrics["grad_norms"]. Metrics, the table of trained tensors and the record in
    checkpoints name the tensors by them."""
    paths = jax.tree_util.tree_flatten_with_path(trainable)[0]
    return [
        ".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path if _names_a_place(k)) for path, _ in paths
    ]


def _names_a_place(key) -> bool:
    """Whether a key in a tensor's tree path is written in its dotted name (True), or is one of the keys "value" and
    "raw_value" that nnx.Variable adds (False), for `trainable_names`."""
    return not (isinstance(key, jax.tree_util.GetAttrKey) and key.name in ("value", "raw_value"))
