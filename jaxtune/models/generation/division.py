"""A sampler over the devices of a mesh: each decodes its own slots, and all run each program together.

Of weights that they divide, a prefill gathers a layer's while the layer before computes. A decoding step multiplies the
rows of all devices by each device's part of a weight, and sends the products back (exchanged.py), which is fewer bytes.
Of whole weights only what rows made is exchanged. Host code sees whole arrays.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.lax import optimization_barrier
from jax.sharding import Mesh, NamedSharding

from jaxtune.models.generation import slots as device
from jaxtune.models.generation.xla_options import prompt_options, sampler_options
from jaxtune.models.placement import collectives, partition
from jaxtune.models.placement.partition import AXES, ROWS, TENSORS, WHOLE, Shard
from jaxtune.models.programs.kept import Function
from jaxtune.pallas.decode.few_rows import MOST_ROWS
from jaxtune.pallas.one_order import exactly_if

_ALL = tuple(axis.name for axis in AXES)


@dataclasses.dataclass(frozen=True)
class Division:
    """How the devices of a mesh have a model, and share the rows of a sampler.

    axes: of each array, in the order of jax.tree.leaves, the axis along which it is divided, or None: each device has
      it whole; empty if that is so of all.
    """

    mesh: Mesh
    axes: tuple[int | None, ...]

    @staticmethod
    def of(leaves: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> Division | None:
        """By where the arrays are; None if they are on one device, or on no mesh of a run."""
        mesh = _mesh_of(leaves)
        return Division(mesh, _divided_axes(leaves)) if isinstance(mesh, Mesh) else None

    @property
    def devices(self) -> int:
        return self.mesh.size

    @property
    def spans_processes(self) -> bool:
        return jax.process_count() > 1

    @property
    def weights_are_whole(self) -> bool:
        """On each device."""
        return not self.axes

    def marked(self, leaves: Sequence[jax.Array]) -> list[jax.Array | Shard]:
        """The arrays, whole, of which the divided ones are Shards."""
        if self.weights_are_whole:
            return list(leaves)
        count = self.mesh.shape[TENSORS]
        pairs = zip(leaves, self.axes, strict=True)
        return [leaf if axis is None else Shard(leaf, axis, count) for leaf, axis in pairs]

    def put[T](self, tree: T) -> T:
        """Host arrays, or shapes of zeros, on the devices, which divide the first axis."""
        by_rows = NamedSharding(self.mesh, ROWS)

        def placed(leaf):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return partition.zeros(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=by_rows))
            return partition.put(leaf, by_rows)

        return jax.tree.map(placed, tree)

    def divides(self, rows: int) -> bool:
        """Whether the devices share so many rows; otherwise each has all."""
        return rows % self.devices == 0

    def rows_of(
        self, function: Callable[[list[jax.Array], jax.Array], list[jax.Array]], arrays: list[jax.Array], starts
    ) -> list[list[jax.Array]]:
        """function(arrays, start) of each row of arrays that have one on each device; all get all results.

        function: of [1, ...] arrays, to as many; the same object each time.
        starts: int32[devices].
        """
        return _rows_of(self.mesh, function)(arrays, starts)

    def programs(self, deterministic: bool, slots: int, exact: bool = False) -> device.Programs:
        """The programs of a sampler with `slots` slots a device. Others: as of slots.programs_of."""
        rows = slots if self.weights_are_whole else slots * self.mesh.shape[TENSORS]  # that a product of a step has
        return _programs(self, deterministic and jax.default_backend() == "gpu", rows > MOST_ROWS, exact)


@dataclasses.dataclass(frozen=True)
class Sharing:
    """How the devices that have a model share the rows of a sampler."""

    devices: int
    """That decode, each its own slots."""
    weights_are_whole: bool
    """On each device; others are not converted."""

    @staticmethod
    def of(model: nnx.Module) -> Sharing:
        """By where its arrays are, or its shapes will be."""
        leaves = jax.tree.leaves(nnx.state(model) if isinstance(model, nnx.Module) else model)
        mesh = _mesh_of(leaves)
        return Sharing(1, True) if mesh is None else Sharing(mesh.size, not _divided_axes(leaves))

    def slots(self, rows: int, most: int) -> int:
        """The most slots of a device, of which `most` are allowed, for so many rows on all."""
        return min(most, -(-rows // self.devices))


def _mesh_of(leaves: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> partition.AnyMesh | None:
    """The mesh of a run that has the arrays on several devices."""
    shardings = (getattr(leaf, "sharding", None) for leaf in leaves)
    meshes = (sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding))
    return next((mesh for mesh in meshes if mesh.size > 1 and set(mesh.axis_names) == set(_ALL)), None)


def _divided_axes(leaves: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> tuple[int | None, ...]:
    """Division.axes"""
    axes = tuple(map(_divided_axis, leaves))
    return axes if any(axis is not None for axis in axes) else ()


def _divided_axis(leaf: jax.Array | jax.ShapeDtypeStruct) -> int | None:
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    return next((axis for axis, name in enumerate(sharding.spec) if name in (TENSORS, (TENSORS,))), None)


@functools.lru_cache(16)
def _programs(division: Division, same_choices: bool, many_rows: bool, exact: bool) -> device.Programs:
    """As slots.programs, for all devices of a mesh."""
    has_gathers = not division.weights_are_whole and jax.default_backend() == "gpu"
    gathers = collectives.compiler_options() if has_gathers else {}
    of_steps = {**sampler_options(same_choices, many_rows), **gathers}
    of_prompts = {**prompt_options(same_choices), **gathers}
    over, mesh = _Over(division, same_choices), division.mesh

    def made(function: Callable, statics: int, donated: Sequence[int] = (), options=of_steps) -> Function:
        return Function(exactly_if(exact, function), statics, donated, options, mesh)

    return device.Programs(
        made(over.prefill, 2, options=of_prompts),
        made(over.pack, 2, options=of_prompts),
        made(over.extend, 1, (1,), of_prompts),
        made(over.insert, 0, (0,)),
        made(over.decode, 3, (1, 2, 3)),
        made(over.logits, 1, (1, 2)),
        made(over.choose, 2, (1, 2)),
        made(over.grow, 1),
        made(over.mark, 0, (0,)),
    )


@functools.lru_cache(16)
def _rows_of(mesh: Mesh, function: Callable) -> Callable[[list[jax.Array], np.ndarray], list[list[jax.Array]]]:
    """Of Division.rows_of."""

    def rows_of(arrays, starts):
        wholes = [jax.lax.all_gather(array, _ALL, tiled=True) for array in function(arrays, starts[0])]
        return [[whole[row : row + 1] for whole in wholes] for row in range(mesh.size)]

    return jax.jit(partition.divided(rows_of, mesh, (ROWS, ROWS), WHOLE))


class _Over:
    """The functions of slots.py over the devices of a mesh."""

    def __init__(self, division: Division, same_choices: bool):
        self._division, self._mesh, self._same_choices = division, division.mesh, same_choices

    def _run(self, function: Callable, in_specs: object, out_specs: object, *arguments):
        return partition.divided(function, self._mesh, in_specs, out_specs)(*arguments)

    def _rows(self, count: int):
        return ROWS if self._division.divides(count) else WHOLE

    def prefill(
        self, structure, capacity, leaves, tokens, lengths, totals, positions=None, pictures=None, adapters=None
    ):
        marked, rows = self._division.marked(leaves), self._rows(len(tokens))
        specs = partition.specs(marked), *[rows] * 6
        function = functools.partial(device.prefill, structure, capacity)
        return self._run(function, specs, rows, marked, tokens, lengths, totals, positions, pictures, adapters)

    def extend(self, structure, leaves, states, tokens, starts, counts, totals, adapters=None):
        marked, rows = self._division.marked(leaves), self._rows(len(tokens))
        specs = partition.specs(marked), *[rows] * 6
        function = functools.partial(device.extend, structure)
        return self._run(function, specs, rows, marked, states, tokens, starts, counts, totals, adapters)

    def pack(self, structure, width, leaves, tokens, starts, lengths, totals, adapters=None):
        marked, rows = self._division.marked(leaves), self._rows(len(tokens))
        specs = partition.specs(marked), *[rows] * 5
        function = functools.partial(device.pack, structure, width)
        return self._run(function, specs, rows, marked, tokens, starts, lengths, totals, adapters)

    def insert(self, states, staged, rows, slots):
        count = len(jax.tree.leaves(staged)[0])
        divides = self._division.divides(count)

        def local(states, staged, rows, slots):
            local_slots = self._own(slots, len(jax.tree.leaves(states)[0]))
            numbers = jnp.arange(len(rows), dtype=jnp.int32) if divides else rows
            # One more, as a lone row would be inserted whatever its slot.
            numbers, local_slots = (
                jnp.pad(array, (0, 1), constant_values=fill)
                for array, fill in ((numbers, 0), (local_slots, device.NEVER))
            )
            leaves, treedef = jax.tree.flatten(states)
            for index, array in enumerate(jax.tree.leaves(staged)):
                if index:
                    array, leaves[index - 1] = optimization_barrier((array, leaves[index - 1]))
                array = _sent_rows(array, rows) if divides else array
                leaves[index] = device.insert(leaves[index], array, numbers, local_slots)
            return jax.tree.unflatten(treedef, leaves)

        return self._run(local, (ROWS, self._rows(count), WHOLE, WHOLE), ROWS, states, staged, rows, slots)

    def decode(self, structure, kind, steps, leaves, states, live, seen, changed, new_live, rows):
        marked = self._division.marked(leaves)

        def local(leaves, *arrays):
            *results, emitted = device.decode(self._same_choices, structure, kind, steps, leaves, *arrays)
            return *results, _gathered(emitted)

        specs, results = (partition.specs(marked), *[ROWS] * 6), (ROWS, ROWS, ROWS, WHOLE)
        return self._run(local, specs, results, marked, states, live, seen, changed, new_live, rows)

    def logits(self, structure, leaves, states, live, changed, new_live, delta, adapter):
        marked = self._division.marked(leaves)
        function = functools.partial(device.logits, self._same_choices, structure)
        specs = partition.specs(marked), *[ROWS] * 6
        return self._run(function, specs, ROWS, marked, states, live, changed, new_live, delta, adapter)

    def choose(self, structure, kind, logits, live, seen, rows):
        def local(*arrays):
            *results, emitted = device.choose(structure, kind, *arrays)
            return *results, _gathered(emitted)

        return self._run(local, (ROWS,) * 4, (ROWS, ROWS, WHOLE), logits, live, seen, rows)

    def grow(self, shape, state):
        rows = self._rows(len(state))

        def local(array):
            return device.grown((len(array), *shape[1:]), array)

        return self._run(local, (rows,), rows, state)

    def mark(self, seen, slot, counts):
        def local(seen, slot, counts):
            return seen.at[self._own(slot, len(seen))].set(counts, mode="drop")

        return self._run(local, (ROWS, WHOLE, WHOLE), ROWS, seen, slot, counts)

    def _own(self, slots: jax.Array, count: int) -> jax.Array:
        """This device's numbers of slots, of `count` on each device; NEVER for those of others."""
        local_slots = slots - partition.row_shard_index() * count
        return jnp.where((local_slots >= 0) & (local_slots < count), local_slots, np.int32(device.NEVER))


