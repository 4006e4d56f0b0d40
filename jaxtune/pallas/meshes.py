"""Lets the public operations run on a mesh of several devices.

Kernels do not use a mesh: they take the plain local arrays that a shard_map gives them. Training runs in one shard_map
over the whole mesh, within which this module does nothing. Code may also leave it to XLA how arrays are divided over
devices. XLA then divides plain JAX operations, but it cannot divide kernels, so `on_each_device` puts a shard_map
around them. On a mesh whose axes are Explicit (the default of jax.make_mesh), every operation must state the sharding
of its result; `on_any_mesh` does this for a whole operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec


def on_any_mesh[**Parameters, Result](function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A decorator for a public operation, which lets it run on any mesh: the mesh in force, or else that of its first
    array that has one; meshes of one device do not count. The operation's arrays are the jax.Arrays among its
    arguments, also those in trees. Within `function`, XLA decides how arrays are divided (all Explicit axes of the mesh
    become Auto).

    If the mesh has Explicit axes, the arguments are first made whole on every device. Each result gets the sharding of
    the operation's first array in its leading axes, as far as both have the same sizes; along all other axes, and if
    the operation has no array, it is whole on every device. Without a mesh of several devices, and on the mesh in force
    if it has no Explicit axes, `function` is called as it is.
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
    """The mesh over which an operation's arrays are divided: the mesh in force if it has several devices, or else the
    mesh of the first of `arrays` whose mesh has several. None if there is no such mesh."""
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(array).sharding.mesh for array in arrays)]
    return next((mesh for mesh in meshes if not mesh.empty and mesh.size > 1), None)


def _as_first(first: Sequence[Any], shape: tuple[int, ...]) -> PartitionSpec:
    """The partition spec that `on_any_mesh` gives to a result of this shape on a mesh with Explicit axes. It is that of
    the operation's first array for the leading axes, up to before the first axis in which the sizes of array and result
    differ; all later axes are not divided.

    Args:
      first: a list with the type (jax.typeof) of the operation's first array, or an empty list if it has none; the
        result is then whole on every device.
      shape: the result's.
    """
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
    """Wraps a function that calls a kernel, so that each device runs it on plain local arrays. XLA, which would
    otherwise divide the arrays over the mesh, cannot divide a kernel.

    The mesh is the one in force (jax.sharding.get_abstract_mesh), which `on_any_mesh` sets. Without a mesh of several
    devices, and within a shard_map over it, the function is called as it is. Otherwise a shard_map divides rows
    (entries along the leading axis) over the mesh's axis `axis`, if there is one, and devices along the mesh's other
    axes all do the same work. If the number of rows is not divisible by the size of that axis, the rows are whole on
    every device instead.

    Args:
      function: takes arrays, trees of arrays and other values. It is not differentiated: kernels have no derivative, so
        an operation that needs one has a custom derivative outside of it.
      rows: the number of its first arguments whose arrays have rows as leading axis. All other arrays are whole on
        every device.
      results: the number of its first results that have rows as leading axis; each result after them is a sum over
        rows, which is added up over the devices, or None. If `results` is None, all results have rows (or none has, if
        `rows` is 0).
      axis: the name of the mesh axis over which rows are divided.
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
