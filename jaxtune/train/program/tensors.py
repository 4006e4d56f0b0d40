"""Functions over all tensors of a step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import optimization_barrier

from jaxtune.models.placement import partition
from jaxtune.pallas.rounding import stochastic_round


def of_all_devices(sums):
    """One device's sums (a tree) added over the mesh, within `partition.divided`. Added in float32, so that bf16 sums
    are not rounded once for each device, then cast back. A partition.Shard is added over the axes other than fsdp.
    """
    wide = partition.total(jax.tree.map(lambda a: a.astype(jnp.float32), sums))
    return jax.tree.map(lambda new, old: new.astype(old.dtype), wide, sums)


def zeros_after(done, given, read: bool, waits: bool):
    """(done, zeros like `given`): the zeros with which the next step's sums start. Use the returned `done`.

    XLA writes the zeros into donated `given`; if it may at any time, it first copies arrays that are read later. With
    `waits` the zeros depend on `done`, so there is no copy, and temporaries may lie in `given` meanwhile: a quantised
    sync needs that, else it copies all gradients. read: False: zeros are not needed, `given` comes back.
    """
    if not read:
        return done, given
    if not waits:
        return done, jax.tree.map(jnp.zeros_like, given)
    done, zero = optimization_barrier((done, jnp.zeros((), jnp.float32)))
    return done, jax.tree.map(lambda array: jnp.full(array.shape, zero, array.dtype), given)


def with_zeros(batch, sums):
    """(batch, zeros like `sums`) for a step with one micro-batch. XLA drops the additions and writes gradients into the
    donated memory of `sums`, where other values lie before (sums_memory.py). The free barrier keeps unread `sums` an
    argument of the program.
    """
    batch, sums = optimization_barrier((batch, sums))
    return batch, jax.tree.map(jnp.zeros_like, sums)


def rounded_like(old, wide, seed: jax.Array, stream: int):
    """`wide` (float32 weights) with those rounded stochastically that are bfloat16 in `old`. Tensor i uses random
    stream `stream` + i.
    """
    leaves, structure = jax.tree.flatten(wide)
    pairs = enumerate(zip(leaves, jax.tree.leaves(old), strict=True), stream)
    return jax.tree.unflatten(
        structure,
        [stochastic_round(new, seed, i) if old_leaf.dtype == jnp.bfloat16 else new for i, (new, old_leaf) in pairs],
    )


# Tensors with more elements are reduced one by one: their launches are cheap, and a stack of them would be too large.
_STACKED_ELEMENTS = 1 << 20


def of_each(reduce, tensors: list[jax.Array]) -> jax.Array:
    """[n]: `reduce` of each of n >= 1 tensors; it maps a stack [k, ...] to [k].

    Tensors of one shape with at most 2**20 elements form one stack: for hundreds of adapter matrices, two launches each
    would be most of the optimizer's time.
    """
    groups: dict[object, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(tensor.shape if tensor.size <= _STACKED_ELEMENTS else index, []).append(index)
    order = [index for indices in groups.values() for index in indices]
    values = [reduce(jnp.stack([tensors[i] for i in indices])) for indices in groups.values()]
    return jnp.concatenate(values)[np.argsort(order)]


def trainable_names(trainable) -> list[str]:
    """Dotted names of the tensors, such as "head.weight", in the order of jax.tree.leaves and metrics["grad_norms"]."""
    paths = jax.tree_util.tree_flatten_with_path(trainable)[0]
    return [
        ".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path if _names_a_place(k)) for path, _ in paths
    ]


def _names_a_place(key) -> bool:
    """False for "value" and "raw_value", which nnx.Variable adds."""
    return not (isinstance(key, jax.tree_util.GetAttrKey) and key.name in ("value", "raw_value"))
