"""Public operations on a mesh of several devices.

Kernels know no mesh: they see the plain local arrays that a shard_map gives them. Training runs in one shard_map over
the whole mesh, within which this module does nothing. In code that leaves the division to XLA, XLA divides plain JAX
operations, and `on_each_device` puts a shard_map around kernels, which XLA cannot divide. On a mesh whose axes are
Explicit (the default of jax.make_mesh), every operation must state the sharding of its result. `on_any_mesh` lets an
operation run in both cases.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec


def on_any_mesh[**Parameters, Result](function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A decorator: the operation `function`, run on the mesh of its arrays, or on the current mesh, with all axes left
    to XLA.

    If axes of that mesh are Explicit, a result is divided as the operation's first jax.Array is, along the leading
    axes in which both have the same size. Its other axes, and all axes if there is no such array, are whole on every
    device.
    """

    @functools.wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        leaves, tree = jax.tree.flatten((args, kwargs))
        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        mesh = _mesh([leaves[index] for index in places])
        in_force = jax.sharding.get_abstract_mesh()
        if mesh is None or (mesh == in_force and not mesh.explicit_axes):
            return function(*args, **kwargs)
        automatic = mesh.update_axis_types(dict.fromkeys(mesh.explicit_axes, AxisType.Auto))
        first = [jax.typeof(leaves[index]) for index in places[:1]]
        with jax.sharding.use_abstract_mesh(automatic):
            for index in places:
                if mesh.explicit_axes:
                    whole = NamedSharding(automatic, PartitionSpec())
                    leaves[index] = jax.sharding.reshard(leaves[index], whole)
            args, kwargs = jax.tree.unflatten(tree, leaves)
            results = function(*args, **kwargs)
        if not mesh.explicit_axes:
            return results
        return jax.tree.map(lambda x: jax.sharding.reshard(x, NamedSharding(mesh, _as_first(first, x.shape))), results)

    return run


def _mesh(arrays: list[Any]) -> AbstractMesh | None:
    """The mesh that divides an operation's arguments: the current mesh, or else that of the first of `arrays` that has
    one. None if there is none with several devices."""
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(array).sharding.mesh for array in arrays)]
    return next((mesh for mesh in meshes if not mesh.empty and mesh.size > 1), None)


def _as_first(first: Sequence[Any], shape: tuple[int, ...]) -> PartitionSpec:
    """The partition spec for a result of this shape on a mesh with Explicit axes, for `on_any_mesh`: along its leading
    axes that of the operation's first array, up to the first axis in which the sizes differ, and nothing after it.
    first: the type of that array in a list, or an empty list, for which the result is whole on every device."""
    spec = []
    for array in first:
        for axis, size, other in zip(array.sharding.spec, array.shape, shape, strict=False):
            if size != other:
                break
            spec.append(axis)
    return PartitionSpec(*spec)


def on_each_device[**Parameters, Result](
    function: Callable[Parameters, Result], rows: int = 0, results: int | None = None, axis: str = "data"
) -> Callable[Parameters, Result]:
    """The function, run by each device on plain local arrays where XLA would otherwise have to divide a kernel, which
    it cannot.

    Without a mesh of several devices, and within a shard_map over it, it is the function itself. Otherwise rows are
    divided over the mesh's axis `axis`, if there is one, and devices along other axes repeat each other's work. Rows
    that the axis does not divide evenly are whole on every device.

    Args:
      function: of arrays, trees of arrays and other values; it is not differentiated.
      rows: the number of its first arguments that have rows as leading axis. All other arrays are whole on every
        device.
      results: the number of its first results that have rows as leading axis; the results after them are sums over
        rows, or None. By default all results have rows, unless `rows` is 0.
      axis: the mesh's axis.
    """

    @functools.wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        mesh = jax.sharding.get_abstract_mesh()
        axes = {name for name in mesh.axis_names if name not in mesh.manual_axes}
        if all(mesh.shape[name] == 1 for name in axes):
            return function(*args, **kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]
        in_rows = len(jax.tree.leaves(args[:rows]))
        by_axis = rows > 0 and axis in axes and leaves[places[0]].shape[0] % mesh.shape[axis] == 0
        divided, whole = PartitionSpec(axis) if by_axis else PartitionSpec(), PartitionSpec()

        computed: Callable = function

        def local(arrays):
            given = list(leaves)
            for index, array in zip(places, arrays, strict=True):
                given[index] = array
            args, kwargs = jax.tree.unflatten(tree, given)
            found = computed(*args, **kwargs)
            if results is None:
                return found, ()
            sums = found[results:]
            return found[:results], jax.lax.psum(sums, axis) if by_axis else sums

        by_rows, sums = jax.shard_map(
            local,
            in_specs=([divided if index < in_rows else whole for index in places],),
            out_specs=(divided, whole),
            axis_names=axes,
            check_vma=False,
        )([leaves[index] for index in places])
        return by_rows if results is None else (*by_rows, *sums)  # type: ignore[return-value]

    return run
