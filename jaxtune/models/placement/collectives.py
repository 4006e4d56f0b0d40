"""Schedules the gathers of divided weights and the scatters of their gradients while another layer computes.

Optimization barriers bind each to a window of stages (segments of that layer): beside a layer, the next layer's weights
are gathered, and the gradients of the layer before are scattered. XLA combines collectives that start at one place.
Where its scheduler chose the place, gathers overlapped with only two thin products. Peer-to-peer copies, which take no
multiprocessors, did not help: joining the parts takes as long as they save.
"""

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
    """XLA's options for GPU programs that gather divided weights: the latency-hiding scheduler, and gathers and
    scatters that start at one place combined up to 8 GiB.
    """
    return {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_all_gather_combine_threshold_bytes": _COMBINED_BYTES,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": _COMBINED_BYTES,
    }


def first_exchange(mesh: Mesh) -> Callable[[jax.Array], Any]:
    """Compiles a program that makes NCCL connect the devices of each group over which a step's collectives run. Call it
    with a float32[] that every device has whole.
    """
    axes = tuple(axis.name for axis in AXES if mesh.shape[axis.name] > 1)
    groups = [axes] if len(axes) == 1 else [axes, *((axis,) for axis in axes)]

    def sums(number):
        return [jax.lax.psum(number, group) for group in groups]

    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, WHOLE))
    with compiling(mesh):
        return jax.jit(divided(sums, mesh, WHOLE, WHOLE)).lower(number).compile()


class CollectiveSchedule:
    """Gathers weights and scatters gradients of neighbouring layers while a layer computes, in a traced program. Call
    `start` before and `finish` after every stage, in order, and read the results at the end.

    Scatters run in the first half of the layer's time, because their inputs are large and free afterwards; gathers in
    the second half, or all of it without scatters, because their outputs are large.

      stages: durations, in multiplications that large products do in that time.

    Attributes:
      gathered: the whole arrays of `gathers` after the last stage.
      scattered: this device's parts of the summed gradients of `scatters`.
    """

    def __init__(self, gathers: Sequence[Shard], scatters: Sequence[tuple[Shard, jax.Array]], stages: Sequence[float]):
        self._gathers, self._scatters = list(gathers), list(scatters)
        last, half = len(stages) - 1, 0
        if self._scatters:
            elapsed = itertools.accumulate(stages)
            half = next(stage for stage, work in enumerate(elapsed) if 2 * work >= sum(stages))
            half = min(half + 1, last)
        self._gather_window, self._scatter_window = (half, last), (0, max(half - 1, 0))
        self.gathered: list[jax.Array] = []
        self.scattered: list[Shard] = []

    def start(self, stage: int, values: Any) -> Any:
        """Starts the collectives of a stage once its inputs are computed. Returns `values`, which the stage must use
        instead, so that it does not run earlier.
        """
        if self._scatters and stage == self._scatter_window[0]:
            gradients, values = optimization_barrier(([gradient for _, gradient in self._scatters], values))
            self.scattered = [scatter(s, g) for (s, _), g in zip(self._scatters, gradients, strict=True)]
        if self._gathers and stage == self._gather_window[0]:
            sources, values = optimization_barrier((self._gathers, values))
            self.gathered = [gather(shard) for shard in sources]
        return values

    def finish(self, stage: int, values: Any) -> Any:
        """Makes a stage's results wait for the collectives that end with it. Returns `values`, which later stages must
        use instead.
        """
        if self._scatters and stage == self._scatter_window[1]:
            self.scattered, values = optimization_barrier((self.scattered, values))
        if self._gathers and stage == self._gather_window[1]:
            self.gathered, values = optimization_barrier((self.gathered, values))
        return values
