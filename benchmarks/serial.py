"""Train steps whose transfers to and from host memory are waited for: what an ablation of their overlap measures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax
from jax.lax import optimization_barrier

from jaxtune.models.stack import stack


class SerialTransfers:
    """A TransferSchedule that is waited for: what leaves is gone before the layer's first stage begins; what comes,
    which is the next layer's, is fetched when its last stage has ended, so that it takes no more memory than under it.
    Compiled for an H200, nothing but adapters' thin products runs beside a copy.
    """

    def __init__(self, arrays, stages, space, last_is_thin=False):
        del last_is_thin
        self._arrays, self._structure = jax.tree.flatten(arrays)
        self._space = space
        self._last = len(stages) - 1

    def _copy(self, values):
        if self._arrays:
            arrays, values = optimization_barrier((self._arrays, values))
            self._arrays, values = optimization_barrier((jax.device_put(arrays, self._space), values))
        return values

    def start(self, stage, values):
        return self._copy(values) if stage == 0 and self._space == jax.memory.Space.Host else values

    def finish(self, stage, values):
        return self._copy(values) if stage == self._last and self._space == jax.memory.Space.Device else values

    @property
    def arrays(self):
        return jax.tree.unflatten(self._structure, self._arrays)


@contextlib.contextmanager
def serial_transfers() -> Iterator[None]:
    """While tracing: a model whose transfers do not overlap with compute. The plan and the results are the same."""
    jax.clear_caches()  # layer functions are traced once a process
    with mock.patch.object(stack, "TransferSchedule", SerialTransfers):
        yield
    jax.clear_caches()
