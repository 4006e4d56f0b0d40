"""Schedules copies between device and host memory while a layer computes, so that offloaded residuals cost little time:
`cut` divides an array into Pieces, a TransferSchedule copies them in `windows`, and `join` makes the array again.

A stage is one segment that a layer runs. Each copy is bound by optimization_barriers to a window of stages of another
layer than the one whose residuals are copied: it starts within the window and is complete when the window's last stage
ends. Windows follow one another and are chosen by the durations of copies and stages (`windows`). Copies to the device
are as late as possible and copies to the host end as early as possible, so that little memory is used in both places.
The stack (models/stack.py) calls all of this: its rules for all layers call `cut` and `join`, and its programs of one
layer (layer_forward and layer_backward) make the TransferSchedules.

Without this, XLA's scheduler starts a copy five kernels before its end, whatever the sizes of kernels and copy, and
allows two copies at a time. By compiled schedules (not by a trace), an 8B step in 24 GB then waited for 91 ms, and a
row of 65,536 tokens for 1.1 s. Therefore the kernels of a layer count as nothing (`copies_start_at_once`), which makes
a copy start where its window begins, and the step's compiler options allow more copies at a time (`IN_FLIGHT`).

What did not help, by programs compiled for an H200: without that scheduler every copy is waited for; with XLA's
analytical latency estimator twice as much is waited for as with the default one; and, before copies started at once,
pieces of 128 MiB."""

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
    """Returns a context in which XLA's scheduler takes every traced kernel to last a microsecond, so that it starts
    copies at once. The stack traces the forward and the backward of every layer in it.

    Layers without copies use it as well. XLA chooses the algorithm of a matrix product by the text of its instruction,
    and this setting is part of that text. With the same text everywhere, different plans give the same bits.
    """
    return set_xla_metadata(latency_metadata="1000")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pieces:
    """An array that was cut along one of its axes into slices (`cut`), which are copied one by one and joined later
    (`join`), because one large copy does not fit under a single stage of computation."""

    arrays: tuple[jax.Array, ...]  # the slices, in order
    axis: int = dataclasses.field(metadata=dict(static=True))  # the axis along which the array was cut and is joined


def cut(arrays: Sequence[jax.Array], stages: Sequence[float]) -> tuple[Pieces, ...]:
    """Cuts each array into slices that are copied while a layer computes, so that each copy fits under one of its
    stages: one Pieces for each array.

    Arrays are cut along the first axis, or along the second if the first has size 1 and there is a second. A slice has
    at most about PIECE_BYTES (512 MiB), or as many bytes as can be copied during the longest stage if these are more.
    Slices are larger only where the axis has too few indices. The stack's forward cuts offloaded residuals.

    Args:
      arrays: on the device.
      stages: the durations of a layer's stages, as the number of multiplications that large products do in that time.
    """
    piece = max(PIECE_BYTES, int(max(stages) / _MULTIPLICATIONS_PER_BYTE))
    return tuple(_cut(array, piece) for array in arrays)


