"""How a step is divided over the devices of a mesh.

Training runs in one shard_map over the whole mesh (`divided`), so that a model and its kernels see plain local arrays,
as on one device. The mesh has two axes. The rows of a batch are divided over both, `data` and `fsdp`. Tensors are whole
on the devices along `data`; along `fsdp` each device has a part (a `Shard`) of those that declare a dividing axis, and
what is computed with them gathers them first (`whole_beside`; in the layers, the stack does it one layer ahead), but
for frozen tensors that a plan has whole on each device (`held_whole`), because memory has room. Sums
over rows, gradients too, are each device's own until they are added up: those of a Shard's tensor over `fsdp` at once,
which leaves each device its part of them, the rest once a step. What a model must know of other devices, it asks here:
`part_of_rows` and `total`. Where nothing is divided, these are 0 and the values as they are.

A module declares a tensor's logical axes in its variable's metadata: `nnx.Param(value, axes=("out", "in"))`. Small
tensors (norms, biases, routers) and adapters declare none: a gather or a reduction of their own in each layer would
cost more than the memory that it saves, and whole they are reduced once a step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.lax import optimization_barrier
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxtune.pallas.formats import Stored
from jaxtune.system import private_jax

DATA, FSDP = "data", "fsdp"
ROWS, WHOLE = PartitionSpec((DATA, FSDP)), PartitionSpec()
# Logical axes of tensors that are divided over the mesh's axis `fsdp`; of a tensor, the first.
_DIVIDED = ("out", "experts", "vocab")


# ---- the mesh


def mesh_shape(data: int, fsdp: int, devices: int | None = None) -> tuple[int, int]:
    """(data, fsdp) of the mesh that `mesh.data` and `mesh.fsdp` ask for; -1, of at most one: what the other leaves of
    the devices there are."""
    if data != -1 and fsdp != -1:
        return data, fsdp
    devices = jax.device_count() if devices is None else devices
    key, other = ("fsdp", data) if fsdp == -1 else ("data", fsdp)
    if devices % other:
        raise ValueError(
            f"mesh.{key} = -1: {devices} devices are not a multiple of mesh.{'data' if key == 'fsdp' else 'fsdp'} = "
            f"{other}; set mesh.{key} to the number of devices that are to be used, divided by {other}"
        )
    return (devices // fsdp, fsdp) if data == -1 else (data, devices // data)


def make_mesh(data: int, fsdp: int = 1) -> Mesh:
    """A mesh of data x fsdp devices; -1, of at most one of them, takes what is left.

    Raises:
      ValueError: there are fewer devices, or -1 leaves no whole number.
    """
    devices = jax.devices()
    data, fsdp = mesh_shape(data, fsdp)
    asked = f"mesh.data = {data}" + (f" and mesh.fsdp = {fsdp}" if fsdp > 1 else "")
    if data * fsdp > len(devices):
        raise ValueError(f"{asked}: there are {len(devices)} {devices[0].platform} devices")
    if data * fsdp < len(devices) and jax.process_count() > 1:
        raise ValueError(
            f"{asked}: the run has {len(devices)} devices in {jax.process_count()} processes, and all of them take "
            "part; set mesh.data=-1, or start fewer processes"
        )
    kinds = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((data, fsdp), (DATA, FSDP), axis_types=kinds, devices=devices[: data * fsdp])


def divided(function: Callable, mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable:
    """The function, run by every device of the mesh on its own part of arrays; as it is, on one device or no mesh.

    Nothing checks what the specs say is whole. Inside, jax.grad is of a device's own share of a sum: a psum in what is
    differentiated would count each gradient once a device (see `total`).
    """
    if mesh is None or mesh.size == 1:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@contextlib.contextmanager
def compiling(mesh: Mesh) -> Iterator[None]:
    """A program that runs on the mesh and is all inside `divided`, so that nothing is left to partition, is lowered and
    compiled here.

    Without Shardy: to take such a program in and give it out again, it takes as long as all that follows. 32 layers of
    Llama-3.3-70B on two devices, on two shared cores: XLA's passes 130 s with it and 67 s without, to the same memory.
    """
    with jax.set_mesh(mesh), private_jax.config.use_shardy_partitioner(False):
        yield


# ---- places


def put(tree: Any, where: Any) -> Any:
    """jax.device_put of a tree of arrays that every process has whole, or that lie on the mesh already.

    With several processes device_put would have them compare the values first, each time, in a collective.

    Args:
      where: a sharding, or a tree of them; None: this process's default device.
    """
    if jax.process_count() == 1 or where is None:
        return jax.device_put(tree, where)
    return jax.tree.map(_put, tree, jax.tree.broadcast(where, tree))


def _put(array: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return array if array.sharding == sharding else _moves(sharding)(array)
    if isinstance(array, jax.Array) and sharding.is_fully_replicated:  # a device that has it already keeps that one
        here = [jax.device_put(array, device) for device in sharding.addressable_devices]
        return jax.make_array_from_single_device_arrays(array.shape, sharding, here)
    return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])


def moved(array: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """`put` of one array; of one that lies on the same devices in another way, from device to device: device_put would
    take it through the host."""
    lies = array.sharding if isinstance(array, jax.Array) else None
    if lies is None or lies == sharding or lies.device_set != sharding.device_set:
        return put(array, sharding)
    return _moves(sharding)(array)


def together(trained: Any, rest: Any) -> tuple[Any, Any]:
    """Trees of variables that one computation may take, where one may lie on the mesh and the other not: all arrays on
    a device of this process, if each process has all of them, else over the mesh."""
    arrays = [leaf for leaf in jax.tree.leaves((trained, rest)) if isinstance(leaf, jax.Array)]
    elsewhere = [array for array in arrays if not array.is_fully_addressable]
    if all(array.is_fully_replicated for array in elsewhere):
        own = {id(array): array.addressable_data(0) for array in elsewhere}
        return jax.tree.map(lambda leaf: own.get(id(leaf), leaf), (trained, rest))
    meshes = (array.sharding.mesh for array in elsewhere if isinstance(array.sharding, NamedSharding))
    mesh = next(mesh for mesh in meshes if isinstance(mesh, Mesh))
    return put(trained, shardings(trained, mesh)), put(rest, shardings(rest, mesh))


def own(tree: Any) -> list[Any]:
    """The tree; or, of one that lies over several processes, the floating-point parts of arrays that this one has."""
    leaves = jax.tree.leaves(tree)
    if all(leaf.is_fully_addressable for leaf in leaves):
        return [tree]
    floats = (leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating))
    return [shard.data for leaf in floats for shard in leaf.addressable_shards]


def on_host(array: Any) -> np.ndarray:
    """jax.device_get of an array of which each process may have a part; all processes of the mesh must ask for it. The
    copy is not kept with the array: one that lives on would be in host memory, too."""
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
    return jax.jit(lambda array: array, out_shardings=sharding)


# ---- rows


def _row_axes() -> tuple[str, ...]:
    """Axes that divide rows where this is traced: those of several devices inside `divided`."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in (DATA, FSDP) if axis in mesh.manual_axes and mesh.shape[axis] > 1)


