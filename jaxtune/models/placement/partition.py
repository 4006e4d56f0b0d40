"""How tensors and the rows of a batch are divided over the devices of a mesh.

`AXES` declares the axes of a mesh (`make_mesh`), `data` and `fsdp`. Models train in a shard_map over all of it
(`divided`), so that they and their kernels see plain local arrays; the optimizer's update is outside of it, and XLA
divides it. The rows of a batch are divided over both axes. Tensors are whole along `data`; along `fsdp`, each device
has a part (a `Shard`) of the tensors that declare an axis to divide. They are gathered before use (gathers.py), except
frozen ones that the plan keeps whole (`declared_resident`). Sums over rows, such as gradients, are each device's own
until they are added up: gradients of a Shard over `fsdp` at once, which leaves each device its part, others once a
step. A model asks here for what concerns other devices (`part_of_rows`, `total`, `largest`). `divide` marks tensors as
Shards, `specs` and `shardings` say where arrays belong, `put` and `moved` place them there, and `on_host` copies them
to the host. Plans, which have no mesh, use a MeshShape and `divided_into`, `bytes_per_device` and `divided_sizes`. A
module declares a tensor's logical axes in its variable's metadata: `nnx.Param(value, axes=("out", "in"))`. Small
tensors (norms, biases, routers) and adapters declare none: exchanges would cost more than they save."""

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
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxtune.models.placement.low_format import SyncFormat
from jaxtune.pallas.formats import Stored
from jaxtune.system import private_jax


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis of the mesh, a declaration in AXES. The rows of a batch are divided over all axes."""

    name: str
    """The name of the axis, which is also the config key `mesh.NAME` (a field of MeshConfig, in the order of AXES)."""
    divides: tuple[str, ...] = ()
    """Logical axes of tensors, such as "out", that are divided over it, with their gradients and optimizer states; of a
    tensor with several, the first of its own axes is. Only one axis of the mesh divides tensors, `fsdp`."""


AXES = (Axis("data"), Axis("fsdp", divides=("out", "experts", "vocab")))
[_TENSORS] = (axis for axis in AXES if axis.divides)
TENSORS = _TENSORS.name  # the axis that divides tensors
ROWS, WHOLE = PartitionSpec(tuple(axis.name for axis in AXES)), PartitionSpec()


# ---- the mesh


class MeshShape(tuple[int, ...]):
    """The number of devices along each of AXES, (data, fsdp), as plans and records have it; `mesh_shape` makes it."""

    @staticmethod
    def of(mesh: Mesh) -> MeshShape:
        """The shape of a JAX mesh. An axis of AXES that the mesh lacks has one device, and other axes are ignored."""
        return MeshShape(mesh.shape.get(axis.name, 1) for axis in AXES)

    @property
    def size(self) -> int:
        """The number of devices of the mesh, the product of its entries."""
        return math.prod(self)

    @property
    def parts(self) -> int:
        """The number of devices that divide a tensor, each of which has one part of it: the size of the axis `fsdp`."""
        return next(count for axis, count in zip(AXES, self, strict=True) if axis.name == TENSORS)

    @property
    def copies(self) -> int:
        """The number of groups of `parts` devices; each group has all parts of every tensor: one copy of the model."""
        return self.size // self.parts

    def to_record(self) -> dict[str, int]:
        """The shape as a JSON object, {"mesh_data": 1, "mesh_fsdp": 2} for example, for checkpoints' records."""
        return {f"mesh_{axis.name}": count for axis, count in zip(AXES, self, strict=True)}

    @staticmethod
    def from_record(record: Mapping[str, int]) -> MeshShape:
        """The shape from a checkpoint's record, when a run resumes. An axis that it lacks is newer: one device."""
        return MeshShape(record.get(f"mesh_{axis.name}", 1) for axis in AXES)


def _keys(shape: Sequence[int]) -> list[str]:
    """The config keys, such as "mesh.fsdp = 2", of the sizes in a mesh's shape that are not 1, for error messages."""
    return [f"mesh.{axis.name} = {count}" for axis, count in zip(AXES, shape, strict=True) if count != 1]


