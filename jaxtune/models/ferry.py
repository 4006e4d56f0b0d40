"""Transfers between device and host, a share of them under each stage of a layer.

XLA's scheduler hides an asynchronous copy under the few products before its end, whatever the copy's size: a large one
started so late is waited for. So the transfers of a layer are cut into pieces, and each piece is bound by
optimization_barriers to the stages (segments of another layer) whose time it should fill: it starts when the first of
them does and is there when the last one ends. The pieces follow one another, so no more than one layer's are in flight.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier

PIECE_BYTES = 128 << 20


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pieces:
    """An array cut along `axis`."""

    arrays: tuple[jax.Array, ...]
    axis: int = dataclasses.field(metadata=dict(static=True))


def cut(array: jax.Array) -> Pieces:
    """Pieces of about PIECE_BYTES along the first axis, or along the second of an array with one row."""
    axis = 0 if array.shape[0] > 1 or array.ndim == 1 else 1
    count = max(1, min(-(-array.nbytes // PIECE_BYTES), array.shape[axis]))
    bounds = [array.shape[axis] * i // count for i in range(count + 1)]
    return Pieces(tuple(jax.lax.slice_in_dim(array, *pair, axis=axis) for pair in itertools.pairwise(bounds)), axis)


def join(pieces: Pieces) -> jax.Array:
    """What `cut` cut."""
    return pieces.arrays[0] if len(pieces.arrays) == 1 else jnp.concatenate(pieces.arrays, axis=pieces.axis)


class Ferry:
    """Carries pieces to `space` during the stages of a layer.

    Args:
      cargo: pytree of arrays, in the order in which they go.
      stages: how long each stage takes, in any unit.
      space: a jax.memory.Space.
    """

    def __init__(self, cargo: Any, stages: Sequence[float], space: Any):
        self._pieces, self._structure = jax.tree.flatten(cargo)
        self._space = space
        self._departures: list[list[int]] = [[] for _ in stages]
        self._arrivals: list[list[int]] = [[] for _ in stages]
        ends = [end / sum(stages) for end in itertools.accumulate(stages)]
        size, gone = sum(piece.nbytes for piece in self._pieces), 0
        for index, piece in enumerate(self._pieces):
            first = next(i for i, end in enumerate(ends) if gone / size < end - 1e-6)
            gone += piece.nbytes
            last = next((i for i, end in enumerate(ends) if gone / size <= end + 1e-6), len(ends) - 1)
            self._departures[first].append(index)
            self._arrivals[max(first, last)].append(index)

    def depart(self, stage: int, values: Any) -> Any:
        """Starts what leaves at the beginning of a stage; `values`, which the stage works on, are there before."""
        indices = self._departures[stage]
        if indices:
            leaving, values = optimization_barrier(([self._pieces[i] for i in indices], values))
            for index, piece in zip(indices, leaving, strict=True):
                self._pieces[index] = jax.device_put(piece, self._space)
        return values

    def arrive(self, stage: int, values: Any) -> Any:
        """Nothing uses `values`, a stage's results, before what arrives with the stage is there."""
        indices = self._arrivals[stage]
        if indices:
            arrived, values = optimization_barrier(([self._pieces[i] for i in indices], values))
            for index, piece in zip(indices, arrived, strict=True):
                self._pieces[index] = piece
        return values

    @property
    def landed(self) -> Any:
        """The cargo, once every stage has ended."""
        return jax.tree.unflatten(self._structure, self._pieces)
