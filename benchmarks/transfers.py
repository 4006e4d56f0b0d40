"""Transfers that are waited for: what the stack's overlapped ones are measured against."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax
from jax.lax import optimization_barrier

from jaxtune.models import stack


class SerialFerry:
    """A Ferry whose cargo has all arrived before the layer's first stage begins."""

    def __init__(self, cargo, stages, space, last_is_thin=False):
        del stages, last_is_thin
        self._pieces, self._structure = jax.tree.flatten(cargo)
        self._space = space

    def depart(self, stage, values):
        if stage == 0 and self._pieces:
            pieces, values = optimization_barrier((self._pieces, values))
            self._pieces, values = optimization_barrier((jax.device_put(pieces, self._space), values))
        return values

    def arrive(self, stage, values):
        del stage
        return values

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