def _sent_rows(array: jax.Array, rows: jax.Array) -> jax.Array:
    """[G, ...] on all devices: those rows of the array, int32[G], of which each device has as many."""
    local_rows = rows - partition.row_shard_index() * len(array)
    has = ((local_rows >= 0) & (local_rows < len(array))).reshape(-1, *[1] * (array.ndim - 1))
    numbers = array[jnp.clip(local_rows, 0, len(array) - 1)]
    if array.dtype.itemsize == 1:  # e4m3, in which devices may not be able to add
        numbers = jax.lax.bitcast_convert_type(numbers, jnp.uint8)
    nothing = -np.zeros((), numbers.dtype)  # -0 + x has the bits of x, also of -0
    sent = jax.lax.psum(jnp.where(has, numbers, nothing), _ALL)
    return jax.lax.bitcast_convert_type(sent, array.dtype)


def _gathered(emitted: device.Emitted) -> device.Emitted:
    """Of the slots of all devices."""
    tokens, logprobs, counts, ranked = emitted

    def whole(array: jax.Array, axis: int) -> jax.Array:
        return jax.lax.all_gather(array, _ALL, axis=axis, tiled=True)

    return whole(tokens, 1), whole(logprobs, 1), whole(counts, 0), jax.tree.map(lambda array: whole(array, 1), ranked)