def mesh_shape(*sizes: int) -> MeshShape:
    """The shape of the mesh that the config's section `mesh` requests, for make_mesh, plans, and counts of devices.

    Args:
      sizes: devices along each of AXES, 1 where left out; one may be -1, all devices of the run divided by the others.
    Raises:
      ValueError: -1 gives no whole number.
    """
    shape = (*sizes, *[1] * (len(AXES) - len(sizes)))
    if -1 not in shape:
        return MeshShape(shape)
    devices = jax.device_count()
    others = [1 if size == -1 else size for size in shape]
    used = math.prod(others)
    if devices % used:
        key = f"mesh.{AXES[shape.index(-1)].name}"
        raise ValueError(
            f"{key} = -1: {devices} devices are not a multiple of {' x '.join(_keys(others))}; set {key} to the number "
            f"of devices that are to be used, divided by {used}"
        )
    return MeshShape(devices // used if size == -1 else size for size in shape)


def make_mesh(*sizes: int) -> Mesh:
    """Makes a mesh with `sizes`, numbers of devices along AXES, of which one may be -1 and the last may be left out
    (mesh_shape). It has the run's first devices; in one process others may be left over. setup.py and loading.py call
    it, before the Engine.

    Raises:
      ValueError: there are fewer devices, or in a run of several processes more devices; -1 gives no whole number.
    """
    devices, shape = jax.devices(), mesh_shape(*sizes)
    asked = " and ".join(_keys(shape)) or f"mesh.{AXES[0].name} = 1"
    if shape.size > len(devices):
        raise ValueError(f"{asked}: there are {len(devices)} {devices[0].platform} devices")
    if shape.size < len(devices) and jax.process_count() > 1:
        raise ValueError(
            f"{asked}: the run has {len(devices)} devices in {jax.process_count()} processes, and all of them take "
            "part; set mesh.data=-1, or start fewer processes"
        )
    names, kinds = tuple(axis.name for axis in AXES), (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(tuple(shape), names, axis_types=kinds, devices=devices[: shape.size])


def divided(function: Callable, mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable:
    """Wraps a function in jax.shard_map, so that every device of the mesh runs it on its own part of the arrays;
    in_specs and out_specs are trees of PartitionSpecs for its arguments and results (`specs`). Returns the function
    itself for a mesh of one device or None. A run's programs are all inside it, except the update. Nothing checks that
    arrays which the specs call whole are equal on all devices. Inside, jax.grad must be taken of this device's share of
    a sum over devices: if it were summed by psum first, each gradient would be counted once a device (see `total`)."""
    if mesh is None or mesh.size == 1:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@contextlib.contextmanager
def compiling(mesh: Mesh) -> Iterator[None]:
    """The context in which programs that are all inside `divided` (all but the update) are compiled: `mesh` is JAX's
    current mesh, and Shardy, with nothing to partition, is off. 32 layers of 70B took XLA 67 s, 130 s with it."""
    with jax.set_mesh(mesh), private_jax.config.use_shardy_partitioner(False):
        yield


# ---- placing arrays


def put(tree: Any, where: Any) -> Any:
    """Places a tree of arrays, which every process has whole or which are on the mesh already, as jax.device_put does;
    with several processes, device_put itself would let them compare the values first, in a collective. where: a
    sharding, or a tree of them (or a prefix of the tree); None: this process's default device."""
    if jax.process_count() == 1 or where is None:
        return jax.device_put(tree, where)
    return jax.tree.map(_put, tree, jax.tree.broadcast(where, tree))


def _put(array: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Places one array by `sharding`, as `put` does in a run of several processes. If every process has it whole, each
    places the parts on its own devices; if it is on the mesh but placed otherwise, it is copied between the devices."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return array if array.sharding == sharding else _moves(sharding)(array)
    if isinstance(array, jax.Array) and sharding.is_fully_replicated:  # does not copy on a device that has it
        here = [jax.device_put(array, device) for device in sharding.addressable_devices]
        return jax.make_array_from_single_device_arrays(array.shape, sharding, here)
    return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])


def moved(array: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Places an array by `sharding`, as `put` does, for frozen weights; one on these devices, placed otherwise, is
    copied between them, not via the host. Returns the new array, or the same one if it is placed so already."""
    current = array.sharding if isinstance(array, jax.Array) else None
    if current is None or current == sharding or current.device_set != sharding.device_set:
        return put(array, sharding)
    return _moves(sharding)(array)


def colocated(trained: Any, rest: Any) -> tuple[Any, Any]:
    """Places two trees of nnx variables, a run's trained tensors and the rest of its model, on the same devices, so
    that the finished model can compute: (trained, rest). In one process they stay as they are. If each of several
    processes has every array whole, it gets copies on one device; otherwise `shardings` on their mesh place them."""
    arrays = [leaf for leaf in jax.tree.leaves((trained, rest)) if isinstance(leaf, jax.Array)]
    elsewhere = [array for array in arrays if not array.is_fully_addressable]
    if all(array.is_fully_replicated for array in elsewhere):
        own = {id(array): array.addressable_data(0) for array in elsewhere}
        return jax.tree.map(lambda leaf: own.get(id(leaf), leaf), (trained, rest))
    meshes = (array.sharding.mesh for array in elsewhere if isinstance(array.sharding, NamedSharding))
    mesh = next(mesh for mesh in meshes if isinstance(mesh, Mesh))
    return put(trained, shardings(trained, mesh)), put(rest, shardings(rest, mesh))


def addressable(tree: Any) -> list[Any]:
    """What of a tree, such as a tensor, this process can check alone; loading checks each entry for NaN: [tree] if it
    has all of every array, otherwise a list of the parts of floating-point arrays that are on its own devices."""
    leaves = jax.tree.leaves(tree)
    if all(leaf.is_fully_addressable for leaf in leaves):
        return [tree]
    floats = (leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating))
    return [shard.data for leaf in floats for shard in leaf.addressable_shards]


def on_host(array: Any) -> np.ndarray:
    """Copies an array to the host as a numpy array, whole even if each process has only a part; all processes of the
    mesh must call it. Unlike jax.device_get it does not cache the copy, in host memory, with the array."""
    if not isinstance(array, jax.Array):
        return np.asarray(array)
    if not array.is_fully_addressable and not array.is_fully_replicated:
        assert isinstance(array.sharding, NamedSharding)
        array = _moves(NamedSharding(array.sharding.mesh, WHOLE))(array)
    one = array if len(array.sharding.device_set) == 1 else array.addressable_data(0)
    if array.is_fully_replicated:
        return np.asarray(jax.make_array_from_single_device_arrays(one.shape, one.sharding, [one]))
    whole = np.empty(array.shape, array.dtype)
    for part in array.addressable_shards:
        whole[part.index] = on_host(part.data)
    return whole


@functools.cache
def _moves(sharding: jax.sharding.Sharding) -> Callable[[jax.Array], jax.Array]:
    """Makes the cached program by which _put, moved and on_host copy an array between devices, not by the host."""
    return jax.jit(lambda array: array, out_shardings=sharding)


# ---- rows


def _row_axes() -> tuple[str, ...]:
    """Names of the mesh axes of several devices that divide rows in the function being traced; () outside `divided`."""
    mesh = jax.sharding.get_abstract_mesh()
    names = (axis.name for axis in AXES)
    return tuple(name for name in names if name in mesh.manual_axes and mesh.shape[name] > 1)


def part_of_rows() -> jax.Array | int:
    """The index, int32[] from 0, of this device's equal part of the batch's rows; 0 outside `divided`. By it dropout
    and noise are drawn as if one device drew them for all rows, and a quantised sync gives each device its own seed."""
    axes = _row_axes()
    return jax.lax.axis_index(axes) if axes else 0


def total(sums: Any) -> Any:
    """Sums a tree of arrays over devices: sums over this device's rows become sums over all rows. Shards, which are
    summed over `fsdp` already, are summed over the other axes. Steps add up their sums by it, and losses that are no
    sum over rows, such as a product of two sums, call it. The gradient of the total is passed to this device's share
    unchanged; gradients then add up to the whole once. Outside of `divided` it returns `sums` unchanged."""
    return _total(sums) if _row_axes() else sums


def largest(value: jax.Array) -> jax.Array:
    """Returns the maximum over the whole batch from `value`, the maximum over this device's rows: jax.lax.pmax over the
    mesh axes that divide rows, for metrics, without a gradient. Outside of `divided` it returns `value`."""
    axes = _row_axes()
    value = jax.lax.stop_gradient(value)
    return jax.lax.pmax(value, axes) if axes else value


@jax.custom_vjp
def _total(sums):
    """`total` inside of `divided`: a psum of each array of `sums` over the mesh axes that divide rows, and of a Shard,
    summed over `fsdp` already, over the others. Its derivative is the identity: each device gives its share."""
    axes = _row_axes()

    def one(leaf):
        over = tuple(axis for axis in axes if axis != TENSORS) if isinstance(leaf, Shard) else axes
        return jax.lax.psum(leaf, over) if over else leaf

    return jax.tree.map(one, sums, is_leaf=_is_shard)


_total.defvjp(lambda sums: (_total(sums), None), lambda _, gradients: (gradients,))


# ---- tensors


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shard:
    """One device's part of an array that `count` devices divide equally along `axis`. `divide` wraps whole arrays in
    Shards, which only marks them; in `divided`, whose shard_map cuts them, `array` is this device's part. `shape` has
    `count` times the length of `array` along `axis`: the whole array's shape in `divided`, wrong outside of it."""

    array: jax.Array  # the part in `divided`, the whole array outside of it
    axis: int = dataclasses.field(metadata=dict(static=True))  # the axis along which the array is divided
    count: int = dataclasses.field(metadata=dict(static=True))  # the number of parts
    # in which format gathers.scatter sends the gradients; None: float32, or their own dtype between two devices
    sync: SyncFormat | None = dataclasses.field(default=None, metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `array`, with its length along `axis` times `count`: in `divided`, that of the whole array."""
        return tuple(size * self.count if axis == self.axis else size for axis, size in enumerate(self.array.shape))

    @property
    def dtype(self):
        """The dtype of the array, the same for the part and the whole."""
        return self.array.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions, the same for the part and the whole."""
        return self.array.ndim


def _is_shard(leaf: Any) -> bool:
    """Whether a leaf is a Shard: the `is_leaf` of jax.tree functions that must see Shards and not their arrays."""
    return isinstance(leaf, Shard)


def divide(tree: Any, mesh: Mesh | None, sync: SyncFormat | None = None) -> Any:
    """Marks which arrays of a tree of nnx variables the mesh divides: each of these is wrapped in a Shard, the others
    stay as they are, as all do without a mesh (None) or if `fsdp` is 1. sync: that of the Shards. Quantised tensors are
    divided between blocks, with their scales. Tensors that cannot be divided evenly are whole. No array is cut."""
    return divided_into(tree, 1 if mesh is None else MeshShape.of(mesh).parts, sync)


def which_are_divided(tree: Any, mesh: Mesh | None) -> list[bool]:
    """For each array of a tree of nnx variables, in the order of leaves, whether devices divide it; none is without a
    mesh (None). The optimizer's kernel (adam8) must know it, because XLA divides only plain operations itself."""
    return [_is_shard(leaf) for leaf in jax.tree.leaves(divide(tree, mesh), is_leaf=_is_shard)]


def bytes_per_device(tree: Any, parts: int) -> float:
    """Bytes of a tree of nnx variables (also abstract) on each device if `parts` devices divide tensors: a part of what
    is divided, and all of the rest. The planner calls it."""

    def one(leaf):
        size = float(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize)
        return size / leaf.count**2 if isinstance(leaf, Shard) else size  # a Shard's shape is of `count` such arrays

    return sum(map(one, jax.tree.leaves(divided_into(tree, parts), is_leaf=_is_shard)))


def divided_sizes(tree: Any, parts: int) -> tuple[float, float]:
    """(bytes, elements) of the arrays of a tree of nnx variables that would be divided if `parts` devices divide
    tensors, each counted whole. The planner computes gathers from bytes, sums of gradients from elements."""
    arrays = [shard.array for shard in shards(divided_into(tree, parts))]
    counts = [float(math.prod(array.shape)) for array in arrays]
    return sum(n * jnp.dtype(a.dtype).itemsize for n, a in zip(counts, arrays, strict=True)), sum(counts)


def divided_into(tree: Any, count: int, sync: SyncFormat | None = None) -> Any:
    """Marks the arrays of a tree of nnx variables as `divide` does, for a number of parts (the size of the mesh axis
    fsdp) instead of a mesh, which plans do not have. For count 1 it returns the tree itself. sync: of the Shards."""
    if count == 1:
        return tree

    def one(variable):
        if not isinstance(variable, nnx.Variable):
            return variable
        axes = _axes(variable, count)
        if axes is None:
            return variable
        leaves, structure = jax.tree.flatten(variable.get_value())
        parts = [leaf if at is None else Shard(leaf, at, count, sync) for leaf, at in zip(leaves, axes, strict=True)]
        return variable.replace(jax.tree.unflatten(structure, parts))

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _axes(variable: nnx.Variable, count: int) -> tuple[int | None, ...] | None:
    """For each array of a variable's value (a quantised one has codes and scales) the axis that is divided into `count`
    parts, or None if the array stays whole. Returns None instead of the tuple if no array is divided."""
    names = variable.get_metadata().get("axes", ())
    axis = next((index for index, name in enumerate(names) if name in _TENSORS.divides), None)
    if axis is None:
        return None
    value = variable.get_value()
    if isinstance(value, Stored):
        return value.divided(axis, count)
    return (axis,) if value.shape[axis] % count == 0 else None


def declared_resident(frozen: Any, resident: int, layers: int) -> Any:
    """The state `frozen` with empty `axes` in the metadata of the variables of the first `resident` of `layers` layers,
    so that `divide` leaves them whole on every device. If these are all layers, all other variables (embedding, head, a
    teacher) get them too. For `resident` 0 it returns `frozen`. The plan says how many layers (ResidualPlan)."""
    if not resident:
        return frozen

    def declared(path, variable):
        keys: list[Any] = [getattr(key, "key", None) for key in path]
        there = keys[1] < resident if keys[0] == "layers" else resident == layers
        if not there:
            return variable
        value = variable.get_value()
        return variable.replace(value, axes=()) if "axes" in variable.get_metadata() else variable

    return jax.tree_util.tree_map_with_path(declared, frozen, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def divide_like(divided_tree: Any, tree: Any) -> Any:
    """A copy of `tree`, a step's sums of gradients, with its arrays in Shards like those of `divided_tree`, trained
    tensors from `divide`, which itself could misjudge sums with a leading axis of devices. No array is cut."""

    def one(leaf, array):
        return dataclasses.replace(leaf, array=array) if isinstance(leaf, Shard) else array

    return jax.tree.map(one, divided_tree, tree, is_leaf=_is_shard)


def undivided(tree: Any) -> Any:
    """A tree with the `array` of each Shard in place of the Shard: in `divided` this device's part, outside of it the
    whole array. Nothing is gathered. Programs of steps return plain arrays so."""
    return jax.tree.map(lambda leaf: leaf.array if isinstance(leaf, Shard) else leaf, tree, is_leaf=_is_shard)


def specs(tree: Any) -> Any:
    """The PartitionSpecs with which `divided` (a shard_map) takes or returns a tree from `divide`. A Shard becomes a
    Shard with, in place of its array, the spec that divides its axis over the mesh axis `fsdp`. Any other array, which
    every device has whole, gets an empty spec."""
    return _specs(tree, (), ())


def unsummed_specs(tree: Any) -> Any:
    """The PartitionSpecs of a tree from `divide_like`, of sums not yet added over devices (Shards: only over `fsdp`). A
    leading axis, which a Shard's `axis` does not count, has an entry a device, in Shards one for each along `data`."""
    names = tuple(axis.name for axis in AXES)
    return _specs(tree, (names,), (tuple(name for name in names if name != TENSORS),))


def _specs(tree: Any, front: tuple, front_of_shards: tuple) -> Any:
    """The PartitionSpecs of `specs`, for arrays that have further axes in front of those of the tree's arrays. front:
    how these axes are divided, the first entries of each PartitionSpec; front_of_shards: the same for Shards."""

    def one(leaf):
        if not isinstance(leaf, Shard):
            return PartitionSpec(*front)
        return dataclasses.replace(leaf, array=PartitionSpec(*front_of_shards, *([None] * leaf.axis), TENSORS))

    return jax.tree.map(one, tree, is_leaf=_is_shard)


def shardings(tree: Any, mesh: Mesh) -> Any:
    """The NamedShardings by which a tree of nnx variables is placed on a mesh: the tree with a sharding in place of
    each array, which divides it where `divide` does and otherwise has it whole on every device."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), undivided(specs(divide(tree, mesh))))


def require_undivided(states: Any, what: str) -> None:
    """Raises ValueError if an array of `states`, a module's state, is divided over devices: generation and the
    observation of activations need whole weights. what: what the message calls the caller, such as "generate"."""
    for leaf in jax.tree.leaves(states):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_replicated:
            raise ValueError(
                f"{what}: the model's weights are divided over {len(leaf.devices())} devices, as a run with "
                f"mesh.{TENSORS} leaves them: save the model and load it (from_pretrained), or train with "
                f"mesh.{TENSORS}=1"
            )


def states_shardings(opt_state: Any, trainable: Any, mesh: Mesh) -> Any:
    """The NamedShardings on a mesh of opt_state, an optimizer's states, in its structure. In parts that have a state
    for each tensor of `trainable`, those of divided tensors are divided, if evenly: one of its tensor's shape along the
    same axis, another (8-bit blocks, factors) along its first. All others are whole. Any give equal results."""
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

    def one(tree):
        if not is_like(tree):
            return everywhere
        return jax.tree.unflatten(structure, list(map(beside, tensors, jax.tree.leaves(tree))))

    return jax.tree.map(one, opt_state, is_leaf=is_like)


def shards(tree: Any) -> list[Shard]:
    """Collects the Shards of a tree, in the order of its leaves, for gathers and sizes; other leaves are left out."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_shard) if isinstance(leaf, Shard)]


def with_whole(tree: Any, arrays: Sequence[jax.Array]) -> Any:
    """A new tree in which the Shards of `tree` are replaced by their whole arrays (`arrays`, in the order of `shards`);
    the stack makes a layer's weights so from what it gathered."""
    whole = iter(arrays)
    return jax.tree.map(lambda leaf: next(whole) if isinstance(leaf, Shard) else leaf, tree, is_leaf=_is_shard)
