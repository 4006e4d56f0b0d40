"""Gathers of divided weights and scatters of their gradients, under stages of another layer.

Each is bound by optimization_barriers to a window of stages, as copies to and from the host are (transfers.py): a layer
gathers the weights of the one that runs next, and while the backward runs it scatters the gradients of the one before.
XLA makes one collective of all that start together (`compiler_options`), which is asynchronous and has the window's
products to hide under. Left to XLA's scheduler, the backward's gathers had two thin products above them.

What did not help: copies from GPU to GPU in place of a gather's kernels, which take multiprocessors from the products
(collective-permute in XLA's peer-memory mode, and one kernel that joins the parts). On two H200s a step of 8B LoRA took
968 ms with them and 965 ms without: its products and attention took 13 ms less and 4 ms less were waited for, but to
join the parts took 14 ms, and 6 ms more were idle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier
from jax.sharding import Mesh, NamedSharding

from jaxtune.models.placement.partition import DATA, FSDP, WHOLE, Shard, compiling, divided, gather, scatter

# Bytes of a layer's gathered weights, and of its gradients in float32, that XLA may make one collective of.
_COMBINED_BYTES = 8 << 30


def compiler_options() -> dict[str, Any]:
    """XLA's options for a program that gathers. On two H200s a step of ten layers took 302 ms by XLA's defaults, 297 ms
    with its scheduler that hides latencies and one gather a layer, and 297 ms with nothing divided."""
    return {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_all_gather_combine_threshold_bytes": _COMBINED_BYTES,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": _COMBINED_BYTES,
    }


def first_exchange(mesh: Mesh) -> Callable[[jax.Array], Any]:
    """A compiled program that exchanges a number within each group of devices that a step's collectives have: NCCL
    connects the devices of a group at the first one."""
    axes = tuple(axis for axis in (DATA, FSDP) if mesh.shape[axis] > 1)
    groups = [axes] if len(axes) == 1 else [axes, *((axis,) for axis in axes)]

    def sums(number):
        return [jax.lax.psum(number, group) for group in groups]

    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, WHOLE))
    with compiling(mesh):
        return jax.jit(divided(sums, mesh, WHOLE, WHOLE)).lower(number).compile()


class CollectiveSchedule:
    """Gathers and scatters during the stages of a layer. Scatters come first, for what they take is large; gathers
    after them, for what they give is.

    Args:
      gathers: to be gathered. scatters: (the Shard of a tensor, its gradient), to be scattered.
      stages: how long each stage takes.
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
        """Starts what begins with a stage; `values`, which the stage works on, are there before."""
        if self._scatters and stage == self._scatter_window[0]:
            gradients, values = optimization_barrier(([gradient for _, gradient in self._scatters], values))
            self.scattered = [scatter(s, g) for (s, _), g in zip(self._scatters, gradients, strict=True)]
        if self._gathers and stage == self._gather_window[0]:
            parts, values = optimization_barrier((self._gathers, values))
            self.gathered = [gather(part) for part in parts]
        return values

    def finish(self, stage: int, values: Any) -> Any:
        """Nothing uses `values`, a stage's results, before what ends with the stage is there."""
        if self._scatters and stage == self._scatter_window[1]:
            self.scattered, values = optimization_barrier((self.scattered, values))
        if self._gathers and stage == self._gather_window[1]:
            self.gathered, values = optimization_barrier((self.gathered, values))
        return values
