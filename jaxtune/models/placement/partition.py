"""How tensors and the rows of a batch are divided over a mesh with the axes `data` and `fsdp`.

Models train in a shard_map over all of it (`divided`), so that they and their kernels see plain local arrays; XLA
divides the optimizer's update, which is outside. Rows are divided over both axes. Along `fsdp` each device has a Shard
of tensors that declare an axis to divide, `nnx.Param(value, axes=("out", "in"))`, and gathers them before use, apart
from frozen ones that a plan keeps whole. Small tensors and adapters declare none: exchanges would cost more than they
save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxtune.models.placement.low_format import SyncFormat
from jaxtune.models.placement.streams import memory_kinds
from jaxtune.pallas.formats import Stored
from jaxtune.system import private_jax

_FROM_HOST_BYTES = 64 << 20  # of zeros


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis of the mesh, which divides the rows of a batch."""

    name: str
    """Also the config key `mesh.NAME`, a field of MeshConfig in the order of AXES."""
    divides: tuple[str, ...] = ()
    """Logical axes of tensors, such as "out"; a tensor is divided along its first one. Only `fsdp` has any."""


AXES = (Axis("data"), Axis("fsdp", divides=("out", "experts", "vocab")))
[_TENSORS] = (axis for axis in AXES if axis.divides)
TENSORS = _TENSORS.name  # the axis that divides tensors
ROWS, WHOLE = PartitionSpec(tuple(axis.name for axis in AXES)), PartitionSpec()


# ---- the mesh

type AnyMesh = Mesh | AbstractMesh  # without devices for shapes alone


class MeshShape(tuple[int, ...]):
    """The number of devices along each of AXES."""

    @staticmethod
    def of(mesh: AnyMesh) -> MeshShape:
        """The shape of a JAX mesh; an axis that it lacks has one device, and other axes are ignored."""
        return MeshShape(mesh.shape.get(axis.name, 1) for axis in AXES)

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self)

    @property
    def shard_count(self) -> int:
        """The number of devices that divide a tensor."""
        return next(count for axis, count in zip(AXES, self, strict=True) if axis.name == TENSORS)

    @property
    def copies(self) -> int:
        """The number of copies of the model."""
        return self.size // self.shard_count

    def to_record(self) -> dict[str, int]:
        """For checkpoints, such as {"mesh_data": 1, "mesh_fsdp": 2}."""
        return {f"mesh_{axis.name}": count for axis, count in zip(AXES, self, strict=True)}

    @staticmethod
    def from_record(record: Mapping[str, int]) -> MeshShape:
        """An axis that a checkpoint's record lacks is newer: one device."""
        return MeshShape(record.get(f"mesh_{axis.name}", 1) for axis in AXES)


def _keys(shape: Sequence[int]) -> list[str]:
    """Config keys of the sizes that are not 1, such as "mesh.fsdp = 2"."""
    return [f"mesh.{axis.name} = {count}" for axis, count in zip(AXES, shape, strict=True) if count != 1]


