"""How the gradients of a step are added over devices: in float32, or quantised (`mesh.gradient_sync`). `GradientSync`
is a quantised sync, which `gradient_sync_of` makes as the config asks; a `Buffer` says which tensors it adds in one
sum; `as_saved` and `fitted` read its errors from a checkpoint of another mesh or format.

A quantised sync sends numbers in a low format (models/placement/low_format.py) in both legs of the sum. With error
feedback (arXiv 1901.09847) each device keeps what rounding took from the numbers that it sent, and adds it to what it
sends in the next step. These errors are part of the train state, in bfloat16. They are errors of the mean gradient, so
that they stay right when the number of targets or the loss scale changes.

Adam divides each gradient by its own usual size, so that errors which are small beside the largest gradient of a block
may be large beside others. In int4 each device therefore also keeps the usual sizes of the summed gradients, the same
on all devices: roots of running means of squares as Adam's own, by which numbers are weighted before they are encoded
(low_format.weights_in_blocks).

Tensors that are whole on each device are added over all devices, and those that `fsdp` divides over `data`, once a step
in the update. Small tensors are joined to buffers, so that there are few collectives. The sums over `fsdp` of divided
tensors are made in the backward of each micro-batch (gathers.scatter), always rounded stochastically, as their errors
would be a whole gradient on each device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import optimization_barrier

from jaxtune.models.placement import low_format, partition
from jaxtune.models.placement.low_format import SyncFormat
from jaxtune.models.placement.partition import MeshShape
from jaxtune.train.config import MeshConfig

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
    """Gradients that are added over devices in one sum: tensor after tensor, each with zeros up to a whole number of
    blocks, so that no block has numbers of two tensors; then zeros. A block is low_format.BLOCK (64) numbers, the least
    that are encoded alone. `GradientSync.buffers` makes them."""

    tensors: tuple[int, ...]
    """The positions of the tensors among the leaves of the trained tensors."""
    numbers: int
    """How many numbers all tensors have on a device, with the zeros behind each."""
    axes: tuple[str, ...]
    """The mesh axes over which they are added."""
    devices: int
    """The number of devices along `axes`."""

    @property
    def part(self) -> int:
        """How many numbers each of the devices adds up, for itself and the others: its equal part of the buffer, a
        multiple of a block (low_format.BLOCK numbers), because each block is encoded with scales of its own."""
        return -(-self.numbers // (self.devices * low_format.BLOCK)) * low_format.BLOCK

    @property
    def size(self) -> int:
        """How many numbers the whole buffer has, the zeros at its end included: `part` for each of the devices. Each
        device pads the joined gradients to it, and with error feedback keeps as many errors of what it sends."""
        return self.part * self.devices


@dataclasses.dataclass(frozen=True)
class GradientSync:
    """A quantised sync of gradients: how the devices exchange their gradients in a low format, so that they are added.
    The step's update calls `added`; the train state has the errors, `first_errors` at the start; `bytes_on_device` is
    for the planner."""

    format: SyncFormat
    """The format in which devices exchange gradients: "bf16", "int8" or "int4"."""
    feedback: bool
    """True: the errors of rounding are kept, and added to what is sent in the next step. False: numbers are rounded
    stochastically."""

    def __str__(self) -> str:
        """The sync in words, as the first screen and the record of a run say it, for example "sent in int8 with error
        feedback". In the records of older versions, whose int4 had equal steps, "quadratic" is missing before
        "int4"."""
        format = "quadratic int4" if self.format == "int4" else self.format
        return f"sent in {format} {'with error feedback' if self.feedback else 'with stochastic rounding'}"

    @staticmethod
    def buffers(tensors: Sequence[tuple[int, bool]], shape: MeshShape) -> list[Buffer]:
        """The buffers in which a mesh of this shape adds gradients: first those of whole tensors, then those of divided
        ones, each kind in the tensors' order. A buffer has at most 2**24 numbers, unless its only tensor has more. A
        kind that is on one device along its axes has none. `added` and `error_sizes` both make them, so that each
        buffer has errors. tensors: for each of the trained ones (the numbers of it that a device has, whether `fsdp`
        divides it)."""
        names = tuple(axis.name for axis in partition.AXES)
        rest = tuple(name for name in names if name != partition.TENSORS)
        found: list[Buffer] = []
        for kind, axes, devices in ((False, names, shape.size), (True, rest, shape.copies)):
            joined: list[int] = []
            numbers = 0
            for index, (size, is_divided) in enumerate(tensors):
                if is_divided != kind or devices == 1:
                    continue
                size += -size % low_format.BLOCK
                if joined and numbers + size > _JOINED:
                    found.append(Buffer(tuple(joined), numbers, axes, devices))
                    joined, numbers = [], 0
                joined.append(index)
                numbers += size
            if joined:
                found.append(Buffer(tuple(joined), numbers, axes, devices))
        return found

    def error_sizes(self, trainable, shape: MeshShape) -> dict[str, list[int]]:
        """How many errors each device keeps: of the gradients that it sends ("sent") and of the sums that it makes
        ("summed"), and in int4 of the sums' usual sizes ("usual"), each as a list with one number for each buffer; {}
        without error feedback or with one device. The first errors, the planner's bytes, and the shapes of the errors
        in a checkpoint (`as_saved`) follow from it. trainable: the trained tensors, which may be abstract. shape: the
        mesh's."""
        if not self.feedback or shape.size == 1:
            return {}
        leaves = jax.tree.leaves(partition.divided_into(trainable, shape.parts), is_leaf=_is_shard)
        whole = [leaf.array if _is_shard(leaf) else leaf for leaf in leaves]  # the Shards are of whole arrays
        sizes = [math.prod(array.shape) for array in whole]
        divided = [_is_shard(leaf) for leaf in leaves]
        tensors = [(n // shape.parts if cut else n, cut) for n, cut in zip(sizes, divided, strict=True)]
        buffers = self.buffers(tensors, shape)
        sizes = {"sent": [b.size for b in buffers], "summed": [b.part for b in buffers]}
        return sizes | ({"usual": sizes["sent"]} if self.format == "int4" else {})

    def first_errors(self, trainable, shape: MeshShape) -> dict[str, list[jax.Array]]:
        """The errors with which a run starts, by the names of `error_sizes`: lists of zeros bfloat16[devices, n], one
        for each buffer; {} without error feedback or with one device. StepProgram.init puts them into the train
        state. trainable: the trained tensors. shape: the mesh's."""
        sizes = self.error_sizes(trainable, shape)
        return {name: [jnp.zeros((shape.size, n), ERRORS) for n in one] for name, one in sizes.items()}

    def bytes_on_device(self, trainable, shape: MeshShape) -> tuple[float, float]:
        """(bytes of the errors that a device keeps, bytes that the update takes on a GPU for the new errors and for
        buffers while they are encoded, exchanged and decoded), for the planner. The sums take no memory of their own,
        because they replace the gradients that are added. trainable: the trained tensors, which may be abstract. shape:
        the mesh's."""
        sizes = self.error_sizes(trainable, shape)
        kept = sum(map(sum, sizes.values())) * float(jnp.dtype(ERRORS).itemsize)
        every = dataclasses.replace(self, feedback=True).error_sizes(trainable, shape).get("sent", [])
        return kept, kept + _UPDATE_BYTES[self.format] * sum(sorted(every)[-2:])

    def added(self, gradients, errors, shape: MeshShape, unit: jax.Array, key: jax.Array):
        """Adds the gradients of all devices: (their sums, the errors of this step, {} if `errors` is). It is called by
        the update in a function that `partition.divided` runs on each device.

        Args:
          gradients: this device's sums, a tree in which those that `fsdp` divides are Shards of this device's parts,
            summed over `fsdp` already, so that they are added over `data` alone. The result has the same tree and
            dtypes.
          errors: those of the step before, [n] arrays of this device, as in `first_errors`; {} without error feedback.
          shape: of the mesh.
          unit: float32[], by which the mean gradient is multiplied in `gradients`.
          key: of this step, from which stochastic rounding draws.
        """
        leaves, structure = jax.tree.flatten(gradients, is_leaf=_is_shard)
        arrays = [leaf.array if _is_shard(leaf) else leaf for leaf in leaves]
        new: dict[str, list[jax.Array]] = {name: [] for name in errors}
        seed = None if self.feedback else jax.random.key_data(jax.random.fold_in(key, partition.part_of_rows()))
        tensors = [(array.size, _is_shard(leaf)) for leaf, array in zip(leaves, arrays, strict=True)]
        buffers = self.buffers(tensors, shape)
        for index, buffer in enumerate(buffers):
            its = [arrays[i] for i in buffer.tensors]
            kept = {name: of_buffers[index] for name, of_buffers in errors.items()}
            if index > 1:  # it waits for the buffer before the last, so that two are on their way at a time
                before = buffers[index - 2].tensors
                results = [arrays[i] for i in before], {name: of_buffers[index - 2] for name, of_buffers in new.items()}
                (its, kept), (summed, lost) = optimization_barrier(((its, kept), results))
                for i, array in zip(before, summed, strict=True):
                    arrays[i] = array
                for name, of_buffer in lost.items():
                    new[name][index - 2] = of_buffer
            its, lost = self._added(buffer, its, kept, unit, seed, 2 * index)
            for i, array in zip(buffer.tensors, its, strict=True):
                arrays[i] = array
            for name, of_buffer in lost.items():
                new[name].append(of_buffer)
        done = [
            dataclasses.replace(leaf, array=array) if _is_shard(leaf) else array
            for leaf, array in zip(leaves, arrays, strict=True)
        ]
        return jax.tree.unflatten(structure, done), new

    def _added(self, buffer: Buffer, tensors: list[jax.Array], errors, unit: jax.Array, seed, stream: int):
        """Adds the tensors of one buffer over all devices, for `added`: (their sums, in their shapes and dtypes, the
        errors of this step).

        Args:
          buffer: says which devices add.
          tensors: this device's, in the buffer's order.
          errors: {name: those of the step before for this buffer}; {} without error feedback.
          unit: float32[], by which the mean gradient is multiplied in `tensors`.
          seed: uint32[2], from which stochastic rounding draws; None: numbers are rounded to the nearest.
          stream: of the random numbers of the sum's first leg; the second has the next one.
        """
        flat = [one.reshape(-1).astype(jnp.float32) for one in tensors]
        mine = jnp.concatenate([jnp.pad(one, (0, -one.size % low_format.BLOCK)) for one in flat])
        mine = jnp.pad(mine, (0, buffer.size - buffer.numbers))
        new: dict[str, jax.Array] = {}
        if errors:
            mine += errors["sent"].astype(jnp.float32) * unit
        weights = own = 1.0
        if "usual" in errors:
            weights = low_format.weights_in_blocks(errors["usual"].astype(jnp.float32))
            own = weights.reshape(buffer.devices, buffer.part)[jax.lax.axis_index(buffer.axes)]
            mine /= weights
        parts = mine.reshape(buffer.devices, buffer.part)
        part, lost = low_format.reduce_scatter(parts, buffer.axes, self.format, seed, stream)
        if errors:
            new["sent"] = (lost.reshape(-1) * weights / unit).astype(ERRORS)
            part += errors["summed"].astype(jnp.float32) * unit / own
        whole, lost = low_format.all_gather(part, buffer.axes, self.format, seed, stream + 1)
        if errors:
            new["summed"] = (lost * own / unit).astype(ERRORS)
        whole, start, sums = whole.reshape(-1) * weights, 0, []
        if "usual" in errors:
            squares = jnp.square(errors["usual"].astype(jnp.float32))
            squares += (1 - _DECAY) * (jnp.square(whole / unit) - squares)
            new["usual"] = jnp.sqrt(squares).astype(ERRORS)
        for one in tensors:
            sums.append(whole[start : start + one.size].reshape(one.shape).astype(one.dtype))
            start += one.size + -one.size % low_format.BLOCK
        return sums, new


def gradient_sync_of(mesh: MeshConfig | None) -> GradientSync | None:
    """The quantised sync that the config's section `mesh` asks for; None if gradients are exchanged in float32, also
    without this section. It does not look at the number of devices; StepProgram.sync does. The step's program takes it,
    and the planner's costs."""
    if mesh is None or mesh.gradient_sync == "fp32":
        return None
    return GradientSync(mesh.gradient_sync, mesh.gradient_rounding == "error_feedback")


def as_saved(like, saved: Mapping):
    """The shapes with which the state of a checkpoint is read, because its errors of error feedback (`sync_errors`,
    what rounding took from the gradients that each device sent) may have other shapes than this run's; `fitted` then
    makes the state that was read fit the run. Trainer calls both when it resumes, this one before arrays are read.

    Args:
      like: the shapes, with shardings, of this run's TrainState; or {"trainable": weights}, which is returned as it is.
      saved: the checkpoint's record.
    Returns:
      `like`, but if the checkpoint's run kept errors on another mesh, or in other buffers, or only one of the two runs
        keeps errors, with `sync_errors` as they were saved ({} if there are none) and without shardings, by which
        `fitted` knows them.
    """
    if isinstance(like, dict):
        return like
    mesh, shape = saved["config"].get("mesh") or {}, MeshShape.from_record(saved["numerics"])
    sizes: dict[str, list[int]] = {}
    if mesh.get("gradient_sync", "fp32") != "fp32" and mesh["gradient_rounding"] == "error_feedback":
        sync = GradientSync(mesh["gradient_sync"], True)
        sizes = sync.error_sizes(like.trainable, shape)
        if str(sync) not in saved["numerics"]["gradients"]:  # an older version's int4, which had no usual sizes
            sizes.pop("usual", None)
    errors = {name: [jax.ShapeDtypeStruct((shape.size, n), ERRORS) for n in one] for name, one in sizes.items()}
    leaf = next(iter(jax.tree.leaves(like.sync_errors)), None)
    here = leaf is not None and MeshShape.of(leaf.sharding.mesh) == shape
    same = jax.tree.map(jnp.shape, errors) == jax.tree.map(jnp.shape, like.sync_errors)
    return like if same and (here or not sizes) else dataclasses.replace(like, sync_errors=errors)


def fitted(state, like, note: Callable[[list[str]], object]):
    """A state that was read with the shapes of `as_saved`, with errors of error feedback (`sync_errors`: what rounding
    took from the gradients that each device sent) that this run can use. It is returned as it is if neither run has
    errors, if they are on this mesh with the arrays that this format has (those of bf16 and int8 are alike), or if it
    has weights alone (a dict). Otherwise this run's errors start from zero, or are left out if it keeps none. Trainer
    calls it when it resumes. Nothing but the errors is changed, and no run is refused for them.

    Args:
      state: the state that was read.
      like: the shapes of this run's state, with shardings.
      note: called with a list of a sentence on what became of the errors, if they are replaced.
    """
    if isinstance(state, dict) or not (jax.tree.leaves(state.sync_errors) or jax.tree.leaves(like.sync_errors)):
        return state
    if jax.tree.structure(state.sync_errors) == jax.tree.structure(like.sync_errors):
        pairs = zip(*map(jax.tree.leaves, (state.sync_errors, like.sync_errors)), strict=True)
        if all(leaf.sharding == wanted.sharding for leaf, wanted in pairs):
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
    """Whether a leaf of a tree is a partition.Shard: the part that this device has of a tensor that `fsdp` divides. The
    buffers treat those apart from whole tensors, and jax.tree takes it as `is_leaf`, so that a Shard is not opened."""
    return isinstance(leaf, partition.Shard)