def part_of_rows() -> jax.Array | int:
    """Which of the equal parts of a batch's rows this device has: int32[]."""
    axes = _row_axes()
    return jax.lax.axis_index(axes) if axes else 0


def total(sums: Any) -> Any:
    """Arrays that are sums over this device's rows, summed over all rows; Shards are so over `fsdp` already.

    For what is no sum over rows itself, such as a product of two. The gradient of the total is that of this device's
    share of it: as every device computes the same from the total, its gradients add up to the whole once.
    """
    return _total(sums) if _row_axes() else sums


def largest(value: jax.Array) -> jax.Array:
    """Of a value that is the largest of this device's rows, that of all rows. Without a gradient."""
    axes = _row_axes()
    value = jax.lax.stop_gradient(value)
    return jax.lax.pmax(value, axes) if axes else value


@jax.custom_vjp
def _total(sums):
    axes = _row_axes()

    def one(leaf):
        over = tuple(axis for axis in axes if axis != FSDP) if isinstance(leaf, Shard) else axes
        return jax.lax.psum(leaf, over) if over else leaf

    return jax.tree.map(one, sums, is_leaf=_is_shard)


_total.defvjp(lambda sums: (_total(sums), None), lambda _, gradients: (gradients,))


# ---- tensors


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shard:
    """An array of which each of `count` devices has an equal part along `axis`."""

    array: jax.Array
    axis: int = dataclasses.field(metadata=dict(static=True))
    count: int = dataclasses.field(metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array, as seen by a device that holds a part."""
        return tuple(size * self.count if axis == self.axis else size for axis, size in enumerate(self.array.shape))

    @property
    def dtype(self):
        return self.array.dtype

    @property
    def ndim(self) -> int:
        return self.array.ndim


def _is_shard(leaf: Any) -> bool:
    return isinstance(leaf, Shard)


def divide(tree: Any, mesh: Mesh | None) -> Any:
    """A tree of variables whose arrays are Shards where a device of the mesh has a part of them.

    Tensors of few bits are divided at whole blocks, scales beside their codes. What cannot be divided evenly is whole.
    """
    return _divided(tree, 1 if mesh is None else mesh.shape.get(FSDP, 1))


def which_are_divided(tree: Any, mesh: Mesh | None) -> list[bool]:
    """Of each array of a tree of variables, in order: whether a device of the mesh has a part of it."""
    return [_is_shard(leaf) for leaf in jax.tree.leaves(divide(tree, mesh), is_leaf=_is_shard)]


def held_bytes(tree: Any, fsdp: int) -> float:
    """Bytes that each of `fsdp` devices holds of a tree of variables, whose arrays may be abstract."""

    def one(leaf):
        size = float(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize)
        return size / leaf.count**2 if isinstance(leaf, Shard) else size  # a Shard's shape is of `count` such arrays

    return sum(map(one, jax.tree.leaves(_divided(tree, fsdp), is_leaf=_is_shard)))


def divided_sizes(tree: Any, fsdp: int) -> tuple[float, float]:
    """(bytes, elements) of the arrays of a tree of variables that `fsdp` devices divide, whole."""
    arrays = [shard.array for shard in shards(_divided(tree, fsdp))]  # only marked: nothing is cut here
    counts = [float(math.prod(array.shape)) for array in arrays]
    return sum(n * jnp.dtype(a.dtype).itemsize for n, a in zip(counts, arrays, strict=True)), sum(counts)


def _divided(tree: Any, count: int) -> Any:
    if count == 1:
        return tree

    def one(variable):
        if not isinstance(variable, nnx.Variable):
            return variable
        axes = _axes(variable, count)
        if axes is None:
            return variable
        leaves, structure = jax.tree.flatten(variable.get_value())
        parts = [leaf if axis is None else Shard(leaf, axis, count) for leaf, axis in zip(leaves, axes, strict=True)]
        return variable.replace(jax.tree.unflatten(structure, parts))

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _axes(variable: nnx.Variable, count: int) -> tuple[int | None, ...] | None:
    """Of each array of a variable's value, the axis that is divided into so many parts; None where nothing is."""
    names = variable.get_metadata().get("axes", ())
    axis = next((index for index, name in enumerate(names) if name in _DIVIDED), None)
    if axis is None:
        return None
    value = variable.get_value()
    if isinstance(value, Stored):
        return value.divided(axis, count)
    return (axis,) if value.shape[axis] % count == 0 else None


def held_whole(frozen: Any, resident: int, layers: int) -> Any:
    """A state of variables that do not train, those of the first `resident` of `layers` layers declared to be whole on
    each device; of all layers: those of embedding and head too (ResidualPlan.resident)."""
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
    """A tree of arrays that belong to those of `divided_tree`, as Shards where these are."""

    def one(leaf, array):
        return Shard(array, leaf.axis, leaf.count) if isinstance(leaf, Shard) else array

    return jax.tree.map(one, divided_tree, tree, is_leaf=_is_shard)


def undivided(tree: Any) -> Any:
    """The tree with arrays in place of Shards; of the parts that they are, not of whole arrays."""
    return jax.tree.map(lambda leaf: leaf.array if isinstance(leaf, Shard) else leaf, tree, is_leaf=_is_shard)


def specs(tree: Any) -> Any:
    """How the arrays of a tree from `divide` lie."""
    return _specs(tree, (), ())


def unsummed_specs(tree: Any) -> Any:
    """How sums that are not added up yet lie: an axis more in front, of one place for each device that has its own."""
    return _specs(tree, ((DATA, FSDP),), (DATA,))


def _specs(tree: Any, front: tuple, front_of_shards: tuple) -> Any:
    def one(leaf):
        if not isinstance(leaf, Shard):
            return PartitionSpec(*front)
        return Shard(PartitionSpec(*front_of_shards, *([None] * leaf.axis), FSDP), leaf.axis, leaf.count)  # type: ignore[arg-type]

    return jax.tree.map(one, tree, is_leaf=_is_shard)


def shardings(tree: Any, mesh: Mesh) -> Any:
    """How the arrays of a tree of variables lie on a mesh."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), undivided(specs(divide(tree, mesh))))


def require_undivided(states: Any, what: str) -> None:
    """Raises ValueError for states of a module of which a device holds a part only."""
    for leaf in jax.tree.leaves(states):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_replicated:
            raise ValueError(
                f"{what}: the model's weights are divided over {len(leaf.devices())} devices, as a run with mesh.fsdp "
                "leaves them: save the model and load it (from_pretrained), or train with mesh.fsdp=1"
            )


def states_shardings(opt_state: Any, trainable: Any, mesh: Mesh) -> Any:
    """How an optimizer's states lie, beside the tensors that they belong to: along the same axis where they have the
    tensor's shape, else (blocks of eight bits, factors) along their first one. The update is the same however they lie.
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
        return NamedSharding(mesh, PartitionSpec(*([None] * axis), FSDP))

    def is_like(tree):
        return jax.tree.structure(tree) == structure

    def one(tree):
        if not is_like(tree):
            return everywhere
        return jax.tree.unflatten(structure, list(map(beside, tensors, jax.tree.leaves(tree))))

    return jax.tree.map(one, opt_state, is_leaf=is_like)


def rows_of(variable: nnx.Variable, index: jax.Array, take: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """take(table, index) of a variable's array [n, ...], for index int32[...] in [0, n).

    A Shard of many rows is not gathered for a few of them: each device takes those that it has of all devices' rows,
    and is sent its own by the others. Differentiable as take is.
    """
    value = variable.get_value()
    if not isinstance(value, Shard):
        return take(variable[...], index)
    if value.axis != 0 or value.count * index.size > value.shape[0]:
        return take(_gathered(value), index)
    return _rows_of(take, value, index)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows_of(take, shard: Shard, index: jax.Array) -> jax.Array:
    return _rows_of_fwd(take, shard, index)[0]


def _rows_of_fwd(take, shard: Shard, index: jax.Array):
    size = shard.array.shape[0]
    all_index = jax.lax.all_gather(index, FSDP) - jax.lax.axis_index(FSDP) * size  # of all devices, from my first row
    mine = (all_index >= 0) & (all_index < size)
    rows, back = jax.vjp(lambda table: take(table, jnp.clip(all_index, 0, size - 1)), shard.array)
    mine = mine.reshape(*mine.shape, *[1] * (rows.ndim - mine.ndim))
    rows = jax.lax.psum_scatter(jnp.where(mine, rows, 0), FSDP)  # of each sum, one device has what is not zero
    return rows, (back, mine)


def _rows_of_bwd(take, residuals, gradient):
    back, mine = residuals
    (gradients,) = back(jnp.where(mine, jax.lax.all_gather(gradient, FSDP), 0))
    return Shard(gradients, 0, mine.shape[0]), None


_rows_of.defvjp(_rows_of_fwd, _rows_of_bwd)


def whole_beside(variable: nnx.Variable, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the array of a variable, whole, x), of a variable that is not needed before x is there: a Shard is gathered
    after x, and its gradient is scattered before x's goes on. XLA would hold both, whole, as long as it can
    make one collective of several."""
    value = variable.get_value()
    if not isinstance(value, Shard):
        return variable[...], x
    if isinstance(variable, nnx.Param):
        return _gathered_beside(value, x)
    value, _ = optimization_barrier((value, jax.lax.stop_gradient(x)))
    return gather(value), x


@jax.custom_vjp
def _gathered_beside(shard: Shard, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    shard, x = optimization_barrier((shard, x))
    return gather(shard), x


_gathered_beside.defvjp(
    lambda shard, x: (_gathered_beside(shard, x), shard),
    lambda shard, gradients: optimization_barrier((scatter(shard, gradients[0]), gradients[1])),
)


@jax.custom_vjp
def _gathered(shard: Shard) -> jax.Array:
    return gather(shard)


_gathered.defvjp(lambda shard: (gather(shard), shard), lambda shard, gradient: (scatter(shard, gradient),))


def gather(shard: Shard) -> jax.Array:
    """The whole array."""
    return jax.lax.all_gather(shard.array, FSDP, axis=shard.axis, tiled=True)


def scatter(shard: Shard, gradient: jax.Array) -> Shard:
    """This device's part of what is the sum, over `fsdp`, of gradients of a Shard's whole array; added in float32.

    One sum of two is rounded once however it is added: two devices send their gradients' own dtype, half the bytes.
    """
    wide = gradient if shard.count == 2 else gradient.astype(jnp.float32)
    total = jax.lax.psum_scatter(wide, FSDP, scatter_dimension=shard.axis, tiled=True)
    return Shard(total.astype(gradient.dtype), shard.axis, shard.count)


def shards(tree: Any) -> list[Shard]:
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_shard) if isinstance(leaf, Shard)]


def with_whole(tree: Any, arrays: Sequence[jax.Array]) -> Any:
    """The tree with the whole arrays of its Shards, which are in the order of `shards`."""
    coming = iter(arrays)
    return jax.tree.map(lambda leaf: next(coming) if isinstance(leaf, Shard) else leaf, tree, is_leaf=_is_shard)
