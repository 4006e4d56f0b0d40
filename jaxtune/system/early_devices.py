"""Starts JAX's devices in a thread, while the main thread imports and reads files: CUDA's context takes a second."""

from __future__ import annotations

from jaxtune.system import early_import, host_memory, timing


def begin() -> None:
    """Lets XLA pin host memory, and starts the devices. What fails is said to whoever uses them. Not for one of several
    processes, which must join the others first.
    """
    host_memory.allow_pinned()
    early_import.begin(_start)


def _start() -> None:
    import jax
    import numpy as np

    with timing.phase("devices"):
        jax.block_until_ready(jax.device_put(np.zeros(1)))  # a first transfer starts more than the devices do
