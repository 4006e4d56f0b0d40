"""Trees as flat lists: JAX takes a module's state apart, and puts it together, in Python, 5 us a tensor each time."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable, Iterable

import jax
from jax.tree_util import KeyPath, keystr


class _Structure:
    """A tree without its leaves, equal to itself only, so that JAX compares it at once."""

    def __init__(self, unflatten, paths: Iterable[KeyPath]):
        self.unflatten, self.keys = unflatten, tuple(map(_Key, paths))


@dataclasses.dataclass(frozen=True)
class _Key:
    """A leaf's whole path as a single key, so that a program's arguments keep their names."""

    path: KeyPath

    def __str__(self) -> str:
        return keystr(self.path)


_structures: weakref.WeakValueDictionary[Hashable, _Structure] = weakref.WeakValueDictionary()


class Leaves[T]:
    """A tree of type T as its leaves, itself a pytree over them. Trees of equal structure give equal structures."""

    def __init__(self, leaves: Iterable[object], structure: _Structure):
        self._leaves, self._structure = tuple(leaves), structure

    @classmethod
    def of(cls, tree: T) -> Leaves[T]:
        with_paths, definition = jax.tree_util.tree_flatten_with_path(tree)
        structure = _structures.get(definition)
        if structure is None:
            structure = _structures[definition] = _Structure(definition.unflatten, (path for path, _ in with_paths))
        return cls((leaf for _, leaf in with_paths), structure)

    @functools.cached_property
    def tree(self) -> T:
        return self._structure.unflatten(self._leaves)

    def flatten(self) -> tuple[tuple[object, ...], _Structure]:
        return self._leaves, self._structure

    def flatten_with_keys(self) -> tuple[Iterable[tuple[_Key, object]], _Structure]:
        return tuple(zip(self._structure.keys, self._leaves, strict=True)), self._structure


jax.tree_util.register_pytree_with_keys(
    Leaves, Leaves.flatten_with_keys, lambda structure, leaves: Leaves(leaves, structure), Leaves.flatten
)


def over_leaves(function: Callable[..., object], *trees: type) -> Callable[..., object]:
    """`function` of trees and other values, with Leaves as arguments, and as results where they are `trees`."""

    def flat(value: object) -> object:
        return Leaves.of(value) if isinstance(value, trees) else value

    @functools.wraps(function)
    def wrapped(*arguments: object):
        results = function(*(value.tree if isinstance(value, Leaves) else value for value in arguments))
        return tuple(map(flat, results)) if isinstance(results, tuple) else flat(results)

    return wrapped
