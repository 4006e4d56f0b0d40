"""Picks an implementation of an op, and says why it refused the others.

Each op keeps an ordered table {name: implementation}, the fastest first and `reference` last. An explicit
`implementation=` never falls back; None takes the first that supports the call.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping

import jax

logger = logging.getLogger(__name__)

# The implementations of an op, the first choice first: name -> why it refuses the call, or None where it supports it.
Table = Mapping[str, Callable[[], str | None]]

# op -> (chosen implementation, {refused implementation: why}) of the latest choice; read by tests and `jaxtune info`.
record: dict[str, tuple[str, dict[str, str]]] = {}


@functools.cache
def _device_capability(platform: str) -> tuple[int, int] | None:
    if platform != "gpu":
        return None
    text = getattr(jax.local_devices(backend="gpu")[0], "compute_capability", None)
    if not text:
        return None
    major, minor = str(text).split(".")
    return int(major), int(minor)


_target: tuple[int, int] | None = None


def compute_capability() -> tuple[int, int] | None:
    """(major, minor) of the NVIDIA GPU to lower for, or None: the machine's, unless `compile_for` names another."""
    return _target if _target is not None else _device_capability(jax.default_backend())


def multiprocessors() -> int:
    """How many multiprocessors the GPU to lower for has."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        return described.num_cores
    if _target is not None:
        return 132  # no more is known of it: as many as an H100 or H200
    return jax.local_devices(backend="gpu")[0].core_count


@contextlib.contextmanager
def compile_for(capability: tuple[int, int]):
    """Choose implementations as if the machine had a GPU of this compute capability: to compile where there is none."""
    global _target
    before, _target = _target, capability
    try:
        yield
    finally:
        _target = before


@functools.cache
def _say_once(op: str, name: str, refused: tuple[tuple[str, str], ...]) -> None:
    """A GPU's owner wants to know what keeps the faster implementation away."""
    reasons = "; ".join(f"{other}: {reason}" for other, reason in refused)
    logger.warning("%s runs on %s (%s)", op, name, reasons)


def choose(op: str, table: Table, implementation: str | None) -> str:
    """Name of the implementation to run.

    Args:
      table: the implementations, see Table.
      implementation: an explicit name, or None for the first that supports the call.
    Raises:
      ValueError: the explicit name is unknown or refuses the call.
    """
    if implementation is not None:
        if implementation not in table:
            raise ValueError(f"{op}: no implementation {implementation!r}; there are {', '.join(table)}")
        reason = table[implementation]()
        if reason is not None:
            raise ValueError(f"{op}: implementation {implementation!r} cannot serve this call: {reason}")
        record[op] = (implementation, {})
        return implementation
    refused: dict[str, str] = {}
    for name, refuse in table.items():
        reason = refuse()
        if reason is None:
            record[op] = (name, refused)
            if refused and compute_capability() is not None:
                _say_once(op, name, tuple(refused.items()))
            return name
        refused[name] = reason
    raise ValueError(f"{op}: no implementation supports this call: {refused}")