def _cut(array: jax.Array, piece_bytes: int) -> Pieces:
    """Cuts an array along its first axis (or its second, if the first has size 1 and there is a second) into slices of
    at most about `piece_bytes` (more if the axis is too short), so that each can be copied while a stage computes. The
    result has the slices and the axis, from which `join` makes the array again. An array of at most `piece_bytes` stays
    one slice."""
    axis = 0 if array.shape[0] > 1 or array.ndim == 1 else 1
    count = max(1, min(-(-array.nbytes // piece_bytes), array.shape[axis]))
    bounds = [array.shape[axis] * i // count for i in range(count + 1)]
    return Pieces(tuple(jax.lax.slice_in_dim(array, *pair, axis=axis) for pair in itertools.pairwise(bounds)), axis)


def join(pieces: Pieces) -> jax.Array:
    """Joins the slices of `pieces`, after they were copied, to the array that `cut` had cut, of the same shape and
    dtype; a single slice is returned without a copy. The stack's backward makes offloaded residuals whole by it."""
    return pieces.arrays[0] if len(pieces.arrays) == 1 else jnp.concatenate(pieces.arrays, axis=pieces.axis)


def windows(sizes: Sequence[int], stages: Sequence[float], late: bool = False) -> list[tuple[int, int]]:
    """Chooses for each copy the window, the consecutive stages during which it runs: (index of the first stage, index
    of the last stage) for each copy. Consecutive copies may share a window, and windows follow one another.
    TransferSchedule starts and ends its copies by them.

    The choice minimises the time that the device waits for copies and, with a hundredth of that weight, the time for
    which copies occupy memory in both places, weighted by their bytes. If the copies take longer than all stages, all
    stages are taken to last longer by the same factor.

    Args:
      sizes: bytes of the copies, in order.
      stages: durations of the stages, as the number of multiplications that large products do in that time.
      late: True: the copies are to the device, where their destination is occupied from the beginning of the window, so
        that late windows are better. False: they are to the host, and their source in device memory is occupied until
        the end of the window, so that early windows are better.
    """
    count = len(sizes)
    needs = [size * _MULTIPLICATIONS_PER_BYTE * _ROOM for size in sizes]
    # If the copies take longer than all stages, every stage is stretched by the same factor.
    longer = max(sum(needs) / sum(stages), 1.0)
    bounds = [0.0, *itertools.accumulate(stage * longer for stage in stages)]

    @functools.cache
    def best(first_copy: int, first_stage: int) -> tuple[float, int, int]:
        """(cost of the copies from first_copy on, end of the copies of their first window, end of that window)"""
        if first_copy == count:
            return 0.0, count, first_stage
        found = (math.inf, count, first_stage)
        ends = range(first_stage + 1, len(bounds))
        for end_stage in reversed(ends) if late else ends:  # the longest window among equal ones
            begins, until = bounds[first_stage], bounds[end_stage]
            for end_copy in range(first_copy, count + 1):
                need = sum(needs[first_copy:end_copy])
                occupied = need * ((bounds[-1] - begins) if late else until) / bounds[-1]
                cost = max(need - (until - begins), 0.0) + 0.01 * occupied + best(end_copy, end_stage)[0]
                if cost < found[0]:
                    found = cost, end_copy, end_stage
        return found

    chosen: list[tuple[int, int]] = []
    stage = 0
    while len(chosen) < count:
        _, end_copy, end_stage = best(len(chosen), stage)
        chosen += [(stage, end_stage - 1)] * (end_copy - len(chosen))
        stage = end_stage
    return chosen


class TransferSchedule:
    """Copies arrays to device or host memory while a layer computes, in a program that is being traced. The layer's
    program (layer_forward or layer_backward) calls `start` before and `finish` after each of its stages, and reads the
    copies, `arrays`, at the end. Large arrays are copied first on the way to the host, and last on the way to the
    device, so that they occupy device memory for a shorter time.

    Args:
      arrays: a pytree of arrays, such as Pieces of residuals.
      stages: the duration of each stage of the layer, as the number of multiplications that large products do in that
        time.
      space: the destination, jax.memory.Space.Host or .Device.
      last_is_thin: True: the last stage has only thin products that nothing but the next layer waits for (adapter
        gradients at the end of a backward), and gets copies only if the other stages have no time for them; False: it
        is used as the others.
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
        """Starts the copies whose windows begin with stage number `stage` (from 0) once `values`, the stage's inputs
        (any pytree), are computed. Returns `values` unchanged; the stage must use the returned ones, so that it does
        not start before the copies."""
        indices = self._starting[stage]
        if indices:
            sources, values = optimization_barrier(([self._arrays[i] for i in indices], values))
            for index, array in zip(indices, sources, strict=True):
                self._arrays[index] = jax.device_put(array, self._space)
        return values

    def finish(self, stage: int, values: Any) -> Any:
        """Makes `values`, the results of stage number `stage` (any pytree), wait for the copies whose windows end with
        this stage. Returns `values` unchanged; later stages must use the returned ones."""
        indices = self._ending[stage]
        if indices:
            copies, values = optimization_barrier(([self._arrays[i] for i in indices], values))
            for index, array in zip(indices, copies, strict=True):
                self._arrays[index] = array
        return values

    @property
    def arrays(self) -> Any:
        """The copies, as a pytree with the structure of the argument `arrays`. They are read after every stage has
        ended: layer_forward and layer_backward return them. Pieces among them are still cut; _stack_bwd joins those
        that layer_backward copied, before it runs the next layer's backward."""
        return jax.tree.unflatten(self._structure, self._arrays)
