"""Transfers between device and host, each under stages of a layer that take as long.

Each copy is bound by optimization_barriers to a window of stages (segments of another layer): it starts within it and
is there when its last stage ends. Windows follow one another and are chosen by how long copies and stages take
(`windows`): as late as possible for what comes, and over as early for what leaves, so that little memory is in both
places.

Left alone, XLA's scheduler starts a copy five kernels before its end, thin ones and wide ones alike, whatever the
copy's size, and lets two be in flight. By compiled schedules, not by a trace, an 8B step in 24 GB waited for 91 ms so,
a row of 65,536 tokens for 1.1 s. Hence a layer's kernels count as nothing (`copies_start_at_once`), which makes a copy
start where its window begins, and the step's compiler options let more be in flight (`IN_FLIGHT`).

What did not help, by programs compiled for an H200: without that scheduler every copy is waited for; with its
analytical estimator of latencies, twice as much as with its own; and, before copies started at once, pieces of 128 MiB.
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

# Of a piece, at least: smaller ones must be joined again.
PIECE_BYTES = 512 << 20
# Multiplications of large products in the time of a byte to or from the host: of an H200, 350e12 and 54e9 a second.
_MULTIPLICATIONS_PER_BYTE = 6500
_ROOM = 1.1  # a copy may take that much longer
# Copies at once, more than any window has.
IN_FLIGHT = {"xla_gpu_experimental_parallel_async_compute_limit": 64}


def copies_start_at_once() -> contextlib.AbstractContextManager:
    """Kernels traced here count as a microsecond for XLA's scheduler.

    Those of every layer, with copies or without: XLA chooses a product's algorithm by its instruction's text, in which
    this stands, and plans should differ in no bit.
    """
    return set_xla_metadata(latency_metadata="1000")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pieces:
    """An array cut along `axis`."""

    arrays: tuple[jax.Array, ...]
    axis: int = dataclasses.field(metadata=dict(static=True))


def cut(arrays: Sequence[jax.Array], stages: Sequence[float]) -> tuple[Pieces, ...]:
    """Pieces of each array, to be copied under `stages`, in multiplications.

    Along the first axis, or along the second of an array with one row; no smaller than what the longest stage covers.
    """
    piece = max(PIECE_BYTES, int(max(stages) / _MULTIPLICATIONS_PER_BYTE))
    return tuple(_cut(array, piece) for array in arrays)


def _cut(array: jax.Array, piece_bytes: int) -> Pieces:
    axis = 0 if array.shape[0] > 1 or array.ndim == 1 else 1
    count = max(1, min(-(-array.nbytes // piece_bytes), array.shape[axis]))
    bounds = [array.shape[axis] * i // count for i in range(count + 1)]
    return Pieces(tuple(jax.lax.slice_in_dim(array, *pair, axis=axis) for pair in itertools.pairwise(bounds)), axis)


def join(pieces: Pieces) -> jax.Array:
    """What `cut` cut."""
    return pieces.arrays[0] if len(pieces.arrays) == 1 else jnp.concatenate(pieces.arrays, axis=pieces.axis)


def windows(sizes: Sequence[int], stages: Sequence[float], late: bool = False) -> list[tuple[int, int]]:
    """(first, last) stage of the window of each copy, copies in order: those under which least is waited for.

    Of equal ones, those that hold both places of a copy for the shortest time.

    Args:
      sizes: bytes of the copies.
      stages: multiplications of the stages.
      late: a copy's second place is held from its window's beginning; otherwise its first place until the window's end.
    """
    count = len(sizes)
    needs = [size * _MULTIPLICATIONS_PER_BYTE * _ROOM for size in sizes]
    # Where copies take longer than all stages, each window waits for as large a share: none ends before its stages do.
    longer = max(sum(needs) / sum(stages), 1.0)
    bounds = [0.0, *itertools.accumulate(stage * longer for stage in stages)]

    @functools.cache
    def best(first_copy: int, first_stage: int) -> tuple[float, int, int]:
        """(cost of what begins here, one past the copies of its first window, one past that window's stages)"""
        if first_copy == count:
            return 0.0, count, first_stage
        found = (math.inf, count, first_stage)
        ends = range(first_stage + 1, len(bounds))
        for end_stage in reversed(ends) if late else ends:  # of equal ones, the longest window that is as late
            begins, until = bounds[first_stage], bounds[end_stage]
            for end_copy in range(first_copy, count + 1):
                need = sum(needs[first_copy:end_copy])
                held = need * ((bounds[-1] - begins) if late else until) / bounds[-1]
                cost = max(need - (until - begins), 0.0) + 0.01 * held + best(end_copy, end_stage)[0]
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
    """Copies arrays to `space` during the stages of a layer.

    Args:
      arrays: a pytree of them.
      stages: how long each stage takes, in multiplications. The last of several has nothing that waits for its end but
        the next layer (a backward: thin products of adapters' gradients, put off until then), and copies only what has
        no time elsewhere if `last_is_thin`.
      space: a jax.memory.Space.
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
        """Starts the copies of a stage at its beginning; `values`, which the stage works on, are there before."""
        indices = self._starting[stage]
        if indices:
            leaving, values = optimization_barrier(([self._arrays[i] for i in indices], values))
            for index, array in zip(indices, leaving, strict=True):
                self._arrays[index] = jax.device_put(array, self._space)
        return values

    def finish(self, stage: int, values: Any) -> Any:
        """Nothing uses `values`, a stage's results, before the copies that end with the stage are there."""
        indices = self._ending[stage]
        if indices:
            arrived, values = optimization_barrier(([self._arrays[i] for i in indices], values))
            for index, array in zip(indices, arrived, strict=True):
                self._arrays[index] = array
        return values

    @property
    def arrays(self) -> Any:
        """The copies, once every stage has ended."""
        return jax.tree.unflatten(self._structure, self._arrays)
