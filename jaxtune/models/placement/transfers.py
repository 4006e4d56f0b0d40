"""Schedules copies between device and host memory while a layer computes, so that offloaded residuals cost little time.

Optimization barriers bind each copy to a window of stages (segments) of another layer than its own, as late as possible
to the device and as early as possible to the host, to use little memory in both places. XLA's scheduler alone starts a
copy five kernels before its end, whatever their sizes, and allows two at a time; an 8B step in 24 GB then waited for 91
ms. Therefore a layer's kernels count as nothing (`copies_start_at_once`), and more copies run at a time (IN_FLIGHT).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jax.lax import optimization_barrier

# Arrays of up to this size are never cut, because pieces must be joined again.
PIECE_BYTES = 512 << 20
# Multiplications of large products in the time that a byte takes to or from the host: on an H200, 350e12 and 54e9 a
# second.
_MULTIPLICATIONS_PER_BYTE = 6500
_ROOM = 1.1  # windows allow a copy this much more time than it should take
# The compiler option by which XLA runs up to 64 copies at a time (xla_options.py); windows have fewer.
IN_FLIGHT = {"xla_gpu_experimental_parallel_async_compute_limit": 64}
# The compiler option by which XLA leaves out its own pass of rematerialization. The pass counts what is in host
# memory as if it were on the device. So where a plan offloads much it finds too much for a small card, looks for
# minutes for what could be computed again (a 32B's step on 24 GB took 306 s to compile with it, and 69 s without),
# and computes some of it again, which saves nothing. What is computed again is for the plan to say.
NO_REMATERIALIZATION = {"xla_disable_hlo_passes": "rematerialization"}


def copies_start_at_once() -> contextlib.AbstractContextManager:
    """A context in which XLA's scheduler takes every traced kernel to last a microsecond, so that copies start at once.
    Layers without copies need it, too: XLA chooses a product's algorithm by the text of its instruction, and equal
    texts give different plans the same bits.
    """
    return set_xla_metadata(latency_metadata="1000")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pieces:
    """An array cut into slices, because one large copy does not fit under a single stage."""

    arrays: tuple[jax.Array, ...]  # the slices, in order
    axis: int = dataclasses.field(metadata=dict(static=True))  # the axis along which the array was cut and is joined


def cut(arrays: Sequence[jax.Array], stages: Sequence[float]) -> tuple[Pieces, ...]:
    """Cuts each array along its first axis (its second if the first has size 1) into slices of about 512 MiB, or as
    many bytes as can be copied during the longest stage. Short axes give larger slices.

      stages: durations, in multiplications that large products do in that time.
    """
    piece = max(PIECE_BYTES, int(max(stages) / _MULTIPLICATIONS_PER_BYTE))
    return tuple(_cut(array, piece) for array in arrays)


def _cut(array: jax.Array, piece_bytes: int) -> Pieces:
    axis = 0 if array.shape[0] > 1 or array.ndim == 1 else 1
    count = max(1, min(-(-array.nbytes // piece_bytes), array.shape[axis]))
    bounds = [array.shape[axis] * i // count for i in range(count + 1)]
    return Pieces(tuple(jax.lax.slice_in_dim(array, *pair, axis=axis) for pair in itertools.pairwise(bounds)), axis)


def join(pieces: Pieces) -> jax.Array:
    """The array that `cut` had cut; a single slice is not copied."""
    return pieces.arrays[0] if len(pieces.arrays) == 1 else jnp.concatenate(pieces.arrays, axis=pieces.axis)


def windows(sizes: Sequence[int], stages: Sequence[float], late: bool = False) -> list[tuple[int, int]]:
    """(first stage, last stage) for each copy; consecutive copies may share a window, and windows follow one another.
    Minimises the time that the device waits and, with a hundredth of that weight, the byte-time for which copies occupy
    memory in both places.

      sizes: bytes of the copies, in order.
      stages: durations, in multiplications that large products do in that time; stretched if the copies take longer.
      late: True to the device, whose memory is occupied from the window's beginning; False to the host, whose source is
        occupied until its end.
    """
    count = len(sizes)
    copy_times = [size * _MULTIPLICATIONS_PER_BYTE * _ROOM for size in sizes]
    # If the copies take longer than all stages, every stage is stretched by the same factor.
    stretch = max(sum(copy_times) / sum(stages), 1.0)
    bounds = [0.0, *itertools.accumulate(stage * stretch for stage in stages)]

    @functools.cache
    def best(first_copy: int, first_stage: int) -> tuple[float, int, int]:
        """(cost of the copies from first_copy on, end of the first window's copies, end of that window)."""
        if first_copy == count:
            return 0.0, count, first_stage
        best_choice = (math.inf, count, first_stage)
        ends = range(first_stage + 1, len(bounds))
        for end_stage in reversed(ends) if late else ends:  # the longest window among equal ones
            begins, until = bounds[first_stage], bounds[end_stage]
            for end_copy in range(first_copy, count + 1):
                need = sum(copy_times[first_copy:end_copy])
                occupied = need * ((bounds[-1] - begins) if late else until) / bounds[-1]
                cost = max(need - (until - begins), 0.0) + 0.01 * occupied + best(end_copy, end_stage)[0]
                if cost < best_choice[0]:
                    best_choice = cost, end_copy, end_stage
        return best_choice

    result: list[tuple[int, int]] = []
    stage = 0
    while len(result) < count:
        _, end_copy, end_stage = best(len(result), stage)
        result += [(stage, end_stage - 1)] * (end_copy - len(result))
        stage = end_stage
    return result


class TransferSchedule:
    """Copies arrays to device or host memory while a layer computes, in a traced program. Call `start` before and
    `finish` after each stage, and read `arrays` at the end. Large arrays go to the host first and to the device last.

      arrays: a pytree, such as Pieces.
      stages: durations, in multiplications that large products do in that time.
      space: jax.memory.Space.Host or .Device.
      last_is_thin: the last stage has only thin products (a backward's adapter gradients) and gets copies only if the
        others lack time.
    """

    def __init__(self, arrays: Any, stages: Sequence[float], space: Any, last_is_thin: bool = False):
        self._arrays, self._structure = jax.tree.flatten(arrays)
        self._space = space
        self._starting: list[list[int]] = [[] for _ in stages]
        self._ending: list[list[int]] = [[] for _ in stages]
        sizes = [array.nbytes for array in self._arrays]
        if last_is_thin and sum(sizes) * _MULTIPLICATIONS_PER_BYTE * _ROOM < sum(stages[:-1]):
            stages = stages[:-1]
        late = space == jax.memory.Space.Device
        order = sorted(range(len(sizes)), key=lambda index: sizes[index], reverse=not late)
        for index, (first, last) in zip(order, windows([sizes[index] for index in order], stages, late), strict=True):
            self._starting[first].append(index)
            self._ending[last].append(index)

    def start(self, stage: int, values: Any) -> Any:
        """Starts a stage's copies once its inputs are computed. Returns `values`, which the stage must use instead."""
        indices = self._starting[stage]
        if indices:
            sources, values = optimization_barrier(([self._arrays[i] for i in indices], values))
            for index, array in zip(indices, sources, strict=True):
                self._arrays[index] = jax.device_put(array, self._space)
        return values

    def finish(self, stage: int, values: Any) -> Any:
        """Makes a stage's results wait for the copies that end with it. Returns `values`, which later stages must use
        instead.
        """
        indices = self._ending[stage]
        if indices:
            copies, values = optimization_barrier(([self._arrays[i] for i in indices], values))
            for index, array in zip(indices, copies, strict=True):
                self._arrays[index] = array
        return values

    @property
    def arrays(self) -> Any:
        """The copies, after every stage has ended; Pieces are still cut."""
        return jax.tree.unflatten(self._structure, self._arrays)
