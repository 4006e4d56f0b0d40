"""Public ops under a mesh of several devices.

Kernels know no mesh, and the plain forms are written for XLA's automatic division, in which it chooses what each device
holds. A mesh whose axes are Explicit (what jax.make_mesh makes unless it is told otherwise) asks each operation for the
sharding of its result instead. `on_any_mesh` lets an op run under either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec


def on_any_mesh[**Parameters, Result](function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Runs an op under the mesh of its arrays, or that in force, with axes for XLA to divide over.

    Where axes of that mesh are Explicit, a result is divided as the op's first array is, along the leading axes in
    which both have the same size; its other axes are whole on every device.
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
        first = jax.typeof(leaves[places[0]])
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
    """The mesh in force, or else that of the arrays, if one has several devices."""
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(array).sharding.mesh for array in arrays)]
    return next((mesh for mesh in meshes if not mesh.empty and mesh.size > 1), None)


def _as_first(first: Any, shape: tuple[int, ...]) -> PartitionSpec:
    """The spec of the array `first`, for a result of this shape."""
    spec = []
    for axis, size, other in zip(first.sharding.spec, first.shape, shape, strict=False):
        if size != other:
            break
        spec.append(axis)
    return PartitionSpec(*spec)


def axes() -> set[str]:
    """The axes of several devices of the mesh in force that XLA divides over, and no shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis for axis in mesh.axis_names if mesh.shape[axis] > 1 and axis not in mesh.manual_axes}


def refusal() -> str | None:
    """Why a kernel that nothing divides cannot run here, or None."""
    return "a mesh of several devices: the kernel cannot be divided" if axes() else None


def on_every_device(function: Callable, *operands):
    """A kernel has no partitioning rule of its own: under a mesh every device runs it on whole operands."""
    divided, whole = axes(), PartitionSpec()
    if not divided:
        return function(*operands)
    return jax.shard_map(function, in_specs=whole, out_specs=whole, axis_names=divided, check_vma=False)(*operands)
