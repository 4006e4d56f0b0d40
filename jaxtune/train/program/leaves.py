"""Trees as flat lists: JAX takes a module's state apart and together in Python, 5 us a tensor each time. Small
tensors of one shape may lie in one array: a host passes hundreds of them to a program as slowly as large ones.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.tree_util import GetAttrKey, KeyPath, keystr

from jaxtune.train.optimizer import stacks


class _Structure:
    """A tree without its leaves, equal to itself only, so that JAX compares it at once.

    stacks: indices of the leaves of each array that holds several; the other leaves follow these arrays.
    """

    def __init__(
        self,
        definition,
        paths: Sequence[KeyPath],
        stacks: Sequence[Sequence[int]],
    ):
        self._definition, self._count, self._stacks = definition, len(paths), stacks
        stacked = {index for stack in stacks for index in stack}
        self._alone = [index for index in range(len(paths)) if index not in stacked]
        self.keys = tuple(_Key(paths[index]) for index in [*(stack[0] for stack in stacks), *self._alone])

    def arrays(self, leaves: Sequence) -> list:
        """The arrays that hold a tree's leaves: shapes for shapes."""
        stacks = [[leaves[index] for index in stack] for stack in self._stacks]
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for stack in stacks for leaf in stack):
            held = [_stacked_shape(len(stack), stack[0]) for stack in stacks]
        else:
            held = list(map(_stacked, stacks))
        return [*held, *(leaves[index] for index in self._alone)]

    def of_each(self, values: Sequence) -> list:
        """Of values of a tree's leaves, equal within a stack, such as shardings: those of the arrays."""
        return [values[index] for index in [*(stack[0] for stack in self._stacks), *self._alone]]

    def tree(self, arrays: Sequence, field: str | None = None):
        """field: stacks of others stay None."""
        leaves: list = [None] * self._count
        count = len(self._stacks)
        for stack, array, key in zip(self._stacks, arrays[:count], self.keys[:count], strict=True):
            if field is None or key.path[0] == GetAttrKey(field):
                for index, tensor in zip(stack, _unstacked(array), strict=True):
                    leaves[index] = tensor
        for index, leaf in zip(self._alone, arrays[count:], strict=True):
            leaves[index] = leaf
        return self._definition.unflatten(leaves)


def _stacked(tensors: Sequence[jax.Array]) -> jax.Array:
    """Outside of a program by way of the host: a program for it would take seconds to compile."""
    if isinstance(tensors[0], Tracer):
        return stacks.stacked(tensors)
    return jax.device_put(np.stack(jax.device_get(tensors)), tensors[0].sharding)


def _unstacked(array: jax.Array) -> Sequence[jax.Array]:
    if isinstance(array, Tracer):
        return stacks.unstacked(array)
    return jax.device_put(list(np.array(array)), array.sharding)  # a copy, as the array will be donated


def _stacked_shape(count: int, of: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count, *of.shape), of.dtype, sharding=of.sharding)


@dataclasses.dataclass(frozen=True)
class _Key:
    """A leaf's whole path as a single key, so that a program's arguments keep their names."""

    path: KeyPath

    def __str__(self) -> str:
        return keystr(self.path)


_structures: weakref.WeakValueDictionary[Hashable, _Structure] = weakref.WeakValueDictionary()


class Leaves[T]:
    """A tree of type T as its leaves, itself a pytree over arrays. Trees of equal structure give equal structures."""

    def __init__(self, arrays: Iterable[object], structure: _Structure):
        self._arrays, self._structure = tuple(arrays), structure

    @classmethod
    def of(cls, tree: T, stacked: bool = False) -> Leaves[T]:
        """stacked: small leaves of one shape lie in one array, up to 64 of them."""
        with_paths, definition = jax.tree_util.tree_flatten_with_path(tree)
        leaves = [leaf for _, leaf in with_paths]
        stacks = _stacks(with_paths) if stacked else ()
        structure = _structures.get((definition, stacks))
        if structure is None:
            structure = _Structure(definition, [path for path, _ in with_paths], stacks)
            _structures[definition, stacks] = structure
        return cls(structure.arrays(leaves), structure)

    @property
    def tree(self) -> T:
        """Made anew each time: with stacks it has copies of their tensors, which nothing should keep."""
        return self._structure.tree(self._arrays)

    def field(self, name: str):
        """A field of the tree alone."""
        return getattr(self._structure.tree(self._arrays, name), name)

    def of_each(self, values: T) -> Leaves[object]:
        """A tree of values, one for each leaf and equal within a stack, as values of the arrays."""
        return Leaves(self._structure.of_each(jax.tree.leaves(values)), self._structure)

    def flatten(self) -> tuple[tuple[object, ...], _Structure]:
        return self._arrays, self._structure

    def flatten_with_keys(self) -> tuple[Iterable[tuple[_Key, object]], _Structure]:
        return tuple(zip(self._structure.keys, self._arrays, strict=True)), self._structure


def _stacks(with_paths: Sequence[tuple[KeyPath, jax.Array]]) -> tuple[tuple[int, ...], ...]:
    """Indices of the leaves of each stack, which are of one field, such as the first moments."""
    keyed = ((tuple(key for key in path if isinstance(key, GetAttrKey)), leaf) for path, leaf in with_paths)
    return tuple(map(tuple, stacks.stacks_of(keyed)))


jax.tree_util.register_pytree_with_keys(
    Leaves, Leaves.flatten_with_keys, lambda structure, arrays: Leaves(arrays, structure), Leaves.flatten
)


def over_leaves(function: Callable[..., object], *trees: type, stacked: bool = False) -> Callable[..., object]:
    """`function` of trees and other values, with Leaves as arguments, and as results where they are `trees`."""

    def flat(value: object) -> object:
        return Leaves.of(value, stacked) if isinstance(value, trees) else value

    @functools.wraps(function)
    def wrapped(*arguments: object):
        results = function(*(value.tree if isinstance(value, Leaves) else value for value in arguments))
        return tuple(map(flat, results)) if isinstance(results, tuple) else flat(results)

    return wrapped


def differences(ahead: object, real: object) -> list[str]:
    """Where arrays are not as shapes said ahead: a line with its path for each variable or array whose metadata, tree,
    shapes, dtypes or shardings differ.
    """
    described = _described(ahead), _described(real)
    return [
        f"{path}: {' and '.join(str(form.get(path, 'absent')) for form in described)}"
        for path in dict.fromkeys([*described[0], *described[1]])
        if described[0].get(path) != described[1].get(path)
    ]


def _described(tree: object) -> dict[str, object]:
    def described(leaf: object) -> object:
        of_variable = {**leaf.get_metadata()} if isinstance(leaf, nnx.Variable) else {}
        arrays, structure = jax.tree.flatten(leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf)
        return of_variable, structure, [(array.shape, array.dtype, array.sharding) for array in arrays]

    with_paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))[0]
    return {keystr(path, simple=True, separator="."): described(leaf) for path, leaf in with_paths}
