"""Frozen weights of layers in pinned host memory, which arrive on the device while the layers before theirs compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeGuard

import jax
from flax import nnx

PINNED = "pinned_host"
_SMALL = 256  # of a matrix' arrays, those that are so many times smaller than its largest stay on the device


def streamed_layers(level: int, layers: int) -> list[int]:
    """The `level` layers whose weights are on the host, evenly spread, so that copies have the time of those between.
    The last is among them: its weights stay from forward to backward. The first is only if all are.
    """
    return [index for index in range(layers) if (index + 1) * level // layers > index * level // layers]


def declared(variable: nnx.Variable, value: object, hosted: bool) -> nnx.Variable:
    """The variable with another value, which streams from the host or does not: then it is one that never did."""
    if hosted:
        return variable.replace(value, memory_kind=PINNED)
    resident = variable.replace(value)
    if resident.has_metadata("memory_kind"):
        resident.del_metadata("memory_kind")
    return resident


def memory_kinds(variable: object) -> list[str | None]:
    """Of the arrays of a variable, which may be shapes, or of another leaf; None: the device's."""
    if not _is_hosted(variable):
        return [None] * len(jax.tree.leaves(variable))
    return [PINNED if large else None for large in _large(variable)]


def streamed_bytes(variable: nnx.Variable) -> float:
    """Bytes of a variable's arrays, or shapes, that are on the host if it streams."""
    arrays = jax.tree.leaves(variable)
    return sum(_nbytes(array) for array, large in zip(arrays, _large(variable), strict=True) if large)


def arriving_bytes(layers: Sequence[nnx.Module]) -> float:
    """Device bytes of weights that stream in a pass over the layers: of the largest two."""
    sizes = sorted((sum(array.nbytes for array in _hosted(nnx.state(layer))) for layer in layers), reverse=True)
    return float(sum(sizes[:2]))


def host_shardings(variable: nnx.Variable, value: object) -> object:
    """A tree of shardings, on the default device, of a value that streams in a variable."""
    hosted, device = declared(variable, value, True), jax.local_devices()[0]
    shardings = [jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for kind in memory_kinds(hosted)]
    return jax.tree.unflatten(jax.tree.structure(value), shardings)


def is_on_host(array: object) -> bool:
    """Whether an array, which may be traced, is in pinned host memory."""
    return isinstance(array, jax.Array) and jax.typeof(array).memory_space == jax.memory.Space.Host


def on_device[T](tree: T) -> T:
    """The tree with copies on the device of its pinned arrays, which may be traced."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Device) if is_on_host(leaf) else leaf, tree)


def declared_as_placed[T](tree: T) -> T:
    """The tree with variables that stream if their arrays are pinned."""

    def of(leaf: object) -> object:
        if not _is_variable(leaf):
            return leaf
        return declared(leaf, leaf.get_value(), any(map(is_on_host, jax.tree.leaves(leaf.get_value()))))

    return jax.tree.map(of, tree, is_leaf=_is_variable)


def _large(variable: nnx.Variable) -> list[bool]:
    """Which arrays of a variable are on the host if it streams: of matrices, the large ones."""
    value = variable.get_value()
    sizes = [_nbytes(array) for array in jax.tree.leaves(value)]
    return [value.ndim > 1 and size * _SMALL >= max(sizes) for size in sizes]


def _nbytes(array: jax.Array | jax.ShapeDtypeStruct) -> float:
    return float(math.prod(array.shape) * array.dtype.itemsize)


def _is_variable(leaf: object) -> TypeGuard[nnx.Variable]:
    return isinstance(leaf, nnx.Variable)


def _is_hosted(leaf: object) -> TypeGuard[nnx.Variable]:
    return _is_variable(leaf) and leaf.get_metadata().get("memory_kind") == PINNED


def _hosted(weights: object) -> list[jax.Array]:
    variables = jax.tree.leaves(weights, is_leaf=_is_variable)
    return [
        array
        for variable in variables
        for array, kind in zip(jax.tree.leaves(variable), memory_kinds(variable), strict=True)
        if kind is not None
    ]


def with_arrived[T](weights: T, arrived: Sequence[jax.Array]) -> T:
    """The weights with copies on the device in the places of arrays on the host, in the order of leaves."""
    copies = iter(arrived)

    def placed(leaf: object) -> object:
        if not _is_hosted(leaf):
            return leaf
        arrays, structure = jax.tree.flatten(leaf.get_value())
        kinds = memory_kinds(leaf)
        arrays = [array if kind is None else next(copies) for array, kind in zip(arrays, kinds, strict=True)]
        return declared(leaf, structure.unflatten(arrays), False)

    return jax.tree.map(placed, weights, is_leaf=_is_variable) if arrived else weights


class Arrivals:
    """The copies of a pass over all layers, each beside one of the layers since the one before with weights on the
    host. At most the weights of two layers are on the device.

      weights: of each layer, nnx variables, in the order of the pass.
      first: copies of the first layer's, if they are there already; None: they are made before it.
    """

    def __init__(self, weights: Sequence[object], first: Sequence[jax.Array] | None = None):
        hosted = [_hosted(tree) for tree in weights]
        self._beside: list[list[tuple[int, jax.Array]]] = [[] for _ in weights]
        self._arrived: list[list[jax.Array]] = [[] for _ in weights]
        self._arrived[:1] = [
            [jax.device_put(array, jax.memory.Space.Device) for array in hosted[0]] if first is None else [*first]
        ]
        before = 0
        for layer in range(1, len(weights)):
            total, copied = sum(array.nbytes for array in hosted[layer]), 0
            for array in hosted[layer]:
                self._beside[before + copied * (layer - before) // total].append((layer, array))
                copied += array.nbytes
            before = layer if hosted[layer] else before

    def beside(self, layer: int) -> list[jax.Array]:
        """Arrays on the host that are to be copied while a layer computes. layer: its place in the pass, from 0."""
        return [array for _, array in self._beside[layer]]

    def arrive(self, layer: int, copies: Sequence[jax.Array]) -> None:
        """Takes the copies of `beside`."""
        for (later, _), copy in zip(self._beside[layer], copies, strict=True):
            self._arrived[later].append(copy)

    def take(self, layer: int) -> list[jax.Array]:
        """The copies of a layer's weights, of which nothing remains here."""
        arrived, self._arrived[layer] = self._arrived[layer], []
        return arrived
