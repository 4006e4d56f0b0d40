"""Lets public operations run on a mesh of several devices. XLA divides plain JAX operations but no kernels, so
`on_each_device` puts a shard_map around them. On Explicit axes (the default of jax.make_mesh) each operation must state
its result's sharding, which `on_any_mesh` does. Within training's shard_map neither does anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec


def on_any_mesh[**Parameters, Result](function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorates a public operation, so that it runs on any mesh of several devices: the one in force, or that of its
    first array that has one. Within it all axes are Auto.

    With Explicit axes, arguments are first made whole on every device. Results get the sharding of the first array in
    leading axes of equal size, and are whole along others.
    """

    @functools.wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        leaves, tree = jax.tree.flatten((args, kwargs))
        array_indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        mesh = _mesh([leaves[index] for index in array_indices])
        in_force = jax.sharding.get_abstract_mesh()
        if mesh is None or (mesh == in_force and not mesh.explicit_axes):
            return function(*args, **kwargs)
        automatic = mesh.update_axis_types(dict.fromkeys(mesh.explicit_axes, AxisType.Auto))
        first = [jax.typeof(leaves[index]) for index in array_indices[:1]]
        with jax.sharding.use_abstract_mesh(automatic):
            for index in array_indices:
                if mesh.explicit_axes:
                    replicated = NamedSharding(automatic, PartitionSpec())
                    leaves[index] = jax.sharding.reshard(leaves[index], replicated)
            args, kwargs = jax.tree.unflatten(tree, leaves)
            results = function(*args, **kwargs)
        if not mesh.explicit_axes:
            return results
        return jax.tree.map(lambda x: jax.sharding.reshard(x, NamedSharding(mesh, _as_first(first, x.shape))), results)

    return run


def _mesh(arrays: list[Any]) -> AbstractMesh | None:
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(array).sharding.mesh for array in arrays)]
    return next((mesh for mesh in meshes if not mesh.empty and mesh.size > 1), None)


def _as_first(first: Sequence[Any], shape: tuple[int, ...]) -> PartitionSpec:
    spec = []
    for array in first:
        for axis, size, result_size in zip(array.sharding.spec, array.shape, shape, strict=False):
            if size != result_size:
                break
            spec.append(axis)
    return PartitionSpec(*spec)


def on_each_device[**Parameters, Result](
    function: Callable[Parameters, Result], rows: int = 0, results: int | None = None, axis: str = "data"
) -> Callable[Parameters, Result]:
    """Wraps a function that calls a kernel, so that each device runs it on local arrays: as it is without a mesh of
    several devices or within a shard_map; otherwise a shard_map divides rows (leading axes) over the mesh's `axis`, if
    their number is divisible, and devices along other axes repeat the work. It cannot be differentiated.

      rows: the number of first arguments with rows; all others are whole.
      results: the number of first results with rows; later ones are added up over devices, or None. None: all have rows
        (none if `rows` is 0).
    """

    @functools.wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        mesh = jax.sharding.get_abstract_mesh()
        axes = {name for name in mesh.axis_names if name not in mesh.manual_axes}
        if all(mesh.shape[name] == 1 for name in axes):
            return function(*args, **kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        array_indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]
        in_rows = len(jax.tree.leaves(args[:rows]))
        by_axis = rows > 0 and axis in axes and leaves[array_indices[0]].shape[0] % mesh.shape[axis] == 0
        divided, replicated = PartitionSpec(axis) if by_axis else PartitionSpec(), PartitionSpec()

        computed: Callable = function

        def local(arrays):
            inputs = list(leaves)
            for index, array in zip(array_indices, arrays, strict=True):
                inputs[index] = array
            args, kwargs = jax.tree.unflatten(tree, inputs)
            outputs = computed(*args, **kwargs)
            if results is None:
                return outputs, ()
            sums = outputs[results:]
            return outputs[:results], jax.lax.psum(sums, axis) if by_axis else sums

        by_rows, sums = jax.shard_map(
            local,
            in_specs=([divided if index < in_rows else replicated for index in array_indices],),
            out_specs=(divided, replicated),
            axis_names=axes,
            check_vma=False,
        )([leaves[index] for index in array_indices])
        return by_rows if results is None else (*by_rows, *sums)  # type: ignore[return-value]

    return run