def mesh_shape(*sizes: int) -> MeshShape:
    """The requested shape: devices along each of AXES, 1 where left out; one may be -1, all devices divided by the
    others. Raises ValueError if that is no whole number.
    """
    shape = (*sizes, *[1] * (len(AXES) - len(sizes)))
    if -1 not in shape:
        return MeshShape(shape)
    devices = jax.device_count()
    fixed = [1 if size == -1 else size for size in shape]
    fixed_devices = math.prod(fixed)
    if devices % fixed_devices:
        key = f"mesh.{AXES[shape.index(-1)].name}"
        raise ValueError(
            f"{key} = -1: {devices} devices are not a multiple of {' x '.join(_keys(fixed))}; set {key} to the number "
            f"of devices that are to be used, divided by {fixed_devices}"
        )
    return MeshShape(devices // fixed_devices if size == -1 else size for size in shape)


def make_mesh(*sizes: int) -> Mesh:
    """A mesh of mesh_shape(*sizes) with the run's first devices. Raises ValueError if there are too few, or in several
    processes too many.
    """
    devices, shape = jax.devices(), mesh_shape(*sizes)
    requested = " and ".join(_keys(shape)) or f"mesh.{AXES[0].name} = 1"
    if shape.size > len(devices):
        raise ValueError(f"{requested}: there are {len(devices)} {devices[0].platform} devices")
    if shape.size < len(devices) and jax.process_count() > 1:
        raise ValueError(
            f"{requested}: the run has {len(devices)} devices in {jax.process_count()} processes, and all of them take "
            "part; set mesh.data=-1, or start fewer processes"
        )
    names, kinds = tuple(axis.name for axis in AXES), (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(tuple(shape), names, axis_types=kinds, devices=devices[: shape.size])


def divided(function: Callable, mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable:
    """The function in jax.shard_map over the mesh; itself for one device or None.

    Nothing checks that arrays which the specs call whole are equal on all devices. Inside, take jax.grad of this
    device's share of a sum over devices: after a psum each gradient would count once a device (see `total`).

      function: of arrays; its results are arrays too.
      mesh: None: the function itself is returned.
      in_specs, out_specs: PartitionSpecs, or trees of them, as jax.shard_map takes them.
    """
    if mesh is None or mesh.size == 1:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@contextlib.contextmanager
def compiling(mesh: Mesh) -> Iterator[None]:
    """The context for compiling programs that are all inside `divided`: Shardy, with nothing to partition, is off (32
    layers of 70B: 67 s instead of 130 s).
    """
    with jax.set_mesh(mesh), private_jax.config.use_shardy_partitioner(False):
        yield


# ---- placing arrays


def put(tree: Any, sharding: Any) -> Any:
    """jax.device_put for arrays that every process has whole or that are on the mesh, without its collective comparison
    of values. sharding: a sharding, a tree or prefix of them, or None: this process's default device.
    """
    if jax.process_count() == 1 or sharding is None:
        return jax.device_put(tree, sharding)
    return jax.tree.map(_put, tree, jax.tree.broadcast(sharding, tree))


def _put(array: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """`put` in several processes: each places its parts of a whole array; one on the mesh is copied between devices."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return array if array.sharding == sharding else _moves(sharding)(array)
    if isinstance(array, jax.Array) and sharding.is_fully_replicated:  # does not copy on a device that has it
        copies = [jax.device_put(array, device) for device in sharding.addressable_devices]
        return jax.make_array_from_single_device_arrays(array.shape, sharding, copies)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of a shape with a sharding: small ones from the host, as a program for each shape takes 0.05 to 0.2 s."""
    if shape.size * shape.dtype.itemsize > _FROM_HOST_BYTES:
        return jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)
    return put(np.zeros(shape.shape, shape.dtype), shape.sharding)


def moved(array: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """`put`, but between the same devices an array is copied directly, not via the host."""
    current = array.sharding if isinstance(array, jax.Array) else None
    if current is None or current == sharding or current.device_set != sharding.device_set:
        return put(array, sharding)
    return _moves(sharding)(array)


def colocated(trained: Any, other_variables: Any) -> tuple[Any, Any]:
    """Places a run's trained tensors and the rest of its model on the same devices: on one if each process has all of
    every array, otherwise by `shardings`.
    """
    arrays = [leaf for leaf in jax.tree.leaves((trained, other_variables)) if isinstance(leaf, jax.Array)]
    elsewhere = [array for array in arrays if not array.is_fully_addressable]
    if all(array.is_fully_replicated for array in elsewhere):
        local_copies = {id(array): array.addressable_data(0) for array in elsewhere}
        return jax.tree.map(lambda leaf: local_copies.get(id(leaf), leaf), (trained, other_variables))
    meshes = (array.sharding.mesh for array in elsewhere if isinstance(array.sharding, NamedSharding))
    mesh = next(mesh for mesh in meshes if isinstance(mesh, Mesh))
    return put(trained, shardings(trained, mesh)), put(other_variables, shardings(other_variables, mesh))


def addressable(tree: Any) -> list[Any]:
    """What of a tree this process can check alone: [tree] if it has all of it, else its parts of float arrays."""
    leaves = jax.tree.leaves(tree)
    if all(leaf.is_fully_addressable for leaf in leaves):
        return [tree]
    floats = (leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating))
    return [shard.data for leaf in floats for shard in leaf.addressable_shards]


def on_host(array: Any) -> np.ndarray:
    """A whole numpy copy; all processes of the mesh must call it. Unlike jax.device_get it leaves no cached copy."""
    if not isinstance(array, jax.Array):
        return np.asarray(array)
    if not array.is_fully_addressable and not array.is_fully_replicated:
        assert isinstance(array.sharding, NamedSharding)
        array = _moves(NamedSharding(array.sharding.mesh, WHOLE))(array)
    local = array if len(array.sharding.device_set) == 1 else array.addressable_data(0)
    if array.is_fully_replicated:
        return np.asarray(jax.make_array_from_single_device_arrays(local.shape, local.sharding, [local]))
    result = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        result[shard.index] = on_host(shard.data)
    return result


@functools.cache
def _moves(sharding: jax.sharding.Sharding) -> Callable[[jax.Array], jax.Array]:
    """A cached program that copies an array between devices."""
    return jax.jit(lambda array: array, out_shardings=sharding)


# ---- rows


def _row_axes() -> tuple[str, ...]:
    """Mesh axes of several devices that divide rows in the traced function; () outside `divided`."""
    mesh = jax.sharding.get_abstract_mesh()
    names = (axis.name for axis in AXES)
    return tuple(name for name in names if name in mesh.manual_axes and mesh.shape[name] > 1)


def row_shard_index() -> jax.Array | int:
    """The index, int32[], of this device's part of the batch's rows; 0 outside `divided`. Fold it into keys."""
    axes = _row_axes()
    return jax.lax.axis_index(axes) if axes else 0


def total(sums: Any) -> Any:
    """Sums over this device's rows become sums over all rows (Shards: over the axes but `fsdp`). Unchanged outside
    `divided`. The gradient passes unchanged to this device's share, so that gradients add up once.
    """
    return _total(sums) if _row_axes() else sums


def largest(value: jax.Array) -> jax.Array:
    """The maximum over the whole batch from this device's, without a gradient; unchanged outside `divided`."""
    axes = _row_axes()
    value = jax.lax.stop_gradient(value)
    return jax.lax.pmax(value, axes) if axes else value


def gathered(value: jax.Array) -> jax.Array:
    """This device's rows as those of the whole batch, without a gradient; unchanged outside `divided`."""
    axes = _row_axes()
    value = jax.lax.stop_gradient(value)
    return jax.lax.all_gather(value, axes, tiled=True) if axes else value


@jax.custom_vjp
def _total(sums):
    """`total` inside `divided`; its derivative is the identity."""
    axes = _row_axes()

    def summed(leaf):
        over = tuple(axis for axis in axes if axis != TENSORS) if isinstance(leaf, Shard) else axes
        return jax.lax.psum(leaf, over) if over else leaf

    return jax.tree.map(summed, sums, is_leaf=_is_shard)


_total.defvjp(lambda sums: (_total(sums), None), lambda _, gradients: (gradients,))


# ---- tensors


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shard:
    """One device's part of an array that `count` devices divide equally along `axis`. `divide` only marks whole arrays
    with it; shard_map cuts them, so `shape` is the whole array's in `divided`, and wrong outside.
    """

    array: jax.Array  # the part in `divided`, the whole array outside of it
    axis: int = dataclasses.field(metadata=dict(static=True))  # the axis along which the array is divided
    count: int = dataclasses.field(metadata=dict(static=True))  # the number of parts
    # in which format gathers.scatter sends the gradients; None: float32, or their own dtype between two devices
    sync: SyncFormat | None = dataclasses.field(default=None, metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size * self.count if axis == self.axis else size for axis, size in enumerate(self.array.shape))

    @property
    def dtype(self):
        return self.array.dtype

    @property
    def ndim(self) -> int:
        return self.array.ndim


def _is_shard(leaf: Any) -> bool:
    return isinstance(leaf, Shard)


def divide(tree: Any, mesh: AnyMesh | None, sync: SyncFormat | None = None) -> Any:
    """Wraps the arrays of nnx variables that the mesh divides in Shards; no array is cut. Quantised tensors are divided
    between blocks; what does not divide evenly stays whole.

      tree: of nnx variables.
      mesh: None: nothing is divided.
      sync: the format in which gradients are summed; None: their own.
    """
    return divided_into(tree, 1 if mesh is None else MeshShape.of(mesh).shard_count, sync)


def which_are_divided(tree: Any, mesh: Mesh | None) -> list[bool]:
    """Whether devices divide each array, in the order of leaves."""
    return [_is_shard(leaf) for leaf in jax.tree.leaves(divide(tree, mesh), is_leaf=_is_shard)]


def bytes_per_device(tree: Any, shard_count: int) -> float:
    """Bytes of a tree of nnx variables (also abstract) on each of `shard_count` devices that divide tensors."""

    def bytes_of(leaf):
        size = float(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize)
        return size / leaf.count**2 if isinstance(leaf, Shard) else size  # a Shard's shape is of `count` such arrays

    return sum(map(bytes_of, jax.tree.leaves(divided_into(tree, shard_count), is_leaf=_is_shard)))


def divided_sizes(tree: Any, shard_count: int) -> tuple[float, float]:
    """(bytes, elements) of the arrays that `shard_count` devices would divide, each counted whole."""
    arrays = [shard.array for shard in shards(divided_into(tree, shard_count))]
    counts = [float(math.prod(array.shape)) for array in arrays]
    return sum(n * jnp.dtype(a.dtype).itemsize for n, a in zip(counts, arrays, strict=True)), sum(counts)


def divided_into(tree: Any, count: int, sync: SyncFormat | None = None) -> Any:
    """`divide` for a number of parts instead of a mesh.

    tree: of nnx variables.
    count: shards of each array.
    sync: the format in which gradients are summed; None: their own.
    """
    if count == 1:
        return tree

    def marked_variable(variable):
        if not isinstance(variable, nnx.Variable):
            return variable
        axes = _axes(variable, count)
        if axes is None:
            return variable
        leaves, structure = jax.tree.flatten(variable.get_value())
        marked = [
            leaf if axis is None else Shard(leaf, axis, count, sync) for leaf, axis in zip(leaves, axes, strict=True)
        ]
        return variable.replace(jax.tree.unflatten(structure, marked))

    return jax.tree.map(marked_variable, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _axes(variable: nnx.Variable, count: int) -> tuple[int | None, ...] | None:
    """For each array of a variable's value (codes, scales) its divided axis or None; None if no array is divided."""
    names = variable.get_metadata().get("axes", ())
    axis = next((index for index, name in enumerate(names) if name in _TENSORS.divides), None)
    if axis is None:
        return None
    value = variable.get_value()
    if isinstance(value, Stored):
        return value.shard_axes(axis, count)
    return (axis,) if value.shape[axis] % count == 0 else None


def declared_resident(frozen: Any, resident: int, layers: int) -> Any:
    """The state with empty `axes` for the first layers, which `divide` then leaves whole; if these are all, everything
    else (embedding, head, a teacher) too.

      frozen: the state of the tensors that do not train.
      resident: how many first layers.
      layers: how many there are.
    """
    if not resident:
        return frozen

    def declared(path, variable):
        keys: list[Any] = [getattr(key, "key", None) for key in path]
        is_resident = keys[1] < resident if keys[0] == "layers" else resident == layers
        if not is_resident:
            return variable
        value = variable.get_value()
        return variable.replace(value, axes=()) if "axes" in variable.get_metadata() else variable

    return jax.tree_util.tree_map_with_path(declared, frozen, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def divide_like(divided_tree: Any, tree: Any) -> Any:
    """`tree`, such as sums of gradients, with Shards like those of `divided_tree`; `divide` could misjudge sums with a
    leading axis of devices.
    """

    def marked(leaf, array):
        return dataclasses.replace(leaf, array=array) if isinstance(leaf, Shard) else array

    return jax.tree.map(marked, divided_tree, tree, is_leaf=_is_shard)


def undivided(tree: Any) -> Any:
    """The tree with the `array` of each Shard in its place: in `divided` this device's part. Nothing is gathered."""
    return jax.tree.map(lambda leaf: leaf.array if isinstance(leaf, Shard) else leaf, tree, is_leaf=_is_shard)


def specs(tree: Any) -> Any:
    """PartitionSpecs of a tree from `divide`, in Shards for those."""
    return _specs(tree, (), ())


def unsummed_specs(tree: Any) -> Any:
    """PartitionSpecs of a tree from `divide_like`, of sums not yet added over devices. A leading axis, which a Shard's
    `axis` does not count, has an entry a device, in Shards one for each along `data`.
    """
    names = tuple(axis.name for axis in AXES)
    return _specs(tree, (names,), (tuple(name for name in names if name != TENSORS),))


def _specs(tree: Any, front: tuple, front_of_shards: tuple) -> Any:
    """`specs` for arrays with leading axes, which are divided as `front` says, those of Shards as front_of_shards."""

    def spec_of(leaf):
        if not isinstance(leaf, Shard):
            return PartitionSpec(*front)
        return dataclasses.replace(leaf, array=PartitionSpec(*front_of_shards, *([None] * leaf.axis), TENSORS))

    return jax.tree.map(spec_of, tree, is_leaf=_is_shard)


def shardings(tree: Any, mesh: AnyMesh) -> Any:
    """NamedShardings of a tree of nnx variables, divided where `divide` says, and on the host where they stream."""
    variables = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    kinds = (kind for variable in variables for kind in memory_kinds(variable))
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec, memory_kind=next(kinds)), undivided(specs(divide(tree, mesh)))
    )


def require_undivided(states: Any, caller: str) -> None:
    """Raises ValueError if an array is divided over devices. caller: the caller, for the message."""
    for leaf in jax.tree.leaves(states):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_replicated:
            raise ValueError(
                f"{caller}: the model's weights are divided over {len(leaf.devices())} devices, as a run with "
                f"mesh.{TENSORS} leaves them: save the model and load it (from_pretrained), or train with "
                f"mesh.{TENSORS}=1"
            )


def states_shardings(opt_state: Any, trainable: Any, mesh: Mesh) -> Any:
    """NamedShardings of an optimizer's states. In parts with a state for each tensor of `trainable`, those of divided
    tensors are divided if evenly: along the same axis if the shape is the tensor's, else (8-bit blocks, factors) along
    the first. All others are whole.

      opt_state: arrays or shapes. A part whose tree structure is that of `trainable` counts as having one for each
        tensor.
      trainable: the state of the tensors that train.
      mesh: of the devices.
    """
    structure = jax.tree.structure(trainable)
    tensors = jax.tree.leaves(divide(trainable, mesh), is_leaf=_is_shard)
    everywhere = NamedSharding(mesh, WHOLE)

    def beside(tensor, leaf):
        if not isinstance(tensor, Shard):
            return everywhere
        axis = tensor.axis if leaf.shape == tensor.array.shape else 0
        if leaf.ndim == 0 or leaf.size == 0 or leaf.shape[axis] % tensor.count:
            return everywhere
        return NamedSharding(mesh, PartitionSpec(*([None] * axis), TENSORS))

    def is_like(tree):
        return jax.tree.structure(tree) == structure

    def sharding_of(tree):
        if not is_like(tree):
            return everywhere
        return jax.tree.unflatten(structure, list(map(beside, tensors, jax.tree.leaves(tree))))

    return jax.tree.map(sharding_of, opt_state, is_leaf=is_like)


def shards(tree: Any) -> list[Shard]:
    """The Shards of a tree, in the order of its leaves."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_shard) if isinstance(leaf, Shard)]


def with_whole(tree: Any, arrays: Sequence[jax.Array | Shard]) -> Any:
    """The tree with whole arrays, or Shards that stay, in the order of `shards`, in place of its Shards."""
    remaining = iter(arrays)
    return jax.tree.map(lambda leaf: next(remaining) if isinstance(leaf, Shard) else leaf, tree, is_leaf=_is_shard)
