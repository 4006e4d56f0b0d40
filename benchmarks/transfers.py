"""Transfers that are waited for: what the stack's overlapped ones are measured against."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax
from jax.lax import optimization_barrier

from jaxtune.models import stack


class SerialFerry:
    """A Ferry that is waited for: what leaves is gone before the layer's first stage begins; what comes, which is the
    next layer's, is fetched when its last stage has ended, so that it takes no more memory than under it. Compiled for
    an H200, nothing but adapters' thin products runs beside a copy.
    """

    def __init__(self, cargo, stages, space, last_is_thin=False):
        del last_is_thin
        self._pieces, self._structure = jax.tree.flatten(cargo)
        self._space = space
        self._last = len(stages) - 1

    def _carry(self, values):
        if self._pieces:
            pieces, values = optimization_barrier((self._pieces, values))
            self._pieces, values = optimization_barrier((jax.device_put(pieces, self._space), values))
        return values

    def depart(self, stage, values):
        return self._carry(values) if stage == 0 and self._space == jax.memory.Space.Host else values

    def arrive(self, stage, values):
        return self._carry(values) if stage == self._last and self._space == jax.memory.Space.Device else values

    @property
    def landed(self):
        return jax.tree.unflatten(self._structure, self._pieces)


@contextlib.contextmanager
def transfers(how: str) -> Iterator[None]:
    """While tracing: "overlapped", as jaxtune has them, or "serial". The plan and the results are the same."""
    if how not in ("overlapped", "serial"):
        raise ValueError(f"transfers are overlapped or serial, not {how!r}")
    if how == "overlapped":
        yield
        return
    jax.clear_caches()  # layer functions are traced once a process
    with mock.patch.object(stack, "Ferry", SerialFerry):
        yield
    jax.clear_caches()
