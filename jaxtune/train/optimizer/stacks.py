"""Small tensors of one shape as one array: for hundreds of adapter matrices, launches and arguments take longer than
what they compute.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.train.optimizer.optimizer_offload import Work, like_parameters

# Tensors with more elements stay alone: their launches are cheap, and a stack of them would be large.
ELEMENTS = 1 << 20
_MOST = 64  # tensors of a stack; XLA makes no kernel of more than 96 operands
# Tensors of a stack for a reduction: XLA's time grows with the square of a kernel's operands. An 8B adapter's update
# compiled in 9.4 s, in 12.2 with all tensors of a shape in one stack.
FEW = 16


def stacks_of(tensors: Iterable[tuple[Hashable, jax.Array]]) -> list[list[int]]:
    """Indices of small tensors that can lie in one array, at least two and at most 64; of (key, tensor), tensors of one
    key, shape and dtype.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, (key, tensor) in enumerate(tensors):
        if 1 < tensor.size <= ELEMENTS:
            groups.setdefault((key, tensor.shape, tensor.dtype), []).append(index)
    pieces = (group[start : start + _MOST] for group in groups.values() for start in range(0, len(group), _MOST))
    return [piece for piece in pieces if len(piece) > 1]


def stacked(tensors: Sequence[jax.Array]) -> jax.Array:
    """[k, ...]; XLA sees that a stack of all parts of an array is that array."""
    return jax.lax.concatenate([jax.lax.reshape(tensor, (1, *tensor.shape)) for tensor in tensors], 0)


def unstacked(array: jax.Array) -> list[jax.Array]:
    return [jax.lax.reshape(tensor, array.shape[1:]) for tensor in jax.lax.split(array, [1] * len(array))]


def _only(tensors: Sequence[jax.Array]) -> jax.Array:
    return tensors[0]


def _alone(array: jax.Array) -> list[jax.Array]:
    return [array]


def updated(work: Work, parameters, opt_state, gradients, alike: Sequence[Hashable]):
    """(new parameters, new states) by `work`, of stacks of tensors that are `alike`. Within jit; for optimizers that
    treat each element alone. work: gets the index of a stack's first tensor.
    """
    weights, structure = jax.tree.flatten(parameters)
    slopes = jax.tree.leaves(gradients)
    is_moments = like_parameters(structure)
    trees, outline = jax.tree.flatten(opt_state, is_leaf=is_moments)
    columns = [jax.tree.leaves(tree) if is_moments(tree) else None for tree in trees]
    shared = list(trees)  # such as a count
    groups = stacks_of(zip(alike, weights, strict=True))
    alone = set(range(len(weights))) - {index for group in groups for index in group}
    for group in [*groups, *([index] for index in sorted(alone))]:
        together, apart = (stacked, unstacked) if len(group) > 1 else (_only, _alone)
        weight, slope = (together([tensors[index] for index in group]) for tensors in (weights, slopes))
        state = [
            tree if column is None else [together([column[index] for index in group])]
            for tree, column in zip(trees, columns, strict=True)
        ]
        weight, state = work(group[0], weight, jax.tree.unflatten(outline, state), slope)
        shared = outline.flatten_up_to(state)
        moments = ((column, new[0]) for column, new in zip(columns, shared, strict=True) if column is not None)
        for tensors, new in [(weights, weight), *moments]:
            for index, tensor in zip(group, apart(new), strict=True):
                tensors[index] = tensor
    states = [
        value if column is None else jax.tree.unflatten(structure, column)
        for column, value in zip(columns, shared, strict=True)
    ]
    return jax.tree.unflatten(structure, weights), jax.tree.unflatten(outline, states)


def of_each(reduce, tensors: list[jax.Array], most: int | None = None) -> jax.Array:
    """[n]: `reduce` of each of n >= 1 tensors; it maps a stack [k, ...] to [k]. Small tensors of one shape form one, of
    up to `most`; None: of all, for parts of stacks.
    """
    groups: dict[object, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(tensor.shape if tensor.size <= ELEMENTS else index, []).append(index)
    pieces = [piece for group in groups.values() for piece in itertools.batched(group, most or len(group))]
    values = [reduce(jnp.stack([tensors[index] for index in piece])) for piece in pieces]
    return jnp.concatenate(values)[np.argsort(list(itertools.chain(*pieces)))]
