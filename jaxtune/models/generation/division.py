"""A sampler over devices that divide a model's weights: each decodes its own slots, and all run each program together.

A prefill gathers a layer's weights while the layer before computes. A decoding step multiplies the rows of all devices
by each device's part of a weight, and sends the products back (exchanged.py), which is fewer bytes. Host code sees
whole arrays.
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

_ALL = tuple(axis.name for axis in AXES)


@dataclasses.dataclass(frozen=True)
class Division:
    """Which arrays of a model the devices of a mesh divide.

    axes: of each array, in the order of jax.tree.leaves, the axis along which it is divided; None: each device has it
      whole.
    """

    mesh: Mesh
    axes: tuple[int | None, ...]

    @staticmethod
    def of(leaves: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> Division | None:
        """By where the arrays are; None if each device of this process has all of them whole, and there is no other."""
        mesh = _dividing_mesh(leaves)
        return Division(mesh, tuple(map(_divided_axis, leaves))) if isinstance(mesh, Mesh) else None

    @property
    def devices(self) -> int:
        return self.mesh.size

    @property
    def spans_processes(self) -> bool:
        return jax.process_count() > 1

    def marked(self, leaves: Sequence[jax.Array]) -> list[jax.Array | Shard]:
        """The arrays, whole, of which the divided ones are Shards."""
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

    def programs(self, deterministic: bool, slots: int) -> device.Programs:
        """The programs of a sampler with `slots` slots a device."""
        rows = slots * self.mesh.shape[TENSORS]  # that a product of a step has
        return _programs(self, deterministic and jax.default_backend() == "gpu", rows > MOST_ROWS)


@dataclasses.dataclass(frozen=True)
class Sharing:
    """How the devices that have a model share the rows of a sampler."""

    devices: int
    """That decode, each its own slots."""
    together: bool
    """Whether all run each program together, as by a Division; weights are then not converted."""

    @staticmethod
    def of(model: nnx.Module, copies: bool = False) -> Sharing:
        """By where its arrays are, or its shapes will be. copies: devices with whole weights share rows too
        (SamplerOfCopies)."""
        leaves = jax.tree.leaves(nnx.state(model) if isinstance(model, nnx.Module) else model)
        if (mesh := _dividing_mesh(leaves)) is not None:
            return Sharing(mesh.size, True)
        return Sharing(_device_count(leaves[0]) if copies else 1, False)

    def slots(self, rows: int, most: int) -> int:
        """The most slots of a device, of which `most` are allowed, for so many rows on all."""
        return min(most, -(-rows // self.devices))


def _device_count(leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return sharding.mesh.size
    return 1 if sharding is None else len(sharding.device_set)


def _dividing_mesh(leaves: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> partition.AnyMesh | None:
    """That of devices which must run together; None if each of this process has all arrays whole."""
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    named = (sharding for sharding in shardings if isinstance(sharding, NamedSharding))
    divides = (sharding for sharding in named if _axis_of(sharding) is not None or _is_of_several(sharding))
    return next((sharding.mesh for sharding in divides), None)


def _is_of_several(sharding: NamedSharding) -> bool:
    """Whether it is of devices of several processes."""
    return isinstance(sharding.mesh, Mesh) and not sharding.is_fully_addressable


def _divided_axis(leaf: jax.Array | jax.ShapeDtypeStruct) -> int | None:
    sharding = getattr(leaf, "sharding", None)
    return _axis_of(sharding) if isinstance(sharding, NamedSharding) else None


def _axis_of(sharding: NamedSharding) -> int | None:
    return next((axis for axis, name in enumerate(sharding.spec) if name in (TENSORS, (TENSORS,))), None)


@functools.lru_cache(16)
def _programs(division: Division, same_choices: bool, many_rows: bool) -> device.Programs:
    """As slots.programs, for all devices of a mesh."""
    gathers = collectives.compiler_options() if jax.default_backend() == "gpu" else {}
    of_steps = {**sampler_options(same_choices, many_rows), **gathers}
    of_prompts = {**prompt_options(same_choices), **gathers}
    over, mesh = _Over(division, same_choices), division.mesh

    def made(function: Callable, statics: int, donated: Sequence[int] = (), options=of_steps) -> Function:
        return Function(function, statics, donated, options, mesh)

    return device.Programs(
        made(over.prefill, 2, options=of_prompts),
        made(over.pack, 2),
        made(over.extend, 1, (1,), of_prompts),
        made(over.insert, 0, (0,)),
        made(over.decode, 3, (1, 2, 3)),
        made(over.logits, 1, (1, 2)),
        made(over.choose, 2, (1, 2)),
        made(over.grow, 1),
        made(over.mark, 0, (0,)),
    )


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

    def pack(self, *_):
        raise NotImplementedError("prompts are packed for one device")

    def insert(self, states, staged, rows, slots):
        count = len(jax.tree.leaves(staged)[0])
        divides = self._division.divides(count)

        def local(states, staged, rows, slots):
            local_slots = self._own(slots, len(jax.tree.leaves(states)[0]))
            rows, local_slots = (
                jnp.pad(array, (0, 1), constant_values=fill) for array, fill in ((rows, 0), (local_slots, device.NEVER))
            )
            leaves, treedef = jax.tree.flatten(states)
            for index, array in enumerate(jax.tree.leaves(staged)):
                if index:
                    array, leaves[index - 1] = optimization_barrier((array, leaves[index - 1]))
                array = jax.lax.all_gather(array, _ALL, tiled=True) if divides else array
                leaves[index] = device.insert(leaves[index], array, rows, local_slots)
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


def _gathered(emitted: device.Emitted) -> device.Emitted:
    """Of the slots of all devices."""
    tokens, logprobs, counts, ranked = emitted

    def whole(array: jax.Array, axis: int) -> jax.Array:
        return jax.lax.all_gather(array, _ALL, axis=axis, tiled=True)

    return whole(tokens, 1), whole(logprobs, 1), whole(counts, 0), jax.tree.map(lambda array: whole(array, 1), ranked)
