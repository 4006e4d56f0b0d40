"""Schedules the gathers of divided weights and the scatters of their gradients while another layer computes
(`CollectiveSchedule`); `compiler_options` are the options of XLA that this needs, and `first_exchange` connects the
devices before the first step.

Each is bound by optimization_barriers to a window of stages (segments of that layer), as copies to and from the host
are (transfers.py). Beside a layer, the weights of the layer that runs next are gathered, and in the backward the
gradients of the layer whose backward has just ended are scattered. XLA combines all collectives that start at the same
place into one (`compiler_options`), which is asynchronous and overlaps with the window's products. Where XLA's
scheduler chose the place, the backward's gathers overlapped with only two thin products.

What did not help: copies from GPU to GPU instead of a gather's kernels, which take multiprocessors from the products
(collective-permute in XLA's peer-memory mode, and one kernel that joins the parts). On two H200s a step of 8B LoRA took
968 ms with them and 965 ms without: products and attention took 13 ms less and 4 ms less were waited for, but joining
the parts took 14 ms, and the device was idle for 6 ms more."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier
from jax.sharding import Mesh, NamedSharding

from jaxtune.models.placement.gathers import gather, scatter
from jaxtune.models.placement.partition import AXES, WHOLE, Shard, compiling, divided

# XLA may combine up to this many bytes of gathered weights, or of float32 gradients, into one collective.
_COMBINED_BYTES = 8 << 30


def compiler_options() -> dict[str, Any]:
    """The options of XLA, {name: value}, with which a program for GPUs that gathers divided weights is compiled;
    train/program/xla_options.py adds them to the others of a run. They turn on the latency-hiding scheduler, and
    combine all gathers, and all scatters, that start at the same place in the program into one, up to 8 GiB.

    On two H200s a step of ten layers took 302 ms with XLA's defaults, 297 ms with the latency-hiding scheduler and one
    gather a layer, as these options make it, and 297 ms with nothing divided.
    """
    return {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_all_gather_combine_threshold_bytes": _COMBINED_BYTES,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": _COMBINED_BYTES,
    }


def first_exchange(mesh: Mesh) -> Callable[[jax.Array], Any]:
    """Compiles a program that makes NCCL connect the devices of the mesh before the first step, so that this time is
    not counted as part of it: it sums a number over each group of devices between which the step's collectives run.
    Engine.connect calls it for a mesh of several devices, and runs and times the program.

    The program is called with any float32[] that is whole on every device of the mesh; nothing reads the sums that it
    returns."""
    axes = tuple(axis.name for axis in AXES if mesh.shape[axis.name] > 1)
    groups = [axes] if len(axes) == 1 else [axes, *((axis,) for axis in axes)]

    def sums(number):
        """The sums of `number` over each group of devices."""
        return [jax.lax.psum(number, group) for group in groups]

    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, WHOLE))
    with compiling(mesh):
        return jax.jit(divided(sums, mesh, WHOLE, WHOLE)).lower(number).compile()


class CollectiveSchedule:
    """Gathers weights and scatters gradients of neighbouring layers while a layer computes, in a program that is being
    traced. The stack (layer_forward, layer_backward) makes one for each run of a layer, calls `start` before and
    `finish` after every stage, in order, and reads the results at the end.

    A stage is one segment that the layer runs, in its forward, its recomputation or its backward. Scatters run during
    the first half of the layer's time, because their inputs, whole gradients, are large and are free afterwards.
    Gathers run during the second half, because their outputs, whole weights, are large; without scatters they have all
    of the time. A window is a number of whole stages; a layer with a single stage has both in it.

    Args:
      gathers: the Shards (this device's parts of tensors) to be gathered; may be empty, as may `scatters`.
      scatters: (Shard of a tensor, gradient of the whole tensor) to be scattered.
      stages: the duration of each stage, as the number of multiplications that large products do in that time.

    Attributes:
      gathered: the whole arrays of `gathers`, in their order, after the last stage; [] before they start.
      scattered: this device's parts of the summed gradients, as Shards, in the order of `scatters`, after the last
        stage; [] before they start.
    """

    def __init__(self, gathers: Sequence[Shard], scatters: Sequence[tuple[Shard, jax.Array]], stages: Sequence[float]):
        self._gathers, self._scatters = list(gathers), list(scatters)
        last, half = len(stages) - 1, 0
        if self._scatters:
            passed = itertools.accumulate(stages)
            half = next(stage for stage, work in enumerate(passed) if 2 * work >= sum(stages))
            half = min(half + 1, last)
        self._gather_window, self._scatter_window = (half, last), (0, max(half - 1, 0))
        self.gathered: list[jax.Array] = []
        self.scattered: list[Shard] = []

    def start(self, stage: int, values: Any) -> Any:
        """Starts the collectives that begin with stage number `stage` (from 0) once `values`, the stage's inputs (any
        pytree), are computed. Returns `values` unchanged; the stage must use the returned ones, which an optimization
        barrier ties to the collectives' inputs, so that the stage does not run before these are there."""
        if self._scatters and stage == self._scatter_window[0]:
            gradients, values = optimization_barrier(([gradient for _, gradient in self._scatters], values))
            self.scattered = [scatter(s, g) for (s, _), g in zip(self._scatters, gradients, strict=True)]
        if self._gathers and stage == self._gather_window[0]:
            parts, values = optimization_barrier((self._gathers, values))
            self.gathered = [gather(part) for part in parts]
        return values

    def finish(self, stage: int, values: Any) -> Any:
        """Makes `values`, the results of stage number `stage` (any pytree), wait for the collectives that end with this
        stage. Returns `values` unchanged; later stages must use the returned ones."""
        if self._scatters and stage == self._scatter_window[1]:
            self.scattered, values = optimization_barrier((self.scattered, values))
        if self._gathers and stage == self._gather_window[1]:
            self.gathered, values = optimization_barrier((self.gathered, values))
        return values
