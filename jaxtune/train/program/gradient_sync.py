"""How the gradients of a step are added over devices: in float32, or quantised (`mesh.gradient_sync`).

A quantised sync sends a low format in both legs of the sum. With error feedback (arXiv 1901.09847) each device keeps,
in bfloat16, what rounding took, and sends it with the next step. The errors are of the mean gradient, so that they hold
when targets or loss scale change.

Adam divides each gradient by its usual size, so errors small beside a block's largest may be large beside others. In
int4 each device also keeps usual sizes (roots of running means of squares), by which numbers are weighted before
encoding.

Whole tensors are added over all devices, those that `fsdp` divides over `data`, once a step. Sums over `fsdp` are made
in each backward (gathers.scatter), rounded stochastically, as errors would be a whole gradient on each device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import optimization_barrier

from jaxtune.models.placement import low_format, partition
from jaxtune.models.placement.low_format import SyncFormat
from jaxtune.models.placement.partition import MeshShape
from jaxtune.train.config import MeshConfig
from jaxtune.train.folder.translations import Flat, section

# Tensors are joined to buffers of up to this many numbers; a larger tensor has a buffer of its own.
_JOINED = 1 << 24
ERRORS = jnp.bfloat16  # the dtype in which errors and usual sizes are kept
_DECAY = 0.99  # of the running means of squares: a smaller change a step would be less than bfloat16 can keep
# Bytes that the update takes for each number of the two buffers that are on their way at a time, beside the new errors.
# XLA's compiler takes up to 3.1 in bf16, 1.7 in int8 and 4.7 in int4 of the largest buffer, for two H200s (Llama 3.2 1B
# with 2 layers, whose largest buffer, the embedding, is two thirds of all numbers).
_UPDATE_BYTES = {"bf16": 4.0, "int8": 4.0, "int4": 6.0}


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Gradients that are added in one sum: tensor after tensor, each padded with zeros to whole blocks of 64 numbers
    (low_format.BLOCK), so that no block mixes tensors.
    """

    tensors: tuple[int, ...]
    """Positions among the trained leaves."""
    numbers: int
    """Of all tensors on a device, padding included."""
    axes: tuple[str, ...]
    """Mesh axes over which they are added."""
    devices: int
    """Along `axes`."""

    @property
    def part(self) -> int:
        """Numbers that each device adds up: an equal share, a multiple of a block."""
        return -(-self.numbers // (self.devices * low_format.BLOCK)) * low_format.BLOCK

    @property
    def size(self) -> int:
        """Numbers of the padded buffer, and of a device's errors of what it sends."""
        return self.part * self.devices


@dataclasses.dataclass(frozen=True)
class GradientSync:
    """A quantised sync: devices exchange their gradients in a low format."""

    format: SyncFormat
    """"bf16", "int8" or "int4"."""
    feedback: bool
    """False: numbers are rounded stochastically."""

    def __str__(self) -> str:
        format = "quadratic int4" if self.format == "int4" else self.format
        return f"sent in {format} {'with error feedback' if self.feedback else 'with stochastic rounding'}"

    @staticmethod
    def buffers(tensors: Sequence[tuple[int, bool]], shape: MeshShape) -> list[Buffer]:
        """Whole tensors' buffers, then divided ones', of at most 2**24 numbers or one larger tensor. tensors: (numbers
        on a device, whether `fsdp` divides it) of each.
        """
        names = tuple(axis.name for axis in partition.AXES)
        other_axes = tuple(name for name in names if name != partition.TENSORS)
        buffers: list[Buffer] = []
        for kind, axes, devices in ((False, names, shape.size), (True, other_axes, shape.copies)):
            joined: list[int] = []
            numbers = 0
            for index, (size, is_divided) in enumerate(tensors):
                if is_divided != kind or devices == 1:
                    continue
                size += -size % low_format.BLOCK
                if joined and numbers + size > _JOINED:
                    buffers.append(Buffer(tuple(joined), numbers, axes, devices))
                    joined, numbers = [], 0
                joined.append(index)
                numbers += size
            if joined:
                buffers.append(Buffer(tuple(joined), numbers, axes, devices))
        return buffers

    def error_sizes(self, trainable, shape: MeshShape) -> dict[str, list[int]]:
        """{"sent", "summed" and, in int4, "usual": numbers that a device keeps for each buffer}; {} without error
        feedback or with one device. trainable: may be abstract.
        """
        if not self.feedback or shape.size == 1:
            return {}
        leaves = jax.tree.leaves(partition.divided_into(trainable, shape.shard_count), is_leaf=_is_shard)
        arrays = [leaf.array if _is_shard(leaf) else leaf for leaf in leaves]  # the Shards are of whole arrays
        sizes = [math.prod(array.shape) for array in arrays]
        divided = [_is_shard(leaf) for leaf in leaves]
        tensors = [
            (n // shape.shard_count if is_divided else n, is_divided)
            for n, is_divided in zip(sizes, divided, strict=True)
        ]
        buffers = self.buffers(tensors, shape)
        sizes = {"sent": [b.size for b in buffers], "summed": [b.part for b in buffers]}
        return sizes | ({"usual": sizes["sent"]} if self.format == "int4" else {})

    def first_errors(self, trainable, shape: MeshShape) -> dict[str, list[jax.Array]]:
        """Zeros bfloat16[devices, n] for each buffer, by the names of `error_sizes`."""
        sizes = self.error_sizes(trainable, shape)
        return {name: [jnp.zeros((shape.size, n), ERRORS) for n in counts] for name, counts in sizes.items()}

    def bytes_on_device(self, trainable, shape: MeshShape) -> tuple[float, float]:
        """(bytes of the errors on a device, bytes that the update takes for new errors and buffers). The sums replace
        the gradients, and take none.
        """
        sizes = self.error_sizes(trainable, shape)
        error_bytes = sum(map(sum, sizes.values())) * float(jnp.dtype(ERRORS).itemsize)
        every = dataclasses.replace(self, feedback=True).error_sizes(trainable, shape).get("sent", [])
        return error_bytes, error_bytes + _UPDATE_BYTES[self.format] * sum(sorted(every)[-2:])

    def added(self, gradients, errors, shape: MeshShape, unit: jax.Array, key: jax.Array):
        """(sums of all devices' gradients, new errors), within `partition.divided`.

        gradients: this device's; divided ones are Shards, summed over `fsdp` already. The result has the same tree
        and dtypes.
        errors: the last step's, [n] arrays of this device.
        unit: float32[], the factor of the mean gradient in `gradients`.
        key: of this step, for stochastic rounding.
        shape: the mesh's.
        """
        leaves, structure = jax.tree.flatten(gradients, is_leaf=_is_shard)
        arrays = [leaf.array if _is_shard(leaf) else leaf for leaf in leaves]
        new: dict[str, list[jax.Array]] = {name: [] for name in errors}
        seed = None if self.feedback else jax.random.key_data(jax.random.fold_in(key, partition.row_shard_index()))
        tensors = [(array.size, _is_shard(leaf)) for leaf, array in zip(leaves, arrays, strict=True)]
        buffers = self.buffers(tensors, shape)
        for index, buffer in enumerate(buffers):
            its = [arrays[i] for i in buffer.tensors]
            buffer_errors = {name: of_buffers[index] for name, of_buffers in errors.items()}
            if index > 1:  # it waits for the buffer before the last, so that two are on their way at a time
                before = buffers[index - 2].tensors
                results = [arrays[i] for i in before], {name: of_buffers[index - 2] for name, of_buffers in new.items()}
                (its, buffer_errors), (summed, lost) = optimization_barrier(((its, buffer_errors), results))
                for i, array in zip(before, summed, strict=True):
                    arrays[i] = array
                for name, of_buffer in lost.items():
                    new[name][index - 2] = of_buffer
            its, lost = self._added(buffer, its, buffer_errors, unit, seed, 2 * index)
            for i, array in zip(buffer.tensors, its, strict=True):
                arrays[i] = array
            for name, of_buffer in lost.items():
                new[name].append(of_buffer)
        summed_leaves = [
            dataclasses.replace(leaf, array=array) if _is_shard(leaf) else array
            for leaf, array in zip(leaves, arrays, strict=True)
        ]
        return jax.tree.unflatten(structure, summed_leaves), new

    def _added(self, buffer: Buffer, tensors: list[jax.Array], errors, unit: jax.Array, seed, stream: int):
        """`added` for one buffer. seed: uint32[2]; None: round to nearest. stream: of the first leg's
        random numbers.
        """
        flat = [tensor.reshape(-1).astype(jnp.float32) for tensor in tensors]
        mine = jnp.concatenate([jnp.pad(tensor, (0, -tensor.size % low_format.BLOCK)) for tensor in flat])
        mine = jnp.pad(mine, (0, buffer.size - buffer.numbers))
        new: dict[str, jax.Array] = {}
        if errors:
            mine += errors["sent"].astype(jnp.float32) * unit
        weights = shard_weights = 1.0
        if "usual" in errors:
            weights = low_format.weights_in_blocks(errors["usual"].astype(jnp.float32))
            shard_weights = weights.reshape(buffer.devices, buffer.part)[jax.lax.axis_index(buffer.axes)]
            mine /= weights
        shards = mine.reshape(buffer.devices, buffer.part)
        shard, lost = low_format.reduce_scatter(shards, buffer.axes, self.format, seed, stream)
        if errors:
            new["sent"] = (lost.reshape(-1) * weights / unit).astype(ERRORS)
            shard += errors["summed"].astype(jnp.float32) * unit / shard_weights
        total, lost = low_format.all_gather(shard, buffer.axes, self.format, seed, stream + 1)
        if errors:
            new["summed"] = (lost * shard_weights / unit).astype(ERRORS)
        total, start, sums = total.reshape(-1) * weights, 0, []
        if "usual" in errors:
            squares = jnp.square(errors["usual"].astype(jnp.float32))
            squares += (1 - _DECAY) * (jnp.square(total / unit) - squares)
            new["usual"] = jnp.sqrt(squares).astype(ERRORS)
        for tensor in tensors:
            sums.append(total[start : start + tensor.size].reshape(tensor.shape).astype(tensor.dtype))
            start += tensor.size + -tensor.size % low_format.BLOCK
        return sums, new


def gradient_sync_of(mesh: MeshConfig | None) -> GradientSync | None:
    """The quantised sync of the config, whatever the number of devices; None: float32."""
    if mesh is None or mesh.gradient_sync == "fp32":
        return None
    return GradientSync(mesh.gradient_sync, mesh.gradient_rounding == "error_feedback")


def as_saved(like, saved: Flat):
    """`like`, this run's state as shapes, with `sync_errors` as the checkpoint's record says, so that it can be read;
    errors of another mesh or format have no shardings, by which `fitted` knows them.
    """
    if isinstance(like, dict):
        return like
    mesh, shape = section(saved, "config.mesh"), MeshShape.from_record(section(saved, "numerics"))
    sizes: dict[str, list[int]] = {}
    if mesh.get("gradient_sync", "fp32") != "fp32" and mesh["gradient_rounding"] == "error_feedback":
        sizes = GradientSync(mesh["gradient_sync"], True).error_sizes(like.trainable, shape)
    errors = {name: [jax.ShapeDtypeStruct((shape.size, n), ERRORS) for n in counts] for name, counts in sizes.items()}
    leaf = next(iter(jax.tree.leaves(like.sync_errors)), None)
    on_this_mesh = leaf is not None and MeshShape.of(leaf.sharding.mesh) == shape
    same_shapes = jax.tree.map(jnp.shape, errors) == jax.tree.map(jnp.shape, like.sync_errors)
    return like if same_shapes and (on_this_mesh or not sizes) else dataclasses.replace(like, sync_errors=errors)


def fitted(state, like, note: Callable[[list[str]], object]):
    """A state read by `as_saved`, with errors that this run can use; those of another mesh or format start from zero,
    and `note` gets [a sentence]. like: shapes of this run's state.
    """
    if isinstance(state, dict) or not (jax.tree.leaves(state.sync_errors) or jax.tree.leaves(like.sync_errors)):
        return state
    if jax.tree.structure(state.sync_errors) == jax.tree.structure(like.sync_errors):
        pairs = zip(*map(jax.tree.leaves, (state.sync_errors, like.sync_errors)), strict=True)
        if all(leaf.sharding == like_leaf.sharding for leaf, like_leaf in pairs):
            return state
        text = "mesh.gradient_sync: the errors in the checkpoint are of another mesh; error feedback starts from zero"
    elif state.sync_errors and like.sync_errors:
        text = "mesh.gradient_sync: the errors in the checkpoint are of another format; error feedback starts from zero"
    elif state.sync_errors:
        text = "mesh.gradient_sync: the errors of error feedback in the checkpoint are not used"
    else:
        text = "mesh.gradient_sync: the checkpoint has no errors; error feedback starts from zero"
    zeros = jax.tree.map(lambda a: partition.put(np.zeros(a.shape, a.dtype), a.sharding), like.sync_errors)
    note([text])
    return dataclasses.replace(state, sync_errors=zeros)


def _is_shard(leaf) -> bool:
    return isinstance(leaf, partition.Shard)
